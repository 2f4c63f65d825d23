"""The variants of an operation: their description, the devices they support, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from torchstorm.errors import ConfigError, DeviceError


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One implementation of an operation.

    Attributes:
        name: a value of `variant=`.
        lesson: the idea of this variant.
        costs: time and memory.
        devices: supported device types.
        dtypes: supported dtypes of the inputs; empty for all that the operation supports.
        capability: minimum compute capability of a GPU, such as (9, 0).
        only_there: whether it supports only this compute capability and no newer one.
        needs: modules that must be installed.
    """

    name: str
    lesson: str
    costs: str
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = ()
    capability: tuple[int, int] = (8, 0)
    only_there: bool = False
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for module in self.needs:  # looked up here, not while Dynamo traces a call
            is_installed(module)

    def why_not(self, device: torch.device, dtype: torch.dtype) -> str:
        """Why it does not support that device and dtype, as the end of a sentence; "" if it does."""
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


_found: dict[str, bool] = {}  # instead of functools.cache, which Dynamo warns about and ignores


def is_installed(module: str) -> bool:
    """Whether a module can be imported. Cached, since it searches folders."""
    if module not in _found:
        try:
            _found[module] = find_spec(module) is not None
        except ModuleNotFoundError:  # its parent package does not exist
            _found[module] = False
    return _found[module]


def has_triton_for(x: Tensor) -> bool:
    """Whether Triton kernels support x's device and dtype."""
    return x.is_cuda and x.dtype != torch.float64 and is_installed("triton")


Ladder = tuple[Variant, ...]
"""Variants in historical order. A name can occur twice, for different device types."""


def names(ladder: Ladder) -> tuple[str, ...]:
    """The names in historical order, each once."""
    return tuple(dict.fromkeys(variant.name for variant in ladder))


def available(ladder: Ladder, device: torch.device, dtype: torch.dtype) -> Ladder:
    """The variants that support a device and dtype."""
    return tuple(variant for variant in ladder if not variant.why_not(device, dtype))


_chosen: set[tuple[str, str, torch.device, torch.dtype]] = set()  # what `choose` has found to run


def choose(op: str, ladder: Ladder, variant: str, x: Tensor, *, auto: Callable[[], str]) -> str:
    """Resolves and checks the `variant` argument of an operation.

    Args:
        op: the operation, for messages.
        ladder: its variants.
        variant: the user's argument.
        x: an input, with the device and dtype to support.
        auto: returns the variant for "auto".

    Raises:
        ConfigError: the variant does not exist.
        DeviceError: it does not support x's device or dtype, or needs a module that is not installed.
    """
    if variant == "auto":
        return auto()
    asked = op, variant, x.device, x.dtype
    is_traced = torch.compiler.is_compiling()  # Dynamo would guard on all that is in there
    if not is_traced and asked in _chosen:
        return variant
    named = [each for each in ladder if each.name == variant]
    if not named:
        known = ", ".join(map(repr, names(ladder)))
        raise ConfigError(f"variant={variant!r}, but {op} has {known} and 'auto'.")
    found = next((each for each in named if x.device.type in each.devices), named[0])
    why_not = found.why_not(x.device, x.dtype)
    if why_not:
        here = ", ".join(repr(each.name) for each in available(ladder, x.device, x.dtype)) or "none"
        raise DeviceError(f"variant={variant!r} of {op}: {why_not}. Here there are {here} and 'auto'.")
    if not is_traced:
        _chosen.add(asked)
    return variant
