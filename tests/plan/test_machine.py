import json
import math

import pytest

from torchstorm.errors import PlanError
from torchstorm.plan.machine import Machine

FULL = Machine(
    name="a machine",
    device="cuda:1",
    vram_bytes=24 * 2**30,
    ram_bytes=96 * 2**30,
    disk_bytes=400 * 2**30,
    d2h_bytes_per_s=1.5e10,
    h2d_bytes_per_s=1.25e10,
    disk_write_bytes_per_s=2.5e9,
    disk_read_bytes_per_s=3.5e9,
)


def test_a_machine_comes_back_from_json_as_it_was() -> None:
    assert Machine.from_json(FULL.to_json()) == FULL
    assert Machine.from_json(Machine(name="bare").to_json()) == Machine(name="bare")


def test_a_machine_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="cannot assign"):
        FULL.vram_bytes = 1  # type: ignore[misc]


@pytest.mark.parametrize("value", [-1, -0.5, math.inf, math.nan, "fast", None, True])
@pytest.mark.parametrize("field", ["vram_bytes", "disk_write_bytes_per_s"])
def test_a_number_that_no_machine_has_is_named_with_its_field(field: str, value: object) -> None:
    with pytest.raises(PlanError, match=f"machine 'odd': {field}=.* must be a number from 0 up"):
        Machine(name="odd", **{field: value})  # type: ignore[arg-type]


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(PlanError, match="device=3 is not text"):
        Machine(name="odd", device=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", json.dumps({"name": "x", "speed": 3}), json.dumps({"name": "x", "vram_bytes": -1})],
)
def test_text_that_is_no_machine_is_a_plan_error(text: str) -> None:
    with pytest.raises(PlanError, match="machine"):
        Machine.from_json(text)
