"""What `make mutations` puts into copies of the sources is still there to be changed."""

from __future__ import annotations

import sys
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SPEC = spec_from_file_location("mutations", REPOSITORY / "tools" / "mutations.py")
assert SPEC is not None
assert SPEC.loader is not None
mutations = module_from_spec(SPEC)
sys.modules["mutations"] = mutations
SPEC.loader.exec_module(mutations)


@pytest.mark.parametrize("fault", mutations.FAULTS, ids=lambda fault: fault.fault)
def test_a_fault_changes_one_place_and_names_tests_that_exist(fault: mutations.Fault) -> None:
    text = (REPOSITORY / "src" / "torchstorm" / fault.file).read_text()
    assert text.count(fault.old) == 1
    assert fault.old != fault.new
    for path in fault.tests.split():
        assert (REPOSITORY / "tests" / path.split("::")[0]).exists(), path


def test_there_are_ten_in_each_of_four_rooms() -> None:
    rooms = Counter(fault.file.split("/")[0] for fault in mutations.FAULTS)
    assert rooms == dict.fromkeys(("offload", "plan", "storage", "kernels"), 10)
