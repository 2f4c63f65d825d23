"""Where the storage tests keep files: the disk behind pytest's temporary directories, and a file system in memory."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", params=["disk", "tmpfs"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path_factory.mktemp("disk")
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            yield Path(directory)
