"""The doctor tells what is there, what was measured, and what could not be used and why."""

import io
import json
import os
import resource
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from torchstorm.memory.limits import total_ram_bytes
from torchstorm.offload.measure import LinkSpeed
from torchstorm.report import doctor as doctor_module
from torchstorm.report.doctor import DoctorReport, GpuReport, doctor, examine
from torchstorm.report.terminal import installed_version

GPU = GpuReport(
    device="cuda:0",
    name="A Card",
    compute_capability="9.0",
    total_bytes=24 * 2**30,
    free_bytes=20 * 2**30,
    link=LinkSpeed(d2h_bytes_per_s=25e9, h2d_bytes_per_s=24e9),
    bus="PCIe 4 x16",
)


def printed(report: DoctorReport) -> str:
    console = Console(file=io.StringIO(), width=240)
    report.print_to(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rest of the report says beside a GPU, where there need not be one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor_module, "_examine_gpu", lambda index: GPU)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_report_says_so_and_names_the_tiers_that_remain(tmp_path: Path) -> None:
    report = examine(tmp_path)
    assert report.gpus == ()
    assert report.why_no_gpu.startswith("none: ")
    assert "fast tier: RAM (--ram), because there is no GPU" in printed(report)
    assert report.ram.pinnable == "not needed, since there is no GPU"


@pytest.mark.usefixtures("no_gpu")
def test_everything_is_printed_and_goes_to_json(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=240)
    report = doctor(console, directory=tmp_path)
    text = printed(report)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == text
    for title in ("CPU", "GPU", "RAM", "disk", "versions", "active", torch.__version__, str(tmp_path)):
        assert title in text
    assert json.loads(json.dumps(report.to_json()))["disk"]["directory"] == str(tmp_path)


@pytest.mark.usefixtures("no_gpu")
def test_ram_and_its_limits_are_those_of_this_process(tmp_path: Path) -> None:
    ram = examine(tmp_path).ram
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert ram.memlock_bytes == (None if soft == resource.RLIM_INFINITY else soft)
    assert 0 < ram.available_bytes < ram.total_bytes == total_ram_bytes()


@pytest.mark.usefixtures("no_gpu")
def test_limits_are_printed_and_so_is_that_there_are_none(tmp_path: Path) -> None:
    report = examine(tmp_path)
    bound = replace(report, ram=replace(report.ram, cgroup_limit_bytes=2**30, memlock_bytes=2**16))
    assert "cgroup 1.00 GiB" in printed(bound)
    assert "locked memory (ulimit -l): 64.00 KiB" in printed(bound)
    free = replace(report, ram=replace(report.ram, cgroup_limit_bytes=None, memlock_bytes=None))
    assert "no cgroup limit" in printed(free)
    assert "locked memory (ulimit -l): no limit" in printed(free)


def test_the_disk_is_measured_its_path_proven_by_counters_and_nothing_is_left_there(tmp_path: Path) -> None:
    disk = examine(tmp_path).disk
    assert disk.write_bytes_per_s > 0
    assert disk.read_bytes_per_s > 0
    assert disk.path in ("direct", "buffered")
    assert f"a probe of 1.00 MiB wrote {'1.00 MiB' if disk.path == 'direct' else '0 B'} directly" in disk.reason
    assert disk.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_told_and_not_raised(tmp_path: Path) -> None:
    report = examine(tmp_path / "nowhere")
    assert report.disk.path == ""
    assert "cannot be measured" in report.disk.reason
    assert "cannot be used: " in printed(report)
    assert "no disk, because" in printed(report)


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_is_shown_with_its_memory_and_its_link(tmp_path: Path) -> None:
    report = examine(tmp_path)
    text = printed(report)
    assert report.why_no_gpu == ""
    assert "A Card, compute capability 9.0: 24.00 GiB, 20.00 GiB free" in text
    assert "link (pinned, PCIe 4 x16): 25.00 GB/s to the host, 24.00 GB/s back" in text
    assert report.ram.pinnable.startswith("works; up to ")
    assert "next tier: pinned RAM" in text


@pytest.mark.usefixtures("one_gpu")
def test_memory_that_cannot_be_pinned_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = replace(GPU.link, not_pinned="a limit on locked memory")
    monkeypatch.setattr(doctor_module, "_examine_gpu", lambda index: replace(GPU, link=link, bus=""))
    text = printed(examine(tmp_path))
    assert "pinning: not possible, copies use pageable memory: a limit on locked memory" in text
    assert "link (pageable): 25.00 GB/s" in text


def put_nvcc(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    compiler = folder / "nvcc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("script", "version"),
    [
        ("echo 'Cuda compilation tools, release 13.0, V13.0.88'", "13.0 ("),
        ("echo something else", "of unknown version ("),
        ("exit 3", "does not run: "),
    ],
)
def test_a_compiler_is_shown_with_what_it_says_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, version: str
) -> None:
    put_nvcc(tmp_path, monkeypatch, script)
    assert examine(tmp_path).versions["nvcc"].startswith(version)


def test_what_is_not_installed_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    versions = examine(tmp_path).versions
    assert versions["nvcc"] == versions["C compiler"] == "not found"
    assert installed_version("torchstorm-of-another-name") == "not installed"


@pytest.mark.gpu
def test_the_gpu_here_is_examined(tmp_path: Path) -> None:
    report = examine(tmp_path)
    assert len(report.gpus) == torch.cuda.device_count() > 0
    assert report.gpus[0].name == torch.cuda.get_device_name(0)
    assert 0 < report.gpus[0].free_bytes <= report.gpus[0].total_bytes
    assert report.gpus[0].link.d2h_bytes_per_s > 1e9


def test_it_says_which_way_settled_steps_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(line.startswith("settled steps: by C++") for line in examine(tmp_path).active)
    monkeypatch.setenv("TORCHSTORM_NATIVE", "0")
    assert "settled steps: by Python, since TORCHSTORM_NATIVE=0" in examine(tmp_path).active


def test_it_says_why_gds_and_xnvme_are_not_in_use(tmp_path: Path) -> None:
    active = examine(tmp_path).active
    assert any(line.startswith("GPUDirect Storage: not in use: ") for line in active)
    assert any(line.startswith("xNVMe: ") and ("make xnvme" in line or "require='xnvme'" in line) for line in active)
