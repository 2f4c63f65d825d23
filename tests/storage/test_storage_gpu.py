"""Volumes, files and the loader with a real GPU: the same bytes, streams that wait, and checks on the way."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchstorm.errors import ConfigError, CorruptionError, DeviceError
from torchstorm.storage.choice import open_file
from torchstorm.storage.layout import Kind
from torchstorm.storage.loader import NVMeDataLoader
from torchstorm.storage.volume import Volume

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    kinds = {
        "rows": Kind(dtype=torch.float32, shape=(1000, 7), length=500),
        "labels": Kind(dtype=torch.int64, length=500),
    }
    with Volume.create(tmp_path / "x.storm", kinds, device="cuda") as volume:
        volume["rows"].write(0, rows(0, 500).cuda())
        volume["labels"].write(0, torch.arange(500, device="cuda"))
        volume.flush()
        yield volume


def rows(first: int, count: int) -> torch.Tensor:
    return (torch.arange(count * 7000) + first * 7000).float().view(count, 1000, 7)


def test_records_written_from_the_gpu_are_whole_and_come_back_to_it(volume: Volume) -> None:
    assert volume["rows"].check().num_intact == 500
    found = volume["rows"].read(123, 45)
    assert found.device == torch.device("cuda:0")
    assert torch.equal(found.cpu(), rows(123, 45))
    host = torch.empty(45, 1000, 7)
    assert torch.equal(volume["rows"].read(123, 45, host), rows(123, 45))
    assert torch.equal(volume["labels"][7:9].cpu(), torch.tensor([7, 8]))
    info = volume.info()
    assert info.path == "staged"
    assert info.counters.link_out_bytes >= 500 * 28000
    assert info.counters.link_in_bytes >= 45 * 28000


def test_a_stream_waits_for_a_read_and_another_goes_on(volume: Volume) -> None:
    side = torch.cuda.Stream()
    out = torch.empty(200, 1000, 7, device="cuda")
    request = volume["rows"].read_async(0, 200, out)
    request.wait(side)
    with torch.cuda.stream(side):
        total = out.double().sum().item()
    assert total == rows(0, 200).double().sum().item()


def test_a_read_comes_after_what_the_current_stream_still_does_with_the_memory(volume: Volume) -> None:
    out = torch.ones(200, 1000, 7, device="cuda")
    torch.cuda._sleep(200_000_000)
    total = out.double().sum()
    volume["rows"].read_async(0, 200, out).wait()
    assert total.item() == out.numel()
    assert torch.equal(out.cpu(), rows(0, 200))


def test_a_write_takes_what_the_current_stream_leaves(volume: Volume) -> None:
    source = torch.zeros(500, dtype=torch.int64, device="cuda")
    torch.cuda._sleep(200_000_000)
    source += 5
    volume["labels"].write(0, source)
    assert (volume["labels"].read(0, 500) == 5).all()


def test_a_flipped_bit_is_told_before_the_gpu_has_it(volume: Volume) -> None:
    kind = volume["rows"].kind
    assert kind.start_bytes is not None
    with open(volume.path, "r+b") as file:
        file.seek(kind.start_bytes + 77 * kind.record_bytes + 13)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(CorruptionError, match="record 77"):
        volume["rows"].read(70, 20)
    volume["rows"].read(78, 20)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (1, 1), (4095, 2), (100, 9 * MIB + 17), (8192, 16 * MIB)])
def test_any_offset_and_length_to_and_from_the_gpu(offset: int, nbytes: int, tmp_path: Path) -> None:
    plain = bytearray(torch.randint(256, (32 * MIB,), dtype=torch.uint8).numpy().tobytes())
    (tmp_path / "x").write_bytes(plain)
    file = open_file(tmp_path / "x", device="cuda", require="staged")
    try:
        out = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        file.read_into(out, offset)
        assert out.cpu().numpy().tobytes() == plain[offset : offset + nbytes]
        source = torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda")
        file.write_from(source, offset)
        plain[offset : offset + nbytes] = source.cpu().numpy().tobytes()
    finally:
        file.close()
    assert (tmp_path / "x").read_bytes() == plain


def test_the_loader_hands_out_the_same_batches_on_the_gpu_as_on_the_host(volume: Volume) -> None:
    on_gpu = NVMeDataLoader(volume, 33, shuffle=True, device="cuda", prefetch_depth=3)
    on_host = NVMeDataLoader(volume, 33, shuffle=True)
    for _ in range(2):
        for one, other in itertools.zip_longest(on_gpu, on_host):
            assert isinstance(one, dict)
            assert isinstance(other, dict)
            torch.cuda._sleep(5_000_000)  # the step; the next batches must not write into what it reads
            assert one["rows"].is_cuda
            assert torch.equal(one["rows"].cpu(), other["rows"])
            assert torch.equal(one["labels"].cpu(), other["labels"])


def test_the_loader_works_on_a_stream_of_the_users(volume: Volume) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        totals = [
            batch["rows"].double().sum()
            for batch in NVMeDataLoader(volume, 50, device="cuda", prefetch_depth=2)
            if isinstance(batch, dict)
        ]
        found = torch.stack(totals).sum().item()
    assert found == rows(0, 500).double().sum().item()


def test_an_epoch_that_is_abandoned_returns_pinned_and_device_memory_and_its_thread(volume: Volume) -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        for _batch in NVMeDataLoader(volume, 100, device="cuda", prefetch_depth=4):
            break
        del _batch
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "torchstorm-loader"]


def test_a_tensor_of_another_device_is_refused(tmp_path: Path) -> None:
    with (
        Volume.create(tmp_path / "y", {"x": Kind(dtype=torch.uint8, length=5)}) as volume,
        pytest.raises(ConfigError, match="device='cuda:0'"),
    ):
        volume["x"].read(0, 5, torch.empty(5, dtype=torch.uint8, device="cuda"))
    with pytest.raises(DeviceError, match="cuda:77"):
        open_file(tmp_path / "y", device="cuda:77")
