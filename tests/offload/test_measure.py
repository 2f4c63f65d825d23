import os
from pathlib import Path

import pytest
import torch

from torchstorm.errors import StorageError
from torchstorm.memory.limits import total_ram_bytes
from torchstorm.offload import measure
from torchstorm.offload.measure import cpu_name, measure_machine

CPU = torch.device("cpu")


def test_a_machine_without_a_disk_has_zeros_for_it_and_for_the_link() -> None:
    machine = measure_machine(CPU, None)
    assert machine.device == "cpu"
    assert machine.name == cpu_name() != ""
    assert machine.ram_bytes == total_ram_bytes()
    assert machine.disk_bytes == machine.disk_write_bytes_per_s == machine.disk_read_bytes_per_s == 0
    assert machine.vram_bytes == machine.d2h_bytes_per_s == machine.h2d_bytes_per_s == 0


def test_the_disk_is_measured_where_it_was_asked_and_left_empty(tmp_path: Path) -> None:
    machine = measure_machine(CPU, str(tmp_path))
    assert machine.disk_write_bytes_per_s > 0
    assert machine.disk_read_bytes_per_s > 0
    assert 0 < machine.disk_bytes <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_is_measured_once_whatever_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(measure, "measure_disk", lambda directory: measured.append(directory) or (2e9, 3e9))
    monkeypatch.setattr(measure, "_speeds", {})
    (tmp_path / "below").mkdir()
    first = measure_machine(CPU, str(tmp_path))
    second = measure_machine(CPU, str(tmp_path / "below"))
    assert measured == [str(tmp_path)]
    for found in (first, second):
        assert (found.disk_write_bytes_per_s, found.disk_read_bytes_per_s) == (2e9, 3e9)
        assert found.disk_bytes > 0
    assert measure_machine(CPU, None).disk_bytes == 0


def test_a_disk_that_takes_no_core_from_those_that_compute_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_delays", {})
    found = measure_machine(CPU, str(tmp_path)).disk_delay_s_per_byte
    assert 0 <= found < 1e-7  # ten times what a slow disk takes
    assert measure_machine(CPU, str(tmp_path)).disk_delay_s_per_byte == found
    assert list(tmp_path.iterdir()) == []


def test_delays_are_measured_once_for_a_file_system_and_a_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    monkeypatch.setattr(measure, "_delays", {})
    monkeypatch.setattr(measure, "_measure_delay", lambda directory: measured.append(directory) or 3e-10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for _ in range(2):
        assert measure_machine(CPU, str(tmp_path)).disk_delay_s_per_byte == 3e-10
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    measure_machine(CPU, str(tmp_path))
    assert len(measured) == 2


def test_a_directory_that_is_not_there_is_a_storage_error_each_time(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot be measured"):
            measure_machine(CPU, str(tmp_path / "nowhere"))


def test_a_processor_without_a_name_is_called_by_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", refuse)
    assert cpu_name() == os.uname().machine


@pytest.mark.gpu
@pytest.mark.alone
def test_the_link_to_the_gpu_is_measured_and_pinned_memory_is_faster_than_a_slow_bus() -> None:
    machine = measure_machine(torch.device("cuda:0"), None)
    assert machine.name == torch.cuda.get_device_name(0)
    assert machine.vram_bytes == torch.cuda.get_device_properties(0).total_memory
    assert 1e9 < machine.d2h_bytes_per_s < 1e12
    assert 1e9 < machine.h2d_bytes_per_s < 1e12


@pytest.mark.gpu
@pytest.mark.alone
def test_measuring_the_link_gives_back_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:0")
    before = torch.cuda.memory_allocated(device)
    assert measure.measure_link(device).not_pinned == ""

    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError("a limit on locked memory")

    monkeypatch.setattr(measure, "pin_memory", refuse)
    pageable = measure.measure_link(device)
    assert pageable.not_pinned == "a limit on locked memory"
    assert pageable.d2h_bytes_per_s > 0
    assert torch.cuda.memory_allocated(device) == before


@pytest.mark.gpu
@pytest.mark.alone
def test_the_link_of_a_device_that_is_nearly_full_is_measured_with_what_is_left() -> None:
    device = torch.device("cuda:0")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 24 * 2**20) / total)
    try:
        found = measure.measure_link(device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 1e9 < found.d2h_bytes_per_s < 1e12
    assert 1e9 < found.h2d_bytes_per_s < 1e12
