from pathlib import Path

import pytest

from torchstorm.errors import StorageError
from torchstorm.storage.measure import measure_disk


def test_speeds_are_measured_and_nothing_is_left(place: Path) -> None:
    write, read = measure_disk(place, nbytes=8 * 2**20)
    assert 1e6 < write < 1e12
    assert 1e6 < read < 1e12
    assert not list(place.glob("torchstorm-measure-*"))


def test_a_directory_that_is_not_there() -> None:
    with pytest.raises(StorageError, match=r"/nowhere cannot be measured: No such file"):
        measure_disk("/nowhere")
