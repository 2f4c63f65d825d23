"""The path is the best that works, or the one that is required, or an error that says why it cannot be had."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from storage.test_staged import LateEngine
from torchstorm import storage
from torchstorm.errors import ConfigError, DeviceError, StorageError, UnsupportedError
from torchstorm.storage import choice
from torchstorm.storage.backend import Backend, BackendInfo
from torchstorm.storage.choice import open_file
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.layout import Kind
from torchstorm.storage.volume import Volume

CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 2**13)
    return tmp_path / "file"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"require": "teleport"}, "the paths are direct, buffered, staged, gds, xnvme"),
        ({"require": "gds"}, "path to a GPU, but device='cpu'"),
        ({"require": "staged"}, "path to a GPU"),
        ({"require": "xnvme", "create": True}, "takes a device that is there"),
    ],
)
def test_a_path_that_cannot_be_meant_is_refused(path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_file(path, **options)


def test_a_device_that_is_not_there_is_refused(path: Path) -> None:
    with pytest.raises(DeviceError, match="mps"):
        open_file(path, device="mps")


def test_what_is_required_is_what_the_counters_say(path: Path) -> None:
    for require in ("direct", "buffered"):
        file = open_file(path, require=require)
        file.read_into(torch.empty(2**20, dtype=torch.uint8), 0)
        info = storage.info(file)
        file.close()
        assert info.path == require
        counters = info.counters
        assert (counters.direct_read_bytes > 0) == (require == "direct")
        assert (counters.buffered_read_bytes > 0) == (require == "buffered")


def test_direct_is_refused_where_the_file_system_does(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = DirectFile(path, direct=False).info()
    monkeypatch.setattr(DirectFile, "info", lambda self: told)
    with pytest.raises(StorageError, match="require='direct', but asked for"):
        open_file(path, require="direct")


def test_xnvme_needs_a_device_and_its_library(path: Path) -> None:
    with pytest.raises((StorageError, UnsupportedError)):
        open_file(path, require="xnvme")


def above(path: Path, require: str | None) -> Backend:
    return choice._above(DirectFile(path), CPU, LateEngine(), None, require, read_only=True)


class Gds:
    """Stands for a `GdsFile` that works."""

    def __init__(self, below: Backend) -> None:
        self.path, self.device, self.below = below.path, below.device, below

    def read_into(self, out: torch.Tensor, offset: int) -> None:
        self.below.read_into(out, offset)

    def info(self) -> BackendInfo:
        return BackendInfo(path="gds", reason="", counters=self.below.info().counters)

    def close(self) -> None:
        self.below.close()


def no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "torchstorm-staged"]


def test_for_a_gpu_gds_that_cannot_be_proven_leaves_the_ring_which_says_why(path: Path) -> None:
    file = above(path, None)
    out = torch.empty(2**20, dtype=torch.uint8)
    file.read_into(out, 0)
    info = file.info()
    assert info.path == "staged"
    assert "no GPUDirect Storage: " in info.reason  # on this machine, for real
    assert info.counters.link_in_bytes == out.nbytes
    assert out[:256].tolist() == list(range(256))
    file.close()
    with pytest.raises(StorageError, match=r"require='gds', but .*no GPUDirect Storage: "):
        above(path, "gds")
    file = above(path, "staged")
    assert "asked for" in file.info().reason
    file.close()
    assert no_thread_is_left()


@pytest.mark.parametrize("faster", ["staged", "gds"])
def test_of_two_that_work_the_faster_one_is_taken(path: Path, faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "open_gds", lambda below, **_: Gds(below))
    rates = {"staged": 2e9, "gds": 1e9} if faster == "staged" else {"staged": 1e9, "gds": 2e9}
    monkeypatch.setattr(choice, "_rate", lambda file, device: rates[file.info().path])
    file = above(path, None)
    assert file.info().path == faster
    if faster == "staged":
        assert "faster than GPUDirect Storage in a trial" in file.info().reason
    out = torch.empty(256, dtype=torch.uint8)
    file.read_into(out, 512)
    assert out.tolist() == list(range(256))
    file.close()
    required = above(path, "gds")
    assert required.info().path == "gds"
    required.close()
    assert no_thread_is_left()


def test_a_trial_reads_the_file_and_a_file_too_short_tells_nothing(path: Path, tmp_path: Path) -> None:
    file = DirectFile(path)
    assert choice._rate(file, CPU) > 0
    assert file.info().counters.direct_read_bytes + file.info().counters.buffered_read_bytes >= 3 * 2**20
    file.close()
    (tmp_path / "short").write_bytes(b"x")
    file = DirectFile(tmp_path / "short")
    assert choice._rate(file, CPU) == 0
    file.close()


def test_a_volume_tells_its_path(tmp_path: Path) -> None:
    with Volume.create(tmp_path / "v", {"x": Kind(dtype=torch.uint8, length=5)}, require="buffered") as volume:
        assert storage.info(volume).path == "buffered"
    with pytest.raises(ConfigError, match="path to a GPU"):
        Volume.open(tmp_path / "v", require="gds")
