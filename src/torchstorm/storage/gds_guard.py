"""Checks whether GPUDirect Storage can be tried here, without the risk of a hang or of side effects.

`cuFileDriverOpen` cannot simply be called as a test. It hangs forever if /proc/modules is missing (seen with cuFile
1.20), closes file descriptor 0 on errors, and succeeds without a GPU. So the system's files are checked first, and the
driver is first opened in another process, with a time limit.

A result of "" means that trying is safe. It does not mean that transfers bypass the host: since cuFile 1.17 all calls
succeed without nvidia-fs, through POSIX reads. `gds_canary` checks that with counters.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from torchstorm.storage import cufile_probe


@dataclass(frozen=True, kw_only=True)
class SystemPaths:
    """Paths of the system that the checks use.

    Attributes:
        modules: the kernel's list of modules, which cuFile reads.
        nvidia_fs: the device file of the nvidia-fs kernel module.
        nvidia_parameters: parameters of the NVIDIA kernel module. RegistryDwords configures P2PDMA.
        nvidia_fs_statistics: counters of the nvidia-fs kernel module.
        libcuda: the CUDA driver library.
        libcufile: the cuFile library; "" for the one that cuda-bindings finds.
        open_timeout_s: time limit for the first open.
    """

    modules: str = "/proc/modules"
    nvidia_fs: str = "/dev/nvidia-fs0"
    nvidia_parameters: str = "/proc/driver/nvidia/params"
    nvidia_fs_statistics: str = "/proc/driver/nvidia-fs/stats"
    libcuda: str = "libcuda.so.1"
    libcufile: str = ""
    open_timeout_s: float = 30.0


SYSTEM_PATHS = SystemPaths()


@functools.lru_cache(maxsize=16)
def why_unavailable(paths: SystemPaths = SYSTEM_PATHS) -> str:
    """The reason why GPUDirect Storage cannot be tried here; "" if it can. Cached per process.

    Args:
        paths: paths of the system.
    """
    if not _has_bindings():
        return "cuda-bindings with cuFile is not installed. Install torchstorm[cuda]."
    try:
        Path(paths.modules).read_bytes()
    except OSError as error:
        return (
            f"{paths.modules} cannot be read ({error.strerror}), and cuFile hangs forever without it. "
            "A container needs the host's /proc."
        )
    if not (os.path.exists(paths.nvidia_fs) or _has_p2pdma(paths)):
        return (
            f"neither nvidia-fs ({paths.nvidia_fs} is missing) nor P2PDMA ({paths.nvidia_parameters} has no "
            "RMForceStaticBar1=1) is configured, so cuFile would read through the host. Load nvidia-fs, or give the "
            "container its device file."
        )
    return _first_open(paths)


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.cufile") is not None
    except ImportError:  # the package cuda or cuda.bindings is missing
        return False


def _has_p2pdma(paths: SystemPaths) -> bool:
    try:
        return "RMForceStaticBar1=1" in Path(paths.nvidia_parameters).read_text()
    except OSError:
        return False


def _first_open(paths: SystemPaths) -> str:
    # -P: modules in the script's own directory could shadow others of the same name.
    command = [sys.executable, "-P", str(cufile_probe.__file__), paths.libcuda, paths.libcufile]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as probe:
        try:
            answer, complaint = probe.communicate(timeout=paths.open_timeout_s)
        except subprocess.TimeoutExpired:
            probe.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in an uninterruptible call it stays; do not
                probe.communicate(timeout=5)
            return (
                f"cuFileDriverOpen did not return within {paths.open_timeout_s:g} s in a separate process, so it "
                "is not called in this one. See cufile.log for where it hangs."
            )
    try:
        told = json.loads(answer.splitlines()[-1])
    except (IndexError, ValueError):
        return (
            f"a process that opens cuFile ended with code {probe.returncode} and no result: {complaint.strip()[-300:]}"
        )
    if told["reason"]:
        closed = "; it closed file descriptor 0" if told["closed_stdin"] else ""
        return f"{told['reason']}{closed}. See cufile.log."
    if not told["gpus"]:
        return f"the CUDA driver ({paths.libcuda}) finds no GPU."
    return ""
