"""Where the storage tests keep files, what stands for cuFile, and a disk that fails when told to."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.faulty_disk import FaultyProcess
from torchstorm.storage import cufile
from torchstorm.storage.gds_guard import SystemPaths


@pytest.fixture(scope="module", params=["disk", "tmpfs"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The disk behind pytest's temporary directories, and a file system in memory."""
    if request.param == "disk":
        yield tmp_path_factory.mktemp("disk")
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            yield Path(directory)


class FakeCuFile:
    """`fake_cufile.c`, compiled and loaded: settings and counts by name, and the log of what was opened and closed.

    Attributes:
        path: of the library.
        paths: of a machine with GPUDirect Storage, as far as the guard can see.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "libcufile.so.0"
        source = Path(__file__).with_name("fake_cufile.c")
        command = ["gcc", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcufile.so.0"]
        subprocess.run([*command, "-o", str(self.path), str(source), "-lpthread"], check=True)
        self._library = ctypes.CDLL(str(self.path), mode=ctypes.RTLD_GLOBAL)
        self._library.fake_get.restype = self._library.fake_live.restype = ctypes.c_long
        self._library.fake_log.restype = ctypes.c_char_p
        self._library.fake_set.argtypes = (ctypes.c_char_p, ctypes.c_long)
        for name in ("modules", "nvidia-fs0"):
            (folder / name).write_text("nvidia_fs 1 0 - Live 0x0\n")
        self.paths = SystemPaths(
            modules=str(folder / "modules"),
            nvidia_fs=str(folder / "nvidia-fs0"),
            nvidia_parameters=str(folder / "params"),
            nvidia_fs_statistics=str(folder / "stats"),
            libcuda=str(self.path),
            libcufile=str(self.path),
        )

    def __getitem__(self, name: str) -> int:
        value = int(self._library.fake_get(name.encode()))
        assert value >= 0, name
        return value

    def __setitem__(self, name: str, value: int) -> None:
        assert self._library.fake_set(name.encode(), value) == 0, name

    @property
    def log(self) -> list[str]:
        """What was opened, registered and given back, in order."""
        return self._library.fake_log().decode().split()  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Settings and counts as at first."""
        self._library.fake_reset()

    def live(self) -> int:
        """Open drivers, registered files and buffers, and batches."""
        return int(self._library.fake_live())


@pytest.fixture(scope="session")
def compiled_cufile(tmp_path_factory: pytest.TempPathFactory) -> FakeCuFile:
    return FakeCuFile(tmp_path_factory.mktemp("cufile"))


@pytest.fixture
def fake(compiled_cufile: FakeCuFile) -> Iterator[FakeCuFile]:
    """The fake cuFile; the test fails where it was misused, or anything is still open at the end."""
    compiled_cufile.reset()
    yield compiled_cufile
    found = (compiled_cufile["violations"], compiled_cufile.live(), cufile._shared.users)
    compiled_cufile.reset()
    cufile._shared = cufile._Shared()
    assert found == (0, 0, 0), "(violations, what is still open, users of the driver)"


@pytest.fixture(scope="module")
def faulty_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyProcess]:
    shim = tmp_path_factory.mktemp("shim") / "fault_shim.so"
    source = Path(__file__).with_name("fault_shim.c")
    subprocess.run(["gcc", "-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    process = FaultyProcess(shim)
    try:
        yield process
    finally:
        process.close()
