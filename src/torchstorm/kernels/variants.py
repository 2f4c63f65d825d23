"""The variants of an operation: what each one taught, where it can run, and which is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from torchstorm.errors import ConfigError, DeviceError


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to compute an operation.

    Attributes:
        name: a value of `variant=`.
        taught: what was new.
        costs: time and memory.
        devices: types of devices that it runs on.
        dtypes: of the inputs; empty for all that the operation takes.
        capability: least compute capability of a GPU, as in (9, 0).
        only_there: whether newer GPUs lack its instructions.
        needs: modules without which it cannot run.
    """

    name: str
    taught: str
    costs: str
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = ()
    capability: tuple[int, int] = (8, 0)
    only_there: bool = False
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for module in self.needs:  # now, not while Dynamo traces a call
            is_installed(module)

    def why_not(self, device: torch.device, dtype: torch.dtype) -> str:
        """Why it cannot compute in that dtype on that device, as the end of a sentence; "" where it can."""
        if device.type not in self.devices:
            return f"it runs on {' or '.join(self.devices)}, not on {device.type}"
        missing = [module for module in self.needs if not is_installed(module)]
        if missing:
            return f"it needs {', '.join(missing)}, which is not installed"
        if device.type == "cuda":  # pragma: gpu
            here = torch.cuda.get_device_capability(device)
            if here < self.capability or (self.only_there and here != self.capability):
                only = "exactly " if self.only_there else ""
                return f"it needs compute capability {only}{self.capability}, and {device} has {here}"
        if self.dtypes and dtype not in self.dtypes:
            return f"it takes {', '.join(str(each).removeprefix('torch.') for each in self.dtypes)}, not {dtype}"
        return ""


_found: dict[str, bool] = {}  # rather than functools.cache, which Dynamo warns of and looks through


def is_installed(module: str) -> bool:
    """Whether a module can be imported; looked for once, as that searches folders."""
    if module not in _found:
        try:
            _found[module] = find_spec(module) is not None
        except ModuleNotFoundError:  # the package that it would be in
            _found[module] = False
    return _found[module]


def has_triton_for(x: Tensor) -> bool:
    """Whether Triton's kernels run where x is, and in its dtype."""
    return x.is_cuda and x.dtype != torch.float64 and is_installed("triton")


Ladder = tuple[Variant, ...]
"""Variants in order of history. A name may be there twice, for different devices: it means the device's own."""


def names(ladder: Ladder) -> tuple[str, ...]:
    """Each once, in order of history."""
    return tuple(dict.fromkeys(variant.name for variant in ladder))


def available(ladder: Ladder, device: torch.device, dtype: torch.dtype) -> Ladder:
    """Those that can run."""
    return tuple(variant for variant in ladder if not variant.why_not(device, dtype))


def choose(op: str, ladder: Ladder, variant: str, x: Tensor, *, auto: Callable[[], str]) -> str:
    """The name of the variant that is meant.

    Args:
        op: the operation, for messages.
        ladder: its variants.
        variant: as the user gave it.
        x: an input, whose device and dtype count.
        auto: what "auto" stands for, here and for these inputs.

    Raises:
        ConfigError: there is no such variant.
        DeviceError: it cannot run on x's device, in its dtype, or without something that is not installed.
    """
    if variant == "auto":
        return auto()
    named = [each for each in ladder if each.name == variant]
    if not named:
        known = ", ".join(map(repr, names(ladder)))
        raise ConfigError(f"variant={variant!r}, but {op} has {known} and 'auto'.")
    found = next((each for each in named if x.device.type in each.devices), named[0])
    why_not = found.why_not(x.device, x.dtype)
    if why_not:
        here = ", ".join(repr(each.name) for each in available(ladder, x.device, x.dtype)) or "none"
        raise DeviceError(f"variant={variant!r} of {op}: {why_not}. Here there are {here} and 'auto'.")
    return variant
