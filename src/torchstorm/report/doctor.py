"""Reports what this machine offers to torchstorm, with measured speeds and the paths in use.

`examine` measures and returns a `DoctorReport`, which can be printed or converted to JSON.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from torchstorm.errors import StorageError
from torchstorm.memory.limits import available_ram_bytes, cgroup_limit_bytes, total_ram_bytes
from torchstorm.offload.measure import LinkSpeed, cpu_name, measure_link
from torchstorm.offload.native import library
from torchstorm.offload.recompute import fused
from torchstorm.paths import user_path
from torchstorm.report.terminal import installed_version
from torchstorm.sizes import format_size
from torchstorm.storage.aligned import aligned_empty
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.gds_guard import why_unavailable
from torchstorm.storage.measure import measure_disk
from torchstorm.storage.xnvme_library import load_library

_PROBE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """One GPU.

    Attributes:
        device: name for `--device`, such as "cuda:0".
        name: product name.
        compute_capability: such as "9.0".
        total_bytes: total memory.
        free_bytes: free memory, over all processes.
        link: measured bandwidth to and from the host.
        bus: type of connection; "" without the `cuda` extra.
    """

    device: str
    name: str
    compute_capability: str
    total_bytes: int
    free_bytes: int
    link: LinkSpeed
    bus: str


@dataclass(frozen=True, kw_only=True)
class RamReport:
    """Host memory.

    Attributes:
        total_bytes: memory that the process could use at most.
        available_bytes: memory that it can still allocate.
        cgroup_limit_bytes: tightest limit of its cgroups; None without a limit.
        memlock_bytes: RLIMIT_MEMLOCK (`ulimit -l`); None without a limit.
        pinnable: whether memory can be pinned, as text.
    """

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None
    memlock_bytes: int | None
    pinnable: str


@dataclass(frozen=True, kw_only=True)
class DiskReport:
    """The disk for spill files.

    Attributes:
        directory: the measured directory.
        free_bytes: free space.
        write_bytes_per_s: measured write speed, fsync included.
        read_bytes_per_s: measured read speed.
        path: "direct" (O_DIRECT), "buffered" (page cache), or "" if the directory cannot be used.
        reason: the reason for the path.
    """

    directory: str
    free_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """The whole report.

    Attributes:
        versions: name of a component -> its version, or that it is not installed.
        cpu: the processor, and PyTorch's number of threads.
        gpus: every GPU that PyTorch finds.
        why_no_gpu: the reason if there is none; "" otherwise.
        ram: host memory.
        disk: the disk for spill files.
        active: the paths of a Session and of files, one sentence each.
    """

    versions: dict[str, str]
    cpu: str
    gpus: tuple[GpuReport, ...]
    why_no_gpu: str
    ram: RamReport
    disk: DiskReport
    active: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as a dictionary for JSON; sizes in bytes, speeds in bytes per second."""
        return asdict(self)

    def print_to(self, console: Console) -> None:
        """Prints the report."""
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for title, lines in self._sections():
            table.add_row(title, "\n".join(lines))
        console.print(table, highlight=False, markup=False)

    def _sections(self) -> list[tuple[str, list[str]]]:
        ram, disk = self.ram, self.disk
        limit = "no cgroup limit" if ram.cgroup_limit_bytes is None else f"cgroup {format_size(ram.cgroup_limit_bytes)}"
        locked = "no limit" if ram.memlock_bytes is None else format_size(ram.memlock_bytes)
        speed = f"writes {_speed(disk.write_bytes_per_s)}, reads {_speed(disk.read_bytes_per_s)}; " if disk.path else ""
        return [
            ("CPU", [self.cpu]),
            *((gpu.device, _gpu_lines(gpu)) for gpu in self.gpus),
            *([("GPU", [self.why_no_gpu])] if self.why_no_gpu else []),
            (
                "RAM",
                [
                    f"{format_size(ram.total_bytes)}, {format_size(ram.available_bytes)} available ({limit})",
                    f"pinning: {ram.pinnable}; locked memory (ulimit -l): {locked}",
                ],
            ),
            (
                "disk",
                [
                    f"{disk.directory}: {format_size(disk.free_bytes)} free",
                    f"{speed}{disk.path + ' I/O' if disk.path else 'cannot be used'}: {disk.reason}",
                ],
            ),
            ("versions", [f"{name} {version}" for name, version in self.versions.items()]),
            ("active", list(self.active)),
        ]


def doctor(console: Console, *, directory: str | os.PathLike[str] = ".") -> DoctorReport:
    """Examines this machine and prints the report.

    Args:
        console: where to print.
        directory: directory for spill files. A file of 64 MiB is written there to measure, and removed.

    Returns:
        The printed report.
    """
    report = examine(directory)
    report.print_to(console)
    return report


def examine(directory: str | os.PathLike[str] = ".") -> DoctorReport:
    """Measures the link to every GPU and the disk of a directory. Failures are part of the report."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = tuple(_examine_gpu(index) for index in range(num_gpus))
    disk = _examine_disk(os.path.realpath(user_path(directory, name="--directory")))
    return DoctorReport(
        versions=_versions(),
        cpu=f"{cpu_name()}, {os.cpu_count()} cores; PyTorch uses {torch.get_num_threads()} threads",
        gpus=gpus,
        why_no_gpu="" if gpus else _why_no_gpu(),
        ram=_examine_ram(gpus),
        disk=disk,
        active=(*_active(gpus, disk), library.describe(), fused.describe(), *_storage_paths()),
    )


def _examine_gpu(index: int) -> GpuReport:  # pragma: gpu
    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return GpuReport(
        device=str(device),
        name=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        link=measure_link(device),
        bus=_bus(str(properties.uuid)),
    )


def _bus(uuid: str) -> str:  # pragma: gpu
    """Looks the GPU up by UUID, since NVML's indices ignore CUDA_VISIBLE_DEVICES."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, or no driver library: the report has no such line
        return ""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        generation, width = (
            nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
            nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        )
        return f"PCIe {generation} x{width}"
    except nvml.NVMLError:
        return ""
    finally:
        nvml.nvmlShutdown()


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"none: this PyTorch ({torch.__version__}) is built without CUDA; `torchstorm train` runs on the CPU"
    return (  # pragma: gpu
        f"none: PyTorch {torch.__version__} is built for CUDA {torch.version.cuda} but finds no GPU; check the driver "
        "with nvidia-smi, and CUDA_VISIBLE_DEVICES"
    )


def _examine_ram(gpus: tuple[GpuReport, ...]) -> RamReport:
    available_bytes = available_ram_bytes()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    refusals = [gpu.link.not_pinned for gpu in gpus if gpu.link.not_pinned]
    if refusals:
        pinnable = f"not possible, copies use pageable memory: {refusals[0]}"
    elif gpus:
        pinnable = f"works; up to {format_size(available_bytes)} available"
    else:
        pinnable = "not needed, since there is no GPU"
    return RamReport(
        total_bytes=total_ram_bytes(),
        available_bytes=available_bytes,
        cgroup_limit_bytes=cgroup_limit_bytes(),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        pinnable=pinnable,
    )


def _examine_disk(directory: str) -> DiskReport:
    try:
        write_bytes_per_s, read_bytes_per_s = measure_disk(directory)
        path, reason = _disk_path(directory)
        free_bytes = shutil.disk_usage(directory).free
    except StorageError as error:
        return DiskReport(
            directory=directory, free_bytes=0, write_bytes_per_s=0.0, read_bytes_per_s=0.0, path="", reason=str(error)
        )
    return DiskReport(
        directory=directory,
        free_bytes=free_bytes,
        write_bytes_per_s=write_bytes_per_s,
        read_bytes_per_s=read_bytes_per_s,
        path=path,
        reason=reason,
    )


def _disk_path(directory: str) -> tuple[str, str]:
    """Writes a block and reads the counters, since a file system may accept O_DIRECT and then refuse the transfer."""
    descriptor, name = tempfile.mkstemp(prefix="torchstorm-doctor-", dir=directory)
    os.close(descriptor)
    try:
        file = DirectFile(name, threads=1)
        try:
            file.write_from(aligned_empty(_PROBE_BYTES), 0)
            info = file.info()
        finally:
            file.close()
    finally:
        os.unlink(name)
    direct = info.counters.direct_write_bytes
    return info.path, f"{info.reason}; a probe of {format_size(_PROBE_BYTES)} wrote {format_size(direct)} directly"


def _versions() -> dict[str, str]:
    versions = {
        "torchstorm": installed_version("torchstorm"),
        "PyTorch": str(torch.__version__),
        "CUDA": torch.version.cuda or "not in this PyTorch",
        "Python": platform.python_version(),
        "triton": installed_version("triton"),
        "nvcc": _nvcc(),
        "C compiler": shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or "not found",
    }
    return versions


def _nvcc() -> str:
    compiler = shutil.which("nvcc")
    if compiler is None:
        return "not found"
    try:
        told = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not run: {error}"
    release = re.search(r"release ([0-9.]+)", told)
    return f"{release[1] if release else 'of unknown version'} ({compiler})"


def _storage_paths() -> tuple[str, ...]:
    """The optional I/O paths of volumes and files, and why they are not available."""
    why_no_gds = why_unavailable()
    try:
        library = f"{load_library()[1]}, for devices opened with require='xnvme'"
    except StorageError as error:
        library = f"not available: {error}"
    return (
        f"GPUDirect Storage: {f'not in use: {why_no_gds}' if why_no_gds else 'tested for each file'}",
        f"xNVMe: {library}",
    )


def _active(gpus: tuple[GpuReport, ...], disk: DiskReport) -> tuple[str, ...]:
    """The tiers and paths that a Session uses on this machine."""
    spill = f"{disk.path} I/O" if disk.path else f"no disk, because {disk.directory} cannot be used"
    if not gpus:
        return (
            "fast tier: RAM (--ram), because there is no GPU; --vram is an error here",
            f"next tier: disk (--disk DIR), by {spill}",
            "kernels: PyTorch's own",
        )
    memory = "pageable" if any(gpu.link.not_pinned for gpu in gpus) else "pinned"
    return (
        "fast tier: GPU memory (--vram)",
        f"next tier: {memory} RAM (--ram), copied on separate streams during compute",
        f"last tier: disk (--disk DIR), through {memory} RAM, by {spill}",
        "kernels: PyTorch's own",
    )


def _gpu_lines(gpu: GpuReport) -> list[str]:
    memory = "pageable" if gpu.link.not_pinned else "pinned"
    return [
        f"{gpu.name}, compute capability {gpu.compute_capability}: {format_size(gpu.total_bytes)}, "
        f"{format_size(gpu.free_bytes)} free",
        f"link ({memory}{', ' + gpu.bus if gpu.bus else ''}): {_speed(gpu.link.d2h_bytes_per_s)} to the host, "
        f"{_speed(gpu.link.h2d_bytes_per_s)} back",
    ]


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
