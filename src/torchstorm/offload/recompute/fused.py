"""Pointwise operations of a chain that run again as one kernel.

A chain is considered when it has run operation by operation. Its kernels are compiled in a thread; when a later step
begins they are compared with PyTorch's own on values of their own, and taken up where all bits are equal.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass, field

import torch

from torchstorm import nvrtc
from torchstorm.offload.recompute.compared import is_exact
from torchstorm.offload.recompute.geometry import Look
from torchstorm.offload.recompute.groups import Group
from torchstorm.offload.recompute.rows import Row
from torchstorm.offload.step.parcels import Chain, Value


@dataclass
class Noted:
    """What was seen as a chain ran operation by operation.

    Attributes:
        looks: of each operation's result; None where there is not just one, or not a dense one.
        wanted: the values that were not there and are now.
    """

    looks: list[Look | None] = field(default_factory=list)
    wanted: set[Value] = field(default_factory=set)


def describe() -> str:
    """Which way pointwise operations run again on a GPU, as a sentence for people."""
    one_by_one = "pointwise operations that run again on a GPU: one by one, since"
    if os.environ.get("TORCHSTORM_FUSED") == "0":
        return f"{one_by_one} TORCHSTORM_FUSED=0"
    if not nvrtc.is_usable():
        return f"{one_by_one} there is no NVRTC (pip install 'torchstorm[cuda]')"
    return f"pointwise operations that run again on a GPU: in one kernel, by NVRTC {nvrtc.compiler_version()}"


def is_there() -> bool:
    """Whether a GPU's chains are considered: where NVRTC is there, unless TORCHSTORM_FUSED=0."""
    return os.environ.get("TORCHSTORM_FUSED") != "0" and nvrtc.is_usable()


def is_on(device: torch.device) -> bool:
    """Whether chains on a device are considered."""
    return device.type == "cuda" and is_there()


class Fused:
    """A chain whose pointwise operations run in groups.

    Attributes:
        parts: what runs, in order: a group, or the place of a call in the chain.
        groups: those that are groups.
        num_missed: how often they could not run.
    """

    def __init__(self, parts: list[Group | int]) -> None:
        self.parts = parts
        self.groups = [one for one in parts if isinstance(one, Group)]
        self.num_missed = 0

    def is_as_planned(self) -> bool:
        """Whether it makes all that is needed now."""
        return all(group.is_as_planned() for group in self.groups)

    def is_ready(self) -> bool:
        """The same, and whether its kernels can run for the sizes at hand."""
        return self.is_as_planned() and all(group.fits() for group in self.groups)


_waiting: list[weakref.ref[Chain]] = []
_lock = threading.Lock()


def consider(chain: Chain, noted: Noted) -> None:
    """A chain has run operation by operation: finds its groups, and has their kernels compiled beside training."""
    parts: list[Group | int] = []
    at = 0
    while at < len(chain.calls):
        row, end = Row(), at
        while end < len(chain.calls) and row.take(chain.calls[end], noted.looks[end]):
            end += 1
        group = Group(row, chain, at, noted.wanted) if end > at + 1 else None
        if group is not None and group.kernel is not None and group.kernel.is_exact is not False:
            parts.append(group)
            at = end
        else:
            parts += range(at, max(end, at + 1))
            at = max(end, at + 1)
    fused = Fused(parts)
    if fused.groups:
        chain.prepared = fused
        with _lock:
            _waiting.append(weakref.ref(chain))


def take_over() -> None:
    """A step begins: compares kernels that were compiled since, and has chains run by those that give equal bits."""
    if not _waiting:
        return
    with _lock:
        chains, _waiting[:] = list(_waiting), []
    for reference in chains:
        chain = reference()
        if chain is None or chain.prepared is None:
            continue
        groups: list[Group] = chain.prepared.groups
        kernels = [group.kernel for group in groups if group.kernel is not None]
        if not all(kernel.is_compiled for kernel in kernels):
            with _lock:
                _waiting.append(reference)
            continue
        for kernel in kernels:
            if kernel.is_exact is None:
                kernel.is_exact = is_exact(kernel)
        if all(kernel.is_exact for kernel in kernels):
            chain.fused = chain.prepared
        chain.prepared = None
