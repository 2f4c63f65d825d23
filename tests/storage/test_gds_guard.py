"""Whether GPUDirect Storage can be used: always an answer, nothing broken by asking, and no proof without counters."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
from torchstorm.errors import StorageError, UnsupportedError
from torchstorm.storage import cufile, gds_canary, gds_guard
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.gds import open_gds, prove
from torchstorm.storage.gds_guard import SYSTEM_PATHS, SystemPaths, why_unavailable

CPU = torch.device("cpu")
STATISTICS = """GDS Version: 1.16.0.49
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.27.3)
IO stats: {state}, peer IO stats: Enabled
Active Shadow-Buffer (MiB): 0
Batches\t\t\t\t: n=0 ok=0 err=0 Avg-Submit-Latency(usec)=0
Reads\t\t\t\t: n={reads} ok={reads} err=0 readMiB=0 io_state_err=0
Writes\t\t\t\t: n=0 ok=0 err=0 writeMiB=0 io_state_err=0 pg-cache=0
"""


class Mark:
    def synchronize(self) -> None:
        pass


@pytest.fixture
def ask() -> Callable[..., str]:
    why_unavailable.cache_clear()
    return lambda fake, **other: why_unavailable(dataclasses.replace(fake.paths, **other))


def test_it_may_be_tried_where_all_is_there(fake: Any, ask: Callable[..., str]) -> None:
    assert ask(fake) == ""
    assert fake.log == []  # the first open was another process's


def test_here_there_is_an_answer_within_the_time_and_a_reason() -> None:
    """On the machine at hand, whatever it has: no fake."""
    why_unavailable.cache_clear()
    start_s = time.monotonic()
    reason = why_unavailable(dataclasses.replace(SYSTEM_PATHS, open_timeout_s=10.0))
    assert time.monotonic() - start_s < 30
    if not os.path.exists("/dev/nvidia-fs0") and not os.path.exists("/proc/driver/nvidia/params"):
        assert reason
        assert not os.path.exists("/proc/modules") or "nvidia-fs" in reason


def test_a_missing_list_of_modules_is_told_before_cufile_hangs_on_it(
    fake: Any, ask: Callable[..., str], tmp_path: Path
) -> None:
    reason = ask(fake, modules=str(tmp_path / "none"))
    assert reason.startswith(f"{tmp_path}/none cannot be read (No such file or directory), and cuFile hangs forever")


def test_nvidia_fs_or_p2pdma_must_be_configured(fake: Any, ask: Callable[..., str], tmp_path: Path) -> None:
    none, parameters = str(tmp_path / "none"), tmp_path / "params"
    assert ask(fake, nvidia_fs=none).startswith(f"neither nvidia-fs ({none} is missing) nor P2PDMA")
    parameters.write_text('RegistryDwords: ""\n')
    assert "RMForceStaticBar1=1" in ask(fake, nvidia_fs=none, nvidia_parameters=str(parameters))
    parameters.write_text('RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"\n')
    why_unavailable.cache_clear()
    assert ask(fake, nvidia_fs=none, nvidia_parameters=str(parameters)) == ""


def test_the_bindings_must_be_installed(
    fake: Any, ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gds_guard.importlib.util, "find_spec", lambda name: None)
    assert ask(fake) == "cuda-bindings with cuFile is not installed. Install torchstorm[cuda]."

    def none_at_all(name: str) -> None:
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr(gds_guard.importlib.util, "find_spec", none_at_all)
    why_unavailable.cache_clear()
    assert "torchstorm[cuda]" in ask(fake)


def test_the_cuda_driver_must_be_there_and_count_a_gpu(
    fake: Any, ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = ask(fake, libcuda="libcuda-none.so")
    assert reason.startswith("the CUDA driver cannot be loaded (libcuda-none.so: cannot open shared object file")
    monkeypatch.setenv("FAKE_CUDA_ERROR", "999")
    why_unavailable.cache_clear()
    assert f"cuInit of {fake.path} returned CUDA error 999" in ask(fake)
    monkeypatch.delenv("FAKE_CUDA_ERROR")
    monkeypatch.setenv("FAKE_GPUS", "0")  # cuFile's driver opens without one
    why_unavailable.cache_clear()
    assert ask(fake) == f"the CUDA driver ({fake.path}) finds no GPU."


def test_a_driver_that_hangs_is_given_up(fake: Any, ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUFILE_OPEN", "hang")
    start_s = time.monotonic()
    reason = ask(fake, open_timeout_s=2.0)
    assert 2 <= time.monotonic() - start_s < 20
    assert reason.startswith("cuFileDriverOpen did not return within 2 s in a separate process")
    assert ask(fake, open_timeout_s=2.0) == reason  # asked once


def test_a_driver_that_closes_stdin_closes_another_process_s(
    fake: Any, ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUFILE_OPEN", "close0")
    before = os.fstat(0)
    reason = ask(fake)
    assert os.path.samestat(os.fstat(0), before)
    assert "cuFileDriverOpen failed: " in reason
    assert "5001" in reason
    assert "it closed file descriptor 0" in reason


@pytest.mark.parametrize(("mode", "found"), [("error", "5007"), ("crash", "ended with code -6 and no result")])
def test_a_driver_that_fails_or_breaks_is_reported(
    fake: Any, ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch, mode: str, found: str
) -> None:
    monkeypatch.setenv("FAKE_CUFILE_OPEN", mode)
    assert found in ask(fake)


def test_the_driver_s_own_open_leaves_stdin_as_it_was(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard's process may have been lucky, so this process saves descriptor 0 as well."""
    monkeypatch.setenv("FAKE_CUFILE_OPEN", "close0")
    code = f"""
import os
from torchstorm.errors import StorageError
from torchstorm.storage import cufile
before = os.fstat(0)
fds = set(os.listdir("/proc/self/fd"))
try:
    cufile.acquire({str(fake.path)!r})
except StorageError as error:
    assert error.errno == 5001, error
    assert "cuFileDriverOpen failed with 5001" in str(error), error
else:
    raise AssertionError("opened")
assert os.path.samestat(os.fstat(0), before)
assert set(os.listdir("/proc/self/fd")) == fds, fds
os.close(0)  # a process without one: nothing to save, and nothing breaks
try:
    cufile.acquire({str(fake.path)!r})
except StorageError:
    pass
try:
    os.fstat(0)
except OSError:
    print("done")
"""
    run = forked.run([sys.executable, "-c", code], stdin=subprocess.PIPE, capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.returncode) == ("done", 0), run.stderr


def test_a_library_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"loading cuFile failed: .*no-library"):
        cufile.CuFile(str(tmp_path / "no-library.so"))


def opened(fake: Any, path: Path, **other: Any) -> Any:
    below = DirectFile(path, create=True)
    try:
        return open_gds(below, device=CPU, mark=Mark, paths=dataclasses.replace(fake.paths, **other))
    except BaseException:
        assert below.info().counters is not None  # left open, to be used instead
        below.write_from(torch.ones(5), 0)
        below.close()
        raise


def test_a_refusal_of_the_guard_is_an_error_of_whoever_requires_it(fake: Any, tmp_path: Path) -> None:
    why_unavailable.cache_clear()
    with pytest.raises(UnsupportedError, match=r"file: no GPUDirect Storage: neither nvidia-fs"):
        opened(fake, tmp_path / "file", nvidia_fs=str(tmp_path / "none"))
    assert fake.log == []


@pytest.mark.parametrize("code", [5008, 5027])
def test_a_file_that_cufile_does_not_register_is_reported(fake: Any, tmp_path: Path, code: int) -> None:
    fake["register_code"] = code
    with pytest.raises(UnsupportedError, match=rf"no GPUDirect Storage: .*cuFileHandleRegister.* failed with {code}"):
        opened(fake, tmp_path / "file")
    assert fake.log == ["open", "close"]


def test_cufile_s_counters_prove_it(fake: Any, tmp_path: Path) -> None:
    file = opened(fake, tmp_path / "file")
    assert "proven by a canary of 1.00 MiB, for which cuFile counted nvidia_fs_reads 1" in file.info().reason
    file.close()
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]  # no canary is left


def test_a_canary_through_the_host_is_no_proof(fake: Any, tmp_path: Path) -> None:
    fake["posix"] = 1
    with pytest.raises(
        UnsupportedError, match=r"through the host by its counters \(posix_reads 1\): compatibility mode"
    ):
        opened(fake, tmp_path / "file")
    fake["posix"], fake["uncounted"] = 0, 1
    with pytest.raises(UnsupportedError, match=r"through the host by its counters \(nothing counted\)"):
        opened(fake, tmp_path / "file")
    fake["uncounted"], fake["posix"], fake["short_bytes"] = 0, 2, 2**19
    with pytest.raises(UnsupportedError, match=r"\(nvidia_fs_reads 1, posix_reads 1\): compatibility mode"):
        opened(fake, tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]


def test_a_canary_with_other_bytes_is_reported(fake: Any, tmp_path: Path) -> None:
    fake["wrong_bytes"] = 1
    with pytest.raises(UnsupportedError, match=r"cuFile read 1048576 bytes of a canary wrongly"):
        opened(fake, tmp_path / "file")


@pytest.mark.parametrize(
    ("setting", "value", "found"), [("fail_code", 5008, "5008"), ("end_bytes", 1, "ended after 0")]
)
def test_an_unreadable_canary_is_reported(fake: Any, tmp_path: Path, setting: str, value: int, found: str) -> None:
    fake[setting] = value
    with pytest.raises(UnsupportedError, match=rf"no GPUDirect Storage: .*{found}"):
        opened(fake, tmp_path / "file")


def test_bindings_that_do_not_tell_how_much_moved_are_too_old(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuda.bindings.cufile.read", lambda *_: None)  # as 13.0 did
    with pytest.raises(UnsupportedError, match=r"does not return the bytes moved. Install 13.1"):
        opened(fake, tmp_path / "file")


def test_a_canary_may_come_in_portions(fake: Any, tmp_path: Path) -> None:
    fake["short_bytes"] = 2**18
    file = opened(fake, tmp_path / "file")
    assert "nvidia_fs_reads 4" in file.info().reason
    file.close()


@pytest.mark.parametrize("length", [512, 624, 800])
def test_statistics_of_other_versions_of_cufile_are_understood(fake: Any, tmp_path: Path, length: int) -> None:
    """The first part grew from version to version, and the bindings know one length only."""
    fake["statistics_bytes"] = length
    file = opened(fake, tmp_path / "file")
    file.write_batch_async([(torch.zeros(4096, dtype=torch.uint8), page * 4096) for page in range(2)]).synchronize()
    assert "requests in this process since it was opened: nvidia_fs_writes 2, nvidia_fs_batches 1" in file.info().reason
    file.close()


def test_without_cufile_s_counters_those_of_the_kernel_module_prove_it(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake["no_statistics"] = 1
    statistics = Path(fake.paths.nvidia_fs_statistics)
    with pytest.raises(UnsupportedError, match=r"neither cuFile 1.20 nor .*stats counts the path of a canary"):
        opened(fake, tmp_path / "file")
    read = gds_canary._read

    def counting(*arguments: Any) -> None:
        read(*arguments)
        statistics.write_text(STATISTICS.format(state=state, reads=18))

    monkeypatch.setattr(gds_canary, "_read", counting)
    state = "Disabled"
    statistics.write_text(STATISTICS.format(state=state, reads=17))
    with pytest.raises(UnsupportedError, match=r"rw_stats_enabled"):
        opened(fake, tmp_path / "file")
    state = "Enabled"
    statistics.write_text(STATISTICS.format(state=state, reads=18))
    with pytest.raises(UnsupportedError, match=r"rw_stats_enabled"):  # it did not rise
        opened(fake, tmp_path / "file")
    statistics.write_text(STATISTICS.format(state=state, reads=17))
    file = opened(fake, tmp_path / "file")
    assert file.info().path == "gds"
    assert "rose from 17 to 18" in file.info().reason
    file.close()
    statistics.unlink()


def test_where_nothing_may_be_written_the_file_s_own_bytes_are_the_canary(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: object) -> None:
        raise PermissionError("read-only directory")  # root is refused nothing

    monkeypatch.setattr(gds_canary.tempfile, "NamedTemporaryFile", refused)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3 * 4096 + 5))
    assert "a canary of 12.00 KiB" in prove(path, device=CPU, mark=Mark, paths=fake.paths)
    with open(path, "wb") as file:  # a hole, which cuFile reads from no disk, and then bytes
        file.truncate(2**20)
        file.seek(2**20)
        file.write(os.urandom(2 * 4096))
    assert "a canary of 8.00 KiB" in prove(path, device=CPU, mark=Mark, paths=fake.paths)
    for content in (b"", b"x" * 4095):
        path.write_bytes(content)
        with pytest.raises(UnsupportedError, match=rf"is {len(content)} bytes long, without 4096 to read for a proof"):
            prove(path, device=CPU, mark=Mark, paths=fake.paths)
    with open(path, "wb") as file:
        file.truncate(2**20)
    with pytest.raises(UnsupportedError, match=r"is 1048576 bytes long, without 4096"):
        prove(path, device=CPU, mark=Mark, paths=fake.paths)


def test_prove_tells_the_evidence_or_why_there_is_none(fake: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(StorageError, match=r"cannot be opened"):
        prove(path, device=CPU, mark=Mark, paths=fake.paths)
    path.write_bytes(b"")
    assert "nvidia_fs_reads 1" in prove(path, device=CPU, mark=Mark, paths=fake.paths)
    why_unavailable.cache_clear()
    with pytest.raises(UnsupportedError, match=r"cuFile hangs forever"):
        prove(path, device=CPU, mark=Mark, paths=dataclasses.replace(fake.paths, modules=str(tmp_path / "none")))


def test_places_are_the_machine_s_own_unless_told(fake: Any) -> None:
    assert SystemPaths() == SYSTEM_PATHS
    assert (SYSTEM_PATHS.modules, SYSTEM_PATHS.nvidia_fs, SYSTEM_PATHS.libcuda) == (
        "/proc/modules",
        "/dev/nvidia-fs0",
        "libcuda.so.1",
    )
