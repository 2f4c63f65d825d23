"""Whether GPUDirect Storage can be tried here, asked so that the answer always comes and nothing is broken by asking.

`cuFileDriverOpen` cannot simply be called to find out. It hangs for ever where /proc/modules is missing (seen with
cuFile 1.20), closes file descriptor 0 on its error path, and succeeds with no GPU. So what can be read is read first,
and the first open is another process's, with a time limit.

An answer of "" means that trying is safe, not that bytes pass the host by: since cuFile 1.17 everything succeeds
without nvidia-fs, through POSIX reads. That is proven by counters: see `gds_canary`.
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
class Places:
    """Where the guard looks.

    Attributes:
        modules: the kernel's list of modules, which cuFile reads.
        nvidia_fs: the device file of the nvidia-fs kernel module.
        nvidia_parameters: of the NVIDIA kernel module, whose RegistryDwords configure P2PDMA.
        nvidia_fs_statistics: counters of the nvidia-fs kernel module.
        libcuda: the CUDA driver's library.
        libcufile: cuFile's library; "" for the one that cuda-bindings finds.
        open_timeout_s: seconds that the first open may take.
    """

    modules: str = "/proc/modules"
    nvidia_fs: str = "/dev/nvidia-fs0"
    nvidia_parameters: str = "/proc/driver/nvidia/params"
    nvidia_fs_statistics: str = "/proc/driver/nvidia-fs/stats"
    libcuda: str = "libcuda.so.1"
    libcufile: str = ""
    open_timeout_s: float = 30.0


HERE = Places()


@functools.lru_cache(maxsize=16)
def why_not(places: Places = HERE) -> str:
    """Why GPUDirect Storage cannot be tried here, for people; "" where it can. Asked once a process.

    Args:
        places: where to look.
    """
    if not _has_bindings():
        return "cuda-bindings with cuFile is not installed. Install torchstorm[cuda]."
    try:
        Path(places.modules).read_bytes()
    except OSError as error:
        return (
            f"{places.modules} cannot be read ({error.strerror}), and cuFile hangs for ever where it is missing. "
            "A container needs the host's /proc."
        )
    if not (os.path.exists(places.nvidia_fs) or _has_p2pdma(places)):
        return (
            f"neither nvidia-fs ({places.nvidia_fs} is missing) nor P2PDMA ({places.nvidia_parameters} has no "
            "RMForceStaticBar1=1) is configured, so cuFile would read through the host. Load nvidia-fs, or give the "
            "container its device file."
        )
    return _first_open(places)


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.cufile") is not None
    except ImportError:  # no package cuda, or none cuda.bindings
        return False


def _has_p2pdma(places: Places) -> bool:
    try:
        return "RMForceStaticBar1=1" in Path(places.nvidia_parameters).read_text()
    except OSError:
        return False


def _first_open(places: Places) -> str:
    # -P: the script's own directory holds modules whose names may be others', too.
    command = [sys.executable, "-P", str(cufile_probe.__file__), places.libcuda, places.libcufile]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as probe:
        try:
            answer, complaint = probe.communicate(timeout=places.open_timeout_s)
        except subprocess.TimeoutExpired:
            probe.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in an uninterruptible call it stays; do not
                probe.communicate(timeout=5)
            return (
                f"cuFileDriverOpen did not return within {places.open_timeout_s:g} s in a process of its own, so it "
                "is not called in this one. See cufile.log for where it hangs."
            )
    try:
        told = json.loads(answer.splitlines()[-1])
    except (IndexError, ValueError):
        return f"a process that opens cuFile ended with {probe.returncode} and no answer: {complaint.strip()[-300:]}"
    if told["reason"]:
        closed = "; it closed file descriptor 0 on its way" if told["closed_stdin"] else ""
        return f"{told['reason']}{closed}. See cufile.log."
    if not told["gpus"]:
        return f"the CUDA driver ({places.libcuda}) counts no GPU."
    return ""
