"""Which variants of a compiled block have the bits of the one that it began in, found by running them between steps.

Inductor compiles every variant's graphs by themselves, so nothing but a comparison tells that a reduction was not fused
in another order. A call that Dynamo compiles anew is one specialization. Its arguments are remembered, floating-point
tensors without their values, and the variants that a plan picks are run on random ones. Until then such calls run in
the reference, whatever was picked.

Where Dynamo keeps sizes open, calls of a third size run what was compiled for the second. Once nothing was compiled for
a call, others that differ from it in those sizes alone are of the same specialization.
"""

from __future__ import annotations

import io
import pickle
import types
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchstorm.errors import UnsupportedError
from torchstorm.offload import torch_private as private
from torchstorm.offload.compiled.repeatable import Repeatable, deterministically, is_strict
from torchstorm.offload.run.snapshot import Snapshot
from torchstorm.plan.variants import CHEAP

REFERENCE = CHEAP
"""What the others are compared with, where blocks do not begin in another one."""

Call = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a block in a variant, with positional and keyword arguments."""


class Look(NamedTuple):
    """What tells calls of a block apart that Dynamo may compile apart.

    Attributes:
        kinds: everything but sizes.
        sizes: sizes and strides of all tensors, one after the other.
    """

    kinds: Hashable
    sizes: tuple[int, ...]


_Given = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]  # a block, and what it is called with
_BY_REFERENCE = (nn.Module, nn.Parameter, types.FunctionType, types.MethodType)


class Agreement:
    """What is known of blocks that are built alike.

    Args:
        reference: the variant that they begin in, and that the others are compared with.

    Attributes:
        dropped: variants that are not used, with the reason.
    """

    def __init__(self, reference: str = REFERENCE) -> None:
        self.reference = reference
        self.dropped: dict[str, str] = {}
        self._agreed = {reference}
        self._cases: list[_Case] = []
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

    def freeze(self, key: Look, given: _Given) -> _Case | None:
        """A call that is about to run, if calls that look like it are new."""
        is_old = self._is_known(key) or (key in self._new and key not in self._doubted)
        return None if is_old else _Case(*given)

    def ran(self, key: Look, case: _Case | None, given: _Given, *, is_compiled: bool) -> None:
        """That call has run; `is_compiled` tells whether anything was compiled for it."""
        self._has_compiled |= is_compiled
        if case is None:
            if is_compiled:
                self._doubts.add(key)
            if is_compiled and key not in self._known | self._new:  # known by its open sizes, which are not that open
                case = _Case(*given)
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
        """A step has ended, and all that is in use was compared."""
        self._has_compiled = False
        if not self._new and not self._doubts:
            return
        self._known = (self._known | self._new) - self._doubts
        for one in self._doubts:
            self._open.pop(one.kinds, None)
        self._doubted = (self._doubted - self._new) | self._doubts
        self._new, self._doubts = set(), set()

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
    sizes: list[int] = []
    kinds = (
        name,
        module.training,
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        _kinds(value, sizes),
    )
    return Look(kinds, tuple(sizes))


def _kinds(value: object, sizes: list[int]) -> Hashable:
    if isinstance(value, torch.Tensor):
        sizes += value.shape
        if value.layout is torch.strided:
            sizes += value.stride()
        return value.dim(), value.layout, value.dtype, value.requires_grad
    if isinstance(value, tuple | list):
        return tuple([_kinds(item, sizes) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _kinds(item, sizes)) for key, item in value.items()])
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value).__qualname__


@dataclass(frozen=True, kw_only=True)
class _Remembered:
    """A tensor, its values only where arithmetic cannot make up others: of a mask, of indices."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    memory: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Remembered:
        made = cls(
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
            memory=None,
        )
        if tensor.is_floating_point() or tensor.is_complex():
            return made
        memory = tensor.detach().as_strided((made._num_elements,), (1,), tensor.storage_offset())
        return cls(**{**vars(made), "memory": memory.to("cpu", copy=True)})

    @property
    def _num_elements(self) -> int:
        """From the first one in memory to the last."""
        if 0 in self.size:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))

    def tensor(self) -> torch.Tensor:
        """One like it."""
        if self.memory is not None:
            return self.memory.to(self.device, copy=True).as_strided(self.size, self.stride)
        memory = _random((self._num_elements,), self.dtype, self.device)
        return memory.as_strided(self.size, self.stride).requires_grad_(self.requires_grad)


class _Case:
    """One specialization: a call that can be run again, in any variant."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.agreed: set[str] = set()
        self._module = module
        self._kept: list[Any] = []
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        }
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._why_not = ""
        if private.hook_numbers(module):
            self._why_not = "it cannot be compared without running the hooks on the block once more"
            return
        file = io.BytesIO()
        try:
            _Pickler(file, self._kept).dump((args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            self._why_not = f"it cannot be compared, since the block's arguments cannot be copied ({error})"
        self._bytes = file.getvalue()

    def forget_values(self) -> None:
        """Keeps no memory of the step."""
        is_held = [isinstance(value, torch.Tensor) and not isinstance(value, _BY_REFERENCE) for value in self._kept]
        pairs = zip(self._kept, is_held, strict=True)
        self._kept = [_Remembered.of(value) if held and not self._why_not else value for value, held in pairs]

    def difference(self, variant: str, reference: str, call: Call, device: torch.device) -> str:
        """In what the bits of a variant are not the reference's; "" where there is nothing."""
        if self._why_not:
            return self._why_not
        try:
            found = self._compared(variant, reference, call, device)
            if found and not is_strict():  # what differs from run to run says nothing about variants
                found = self._compared_repeatably(variant, reference, call, device)
        except (RuntimeError, UnsupportedError) as error:
            first = (str(error).splitlines() or [""])[0]
            return f"it could not be compared ({type(error).__name__}: {first})"
        return found

    def _compared_repeatably(self, variant: str, reference: str, call: Call, device: torch.device) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operations that have no deterministic way, each time they run
            found = self._compared(variant, reference, call, device, repeats=True)
            if found:
                with deterministically(warn_only=True):  # compiled anew, which the mode would see
                    found = self._compared(variant, reference, call, device)
                    found = found and self._compared(variant, reference, call, device, repeats=True)
            return found

    def _compared(
        self, variant: str, reference: str, call: Call, device: torch.device, *, repeats: bool = False
    ) -> str:
        snapshot = Snapshot(self._module, (), (), device, unchanging=set(), on_host=False)
        try:
            expected = self._run(reference, call, repeats=repeats)
            snapshot.rewind()
            found = self._run(variant, call, repeats=repeats)
        finally:
            snapshot.rewind()
        if not expected:
            return "it cannot be compared, since the block returns no tensor with a gradient"
        for name, one in expected.items():
            other = found.get(name)
            if one is None or other is None:
                if one is not other:
                    return f"{name} is missing in one of it and {reference!r}"
            elif not _same_bits(one, other):
                furthest = (one - other).abs().max().item() if one.shape == other.shape else float("nan")
                return f"{name} differs from that of {reference!r}, by {furthest:.1e} at most"
        return ""

    def _run(self, variant: str, call: Call, *, repeats: bool = False) -> dict[str, torch.Tensor | None]:
        """Output, gradients and buffers after one call."""
        torch.manual_seed(0)
        kept = [value.tensor() if isinstance(value, _Remembered) else value for value in self._kept]
        args, kwargs = _Unpickler(io.BytesIO(self._bytes), kept).load()
        with torch.enable_grad():
            with _autocast(self._autocast, self._caches_casts):
                out = call(variant, self._module, args, kwargs)
            tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            trained = [tensor for tensor in tensors if tensor.requires_grad]
            if not trained:
                return {}
            inputs = {
                f"the gradient of input {number}": tensor
                for number, tensor in enumerate(kept)
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad
            }
            for name, parameter in self._module.named_parameters():
                if parameter.requires_grad:
                    inputs[f"the gradient of {name!r}"] = parameter
            outer = [_random(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in trained]
            with Repeatable() if repeats else nullcontext():
                gradients = torch.autograd.grad(trained, list(inputs.values()), outer, allow_unused=True)
        found: dict[str, torch.Tensor | None] = {f"output {n}": tensor.detach() for n, tensor in enumerate(tensors)}
        found.update(zip(inputs, gradients, strict=True))
        found.update((f"buffer {name!r}", buffer.clone()) for name, buffer in self._module.named_buffers())
        return found


class _Pickler(pickle.Pickler):
    """Writes everything but tensors, modules and functions, which it puts into a list."""

    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._kept = kept
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, (torch.Tensor, *_BY_REFERENCE)):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return self._numbers[id(value)]


class _Unpickler(pickle.Unpickler):
    """Takes them from a list."""

    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, number: Any) -> Any:
        return self._kept[number]


def _random(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(len(size))
    if dtype.is_complex:
        return torch.randn(size, dtype=dtype, device=device, generator=generator)
    return torch.randn(size, device=device, generator=generator).to(dtype)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, signs of zeros too; what is no number need only be none in both."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    bits = cast(torch.dtype, getattr(torch, f"int{8 * one.element_size()}"))
    same = one.contiguous().view(bits) == other.contiguous().view(bits)
    return bool((same | (one.isnan() & other.isnan())).all())


@contextmanager
def _autocast(states: dict[str, tuple[bool, torch.dtype]], caches: bool) -> Iterator[None]:
    """As it was at the call: Dynamo compiles again for any other."""
    (on_host, host_dtype), (on_gpu, gpu_dtype) = states["cpu"], states["cuda"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU
        with (
            torch.autocast("cpu", dtype=host_dtype, enabled=on_host, cache_enabled=caches),
            torch.autocast("cuda", dtype=gpu_dtype, enabled=on_gpu, cache_enabled=caches),
        ):
            yield
