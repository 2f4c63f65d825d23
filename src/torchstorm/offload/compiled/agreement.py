"""Which variants of a compiled block have the bits of the one that it began in, found by running them between steps.

Inductor compiles every variant's graphs by themselves, so nothing but a comparison tells that a reduction was not fused
in another order. A call that Dynamo compiles anew is one specialization. Its arguments are remembered, floating-point
tensors without their values, and the variants that a plan picks are run on random ones. Until then such calls run in
the reference, whatever was picked.

Where Dynamo keeps sizes open, calls of a third size run what was compiled for the second. Once nothing was compiled for
a call, others that differ from it in those sizes alone are of the same specialization.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from torchstorm.offload.compiled.case import Call, Case
from torchstorm.offload.fast import FastTier
from torchstorm.offload.native.library import library
from torchstorm.plan.variants import CHEAP

REFERENCE = CHEAP
"""What the others are compared with, where blocks do not begin in another one."""


class Look(NamedTuple):
    """What tells calls of a block apart that Dynamo may compile apart.

    Attributes:
        kinds: everything but sizes.
        sizes: sizes and strides of all tensors, one after the other.
    """

    kinds: Hashable
    sizes: tuple[int, ...]


_Given = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]  # a block, and what it is called with


class Agreement:
    """What is known of blocks that are built alike.

    Args:
        reference: the variant that they begin in, and that the others are compared with.

    Attributes:
        dropped: variants that are not used, with the reason.
        seconds: that forward and backward take a device by themselves, of variants that were timed.
    """

    def __init__(self, reference: str = REFERENCE) -> None:
        self.reference = reference
        self.dropped: dict[str, str] = {}
        self.seconds: dict[str, tuple[float, float]] = {}
        self._agreed = {reference}
        self._cases: list[Case] = []
        self._known: set[Look] = set()  # how calls looked up to the last step
        self._new: set[Look] = set()  # and in this one
        self._open: dict[Hashable, _Open] = {}  # by `Look.kinds`: sizes that may be any
        self._has_compiled = False  # whether this step has, for any of these blocks, which share what is compiled
        self._doubts: set[Look] = set()  # of this step: compiled again, though nothing looked new
        self._doubted: set[Look] = set()  # of earlier ones; the next such calls are all compared

    def variant(self, key: Look, wanted: str) -> str:
        """The variant for a call that looks like `key`; the same throughout a step."""
        return wanted if wanted in self._agreed and self._is_known(key) else self.reference

    def _is_known(self, key: Look) -> bool:
        if key in self._known:
            return True
        found = self._open.get(key.kinds)
        return found is not None and found.covers(key.sizes) and key not in self._doubted

    def freeze(self, key: Look, given: _Given) -> Case | None:
        """A call that is about to run, if calls that look like it are new."""
        is_old = self._is_known(key) or (key in self._new and key not in self._doubted)
        return None if is_old else Case(*given)

    def ran(self, key: Look, case: Case | None, given: _Given, *, is_compiled: bool) -> None:
        """That call has run; `is_compiled` tells whether anything was compiled for it."""
        self._has_compiled |= is_compiled
        if case is None:
            if is_compiled:
                self._doubts.add(key)
            if is_compiled and key not in self._known | self._new:  # known by its open sizes, which are not that open
                case = Case(*given)
                case.forget_values()
                self._cases.append(case)
            return
        if is_compiled or key in self._doubted:
            case.forget_values()
            self._cases.append(case)
        elif not self._has_compiled:
            self._note_open(key)
        self._new.add(key)

    def _note_open(self, key: Look) -> None:
        """A call has run what an earlier step has compiled for calls of other sizes."""
        before = [one.sizes for one in self._known if one.kinds == key.kinds and len(one.sizes) == len(key.sizes)]
        differ = {at for sizes in before for at, size in enumerate(sizes) if size != key.sizes[at]}
        found = self._open.get(key.kinds)
        if before:
            self._open[key.kinds] = _Open(key.sizes, differ | (found.places if found is not None else set()))

    def settle(self) -> None:
        """A step has ended, and all that is in use was compared; what was not is used no more until it is."""
        self._has_compiled = False
        if not self._new and not self._doubts:
            return
        self._known = (self._known | self._new) - self._doubts
        for one in self._doubts:
            self._open.pop(one.kinds, None)
        self._doubted = (self._doubted - self._new) | self._doubts
        self._new, self._doubts = set(), set()
        self._agreed = {variant for variant in self._agreed if self.was_compared(variant)}

    @property
    def is_to_settle(self) -> bool:
        """Whether a step has run what none has before."""
        return bool(self._new or self._doubts)

    def was_compared(self, variant: str) -> bool:
        """Whether it is known of a variant, in every specialization, whether it agrees."""
        is_known = variant == self.reference or variant in self.dropped
        return is_known or all(variant in case.agreed for case in self._cases)

    def agrees(self, variant: str, call: Call, device: torch.device) -> bool:
        """Whether a variant gives the reference's bits in every specialization; compares those not compared so far."""
        if variant == self.reference:
            return True
        for case in self._cases:
            if variant in self.dropped:
                break
            if variant not in case.agreed:
                reason = case.difference(variant, self.reference, call, device)
                if reason:
                    self.dropped[variant] = reason
                    self._agreed.discard(variant)
                case.agreed.add(variant)
        if variant not in self.dropped:
            self._agreed.add(variant)
        return variant not in self.dropped

    def time(self, call: Call, fast: FastTier) -> None:
        """Times the variants that agree, in the specialization that was compiled last; so it must be between steps."""
        if self._cases:
            found = {one: self._cases[-1].seconds_of(one, call, fast) for one in sorted(self._agreed)}
            self.seconds = {one: seconds for one, seconds in found.items() if all(seconds)}


@dataclass(frozen=True)
class _Open:
    """Sizes of calls, and the places among them that may be any: Dynamo compiles apart what is 0 or 1."""

    sizes: tuple[int, ...]
    places: set[int]

    def covers(self, sizes: tuple[int, ...]) -> bool:
        if len(sizes) != len(self.sizes):
            return False
        pairs = enumerate(zip(sizes, self.sizes, strict=True))
        return all(one == other or (at in self.places and min(one, other) > 1) for at, (one, other) in pairs)


def look_of(name: str, module: nn.Module, value: object) -> Look:
    """How a call of a block with these arguments looks."""
    found, sizes = library(), list[int]()
    kinds = (
        name,
        module.training,
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        found.kinds(value, sizes, kinds_of) if found is not None else kinds_of(value, sizes),
    )
    return Look(kinds, tuple(sizes))


def kinds_of(value: object, sizes: list[int]) -> Hashable:
    """What arguments are but for the sizes of tensors in them, which are added to `sizes`."""
    if isinstance(value, torch.Tensor):
        sizes += value.shape
        if value.layout is torch.strided:
            sizes += value.stride()
        return value.dim(), value.layout, value.dtype, value.requires_grad
    if isinstance(value, tuple | list):
        return tuple([kinds_of(item, sizes) for item in value])
    if isinstance(value, dict):
        return tuple([(key, kinds_of(item, sizes)) for key, item in value.items()])
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value).__qualname__
