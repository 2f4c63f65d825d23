"""Where the storage tests keep files: the disk behind pytest's temporary directories, a file system in memory, and a
disk that fails when told to."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.faulty_disk import FaultyProcess


@pytest.fixture(scope="module", params=["disk", "tmpfs"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path_factory.mktemp("disk")
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            yield Path(directory)


@pytest.fixture(scope="module")
def faulty_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyProcess]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler makes the disk that fails")
    shim = tmp_path_factory.mktemp("shim") / "fault_shim.so"
    source = Path(__file__).with_name("fault_shim.c")
    subprocess.run([compiler, "-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    process = FaultyProcess(shim)
    try:
        yield process
    finally:
        process.close()
