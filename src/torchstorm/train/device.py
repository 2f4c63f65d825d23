"""Resolves the device of a run, and checks that the budget matches it."""

import re

import torch

from torchstorm.errors import DeviceError


def resolve_device(name: str | None, *, vram: str | None) -> torch.device:
    """Returns the device of a run.

    Args:
        name: "cpu", "cuda", "cuda:<index>", or None for cuda if available, else cpu.
        vram: the budget for GPU memory, or None.

    Raises:
        DeviceError: the device is unknown or does not exist, or `vram` was given for a run on the CPU.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        name = "cuda" if num_gpus else "cpu"
    match = re.fullmatch(r"cpu|cuda(?::([0-9]+))?", name)
    if match is None:
        raise DeviceError(f"--device {name!r} is not a device: use cpu, cuda, or cuda:0, cuda:1, ...")
    if name == "cpu":
        if vram is not None:
            here = f"this machine has {_gpus(num_gpus)}" if num_gpus else "PyTorch finds no CUDA GPU on this machine"
            raise DeviceError(
                f"--vram {vram} was given, but the run is on the CPU ({here}). "
                "On the CPU the fast tier is RAM and the next one is disk: give --ram and --disk instead."
            )
        return torch.device("cpu")
    if not num_gpus:
        raise DeviceError(
            f"--device {name} was given, but PyTorch {torch.__version__} finds no CUDA GPU on this machine: "
            "use --device cpu, or install a CUDA build of PyTorch and check the driver with nvidia-smi."
        )
    index = int(match[1] or 0)
    if index >= num_gpus:
        raise DeviceError(
            f"--device {name} was given, but this machine has {_gpus(num_gpus)}: use cuda:0"
            + (f" to cuda:{num_gpus - 1}." if num_gpus > 1 else ".")
        )
    return torch.device("cuda", index)


def _gpus(num_gpus: int) -> str:
    return f"{num_gpus} CUDA GPU{'s' if num_gpus != 1 else ''}"
