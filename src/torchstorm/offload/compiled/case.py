"""A call of a compiled block that can be run again: to compare variants of the block, and to time them."""

from __future__ import annotations

import io
import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchstorm.errors import UnsupportedError
from torchstorm.offload import torch_private as private
from torchstorm.offload.compiled.blocks import hooks_on
from torchstorm.offload.compiled.repeatable import Repeatable, deterministically, is_strict
from torchstorm.offload.compiled.stop_watch import StopWatch
from torchstorm.offload.fast import FastTier
from torchstorm.offload.run.snapshot import Snapshot

Call = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a block in a variant, with positional and keyword arguments."""

_BY_REFERENCE = (nn.Module, nn.Parameter, types.FunctionType, types.MethodType)


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


class Case:
    """One specialization: a call that can be run again, in any variant."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.agreed: set[str] = set()
        self._seconds: dict[str, tuple[float, float]] = {}
        self._module = module
        self._kept: list[Any] = []
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        }
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._modes = [(one, one.training) for one in module.modules()]
        self._trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self._is_deterministic = torch.are_deterministic_algorithms_enabled()
        self._warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._why_not = ""
        if hooks_on(module):
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
            with self._as_then():
                found = self._compared(variant, reference, call, device)
                if found and not is_strict():  # what differs from run to run says nothing about variants
                    found = self._compared_repeatably(variant, reference, call, device)
        except (RuntimeError, UnsupportedError) as error:
            first = (str(error).splitlines() or [""])[0]
            return f"it could not be compared ({type(error).__name__}: {first})"
        return found

    def seconds_of(self, variant: str, call: Call, fast: FastTier) -> tuple[float, float]:
        """Seconds that a variant's forward and backward take a device by themselves; 0.0 where they cannot run again.

        Args:
            variant, call: as in `difference`.
            fast: the device.
        """
        if variant not in self._seconds:
            self._seconds[variant] = 0.0, 0.0
            # Whatever a block says to random numbers, or to little memory: training goes on.
            with suppress(Exception), self._as_then():
                self._seconds[variant] = self._timed(variant, call, fast)
        return self._seconds[variant]

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """The block trains, or is evaluated, as it did at the call; which weights it trains, and how, as well. The user
        may have changed that since, and Dynamo compiles apart for it."""
        modes = [(one, one.training) for one, then in self._modes if one.training is not then]
        trained = [(one, one.requires_grad) for one, then in self._trained if one.requires_grad is not then]
        try:
            for module, now in modes:
                module.training = not now
            for parameter, now in trained:
                parameter.requires_grad_(not now)
            with deterministically(enabled=self._is_deterministic, warn_only=self._warns_only):
                yield
        finally:
            for module, now in modes:
                module.training = now
            for parameter, now in trained:
                parameter.requires_grad_(now)

    def _timed(self, variant: str, call: Call, fast: FastTier) -> tuple[float, float]:
        if self._why_not:
            return 0.0, 0.0
        before = _Before(self._module, fast.device)
        try:
            self._run(variant, call)  # which chooses kernels
            watch, num_before = StopWatch(fast), private.num_compiled()
            self._run(variant, call, watch=watch)
            has_compiled = private.num_compiled() != num_before
            return watch.forward_and_backward() if not has_compiled else (0.0, 0.0)
        finally:
            before.rewind()

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
        before = _Before(self._module, device)
        try:
            expected = self._run(reference, call, repeats=repeats)
            before.rewind()
            found = self._run(variant, call, repeats=repeats)
        finally:
            before.rewind()
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

    def _run(
        self, variant: str, call: Call, *, repeats: bool = False, watch: StopWatch | None = None
    ) -> dict[str, torch.Tensor | None]:
        """Output, gradients and buffers after one call."""
        timed = watch or nullcontext
        torch.manual_seed(0)
        kept = [value.tensor() if isinstance(value, _Remembered) else value for value in self._kept]
        args, kwargs = _Unpickler(io.BytesIO(self._bytes), kept).load()
        with torch.enable_grad():
            with _autocast(self._autocast, self._caches_casts), timed():
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
            with Repeatable() if repeats else nullcontext(), timed():
                gradients = torch.autograd.grad(trained, list(inputs.values()), outer, allow_unused=True)
        found: dict[str, torch.Tensor | None] = {f"output {n}": tensor.detach() for n, tensor in enumerate(tensors)}
        found.update(zip(inputs, gradients, strict=True))
        found.update((f"buffer {name!r}", buffer.clone()) for name, buffer in self._module.named_buffers())
        return found


class _Before:
    """A block as it was: what a step's repeat finds so as well (`Snapshot`), and what its modules hold beside tensors,
    as lists to which a call appends.

    Args:
        block: which is about to be called once more than training calls it.
        device: that it is on.
    """

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self._snapshot = Snapshot(block, (), (), device, unchanging=set(), on_host=False)
        attributes = [(vars(one), dict(vars(one))) for one in block.modules()]
        held = [value for _, before in attributes for value in before.values()]
        self._lists = [(value, list(value)) for value in held if type(value) is list]
        self._dicts = [(value, dict(value)) for value in held if type(value) is dict] + attributes

    def rewind(self) -> None:
        """Makes all as it was. What has not changed is not touched: Dynamo looks whether it was.

        Raises:
            UnsupportedError: as `Snapshot.rewind` does.
        """
        for value, before in self._lists:
            if [*map(id, value)] != [*map(id, before)]:
                value[:] = before
        for named, was in self._dicts:
            if [*map(id, named.values())] != [*map(id, was.values())] or named.keys() != was.keys():
                named.clear()
                named.update(was)
        self._snapshot.rewind()


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
