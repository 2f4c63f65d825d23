"""Machines that plans can be made for without having them."""

from __future__ import annotations

import pytest

from torchstorm.errors import PlanError
from torchstorm.plan.machine import Machine
from torchstorm.plan.profiles import PROFILES, named_machine


def test_the_machines_of_the_command_line_exist() -> None:
    assert list(PROFILES) == ["rtx4090", "rtx3090", "a100", "h100", "h200", "gb200"]
    assert {name: machine.name for name, machine in PROFILES.items()} == {name: name for name in PROFILES}


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_says_all_that_a_forecast_needs_and_nothing_impossible(name: str) -> None:
    machine = PROFILES[name]
    assert Machine.from_json(machine.to_json()) == machine
    # What a disk takes from the cores of a CPU delays no GPU.
    assert all(value for name, value in vars(machine).items() if name != "disk_delay_s_per_byte")
    assert machine.half_flops > machine.tf32_flops > machine.fp32_flops
    assert machine.attention_backward_flops < machine.attention_flops < machine.half_flops
    assert machine.memory_bytes_per_s > machine.h2d_bytes_per_s > machine.disk_read_bytes_per_s


@pytest.mark.parametrize("name", ["RTX 4090", "rtx-4090", "Rtx_4090"])
def test_a_name_is_found_however_it_is_written(name: str) -> None:
    assert named_machine(name) is PROFILES["rtx4090"]


def test_an_unknown_machine_lists_those_there_are() -> None:
    with pytest.raises(PlanError, match=r"machine='rtx5090' is not .* rtx4090, rtx3090, a100, h100, h200, gb200"):
        named_machine("rtx5090")
