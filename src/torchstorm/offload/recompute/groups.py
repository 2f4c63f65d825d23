"""Pointwise operations of a chain that one kernel runs."""

from __future__ import annotations

import ctypes
import math
import operator
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from torchstorm.errors import UnsupportedError
from torchstorm.offload.recompute import pointwise
from torchstorm.offload.recompute.compared import Bound, Example, Kernel, kernel_for
from torchstorm.offload.recompute.geometry import Look
from torchstorm.offload.recompute.rows import Row, key_of, look_of, nature_of
from torchstorm.offload.step.parcels import Call, Chain, Leaf, Ref, Value

_MOST_LAYOUTS = 4096


@dataclass(frozen=True)
class Layout:
    """How a group runs for certain sizes.

    Attributes:
        results, looks: how the results and the inputs look.
        odd: of each input, the bits that its address does not have.
        natures: all but the bytes of those that are leaves, which may be other tensors in each step; None for others.
        bound: the kernel's arguments.
    """

    results: tuple[Look, ...]
    looks: tuple[Look, ...]
    odd: tuple[int, ...]
    natures: tuple[tuple[Any, ...] | None, ...]
    bound: Bound

    def has_place(self, result: int, at: int) -> bool:
        """Whether a result may lie where an input lies."""
        return self.natures[at] is None and self.looks[at] == self.results[result]


def unchanged(leaf: Leaf, call: Call) -> torch.Tensor:
    """The tensor that an operation has read, and reads again."""
    tensor = leaf.tensor
    if not tensor.is_inference() and tensor._version != leaf.version:
        raise UnsupportedError(
            f"{call.operator.name} should run again in backward, but an argument of shape {tuple(tensor.shape)} has "
            f"changed since (version {leaf.version}, now {tensor._version}): change weights and inputs after the step, "
            "not within its backward."
        )
    if leaf.address and tensor.untyped_storage()._cdata != leaf.address:
        raise UnsupportedError(
            f"{call.operator.name} should run again in backward, but an argument of shape {tuple(tensor.shape)} was "
            "given other memory since (as by `.data =`): do so after the step."
        )
    return tensor


class Group:
    """A row of a chain's operations, and the kernel that runs them. It holds no value that it makes: one that knows
    the chain which makes it would be a cycle.

    Args:
        row: two operations or more.
        chain: whose they are.
        begin: the first one's place in it.
        wanted: values that were not there as the chain ran, and are now.

    Attributes:
        calls: the operations.
        inputs: as in `Row`.
        outputs: which results are needed afterwards.
        made: the values of these.
        passed: those of them that others read afterwards.
        others: values that are made and not needed.
        frees: what is let go afterwards.
        places: of outputs that lie where an input did, which input.
        kernel: what runs them; None where none can, or would take more memory at once than they do one by one.
        layout: how it runs for the sizes at hand, once the kernel is taken up.
        seen: the calls' arguments that this is for.
    """

    def __init__(self, row: Row, chain: Chain, begin: int, wanted: set[Value]) -> None:
        self.calls, self.inputs, self.begin = row.calls, row.inputs, begin
        self.operations = tuple(row.operations)
        self.layout: Layout | None = None
        self.seen: list[tuple[Any, ...]] = []
        end = begin + len(self.calls)
        later = {one for call in chain.calls[end:] for one in call.inputs}
        frees = chain.frees[begin:end]
        made = list(row.members)
        self.outputs = [at for at, one in enumerate(made) if one in wanted or one in later]
        self.made = [self.calls[at].outputs[0] for at in self.outputs]
        self.others = [weakref.ref(one) for at, one in enumerate(made) if at not in self.outputs]
        self.passed = row.members.keys() & later
        self.frees = [one for some in frees for one in some if one not in row.members]
        passing = chain.passed - wanted
        self.places = self._places(row, {one for some in frees for one in some if one in passing})
        is_usable = bool(self.outputs) and self._takes_no_more(made, frees, passing)
        self.kernel = self._kernel(row) if is_usable else None

    def _kernel(self, row: Row) -> Kernel | None:
        found = row.geometry()
        if found is None:
            return None
        geometry, inputs = found
        code = pointwise.source_of(
            self.operations,
            inputs,
            tuple(self.outputs),
            num_numbers=len(row.numbers),
            num_dims=len(geometry.sizes),
            width=geometry.width,
        )
        example = Example(
            calls=tuple(row.templates),
            results=tuple(row.results),
            looks=tuple(row.looks),
            outputs=tuple(self.outputs),
            numbers=tuple(row.numbers),
            inputs=inputs,
            num_dims=len(geometry.sizes),
            width=geometry.width,
        )
        return kernel_for(code, tuple(call.operator.name for call in self.calls), example, self.calls[0].device)

    def _places(self, row: Row, passing: set[Value]) -> dict[int, int]:
        """Has results lie where an input lies that nothing reads afterwards, and that is read as a whole alone: each
        thread reads its elements first."""
        free, places = {}, {}
        read = [item.value for call, place in self.inputs if isinstance(item := call.args[place], Ref)]
        for at, ((call, place), look) in enumerate(zip(self.inputs, row.looks, strict=True)):
            item = call.args[place]
            nbytes = look.dtype.itemsize * math.prod(look.size)
            if not isinstance(item, Ref) or item.value not in passing:
                continue
            if item.value.nbytes == nbytes and read.count(item.value) == 1:
                free[at] = look
        for number, output in enumerate(self.outputs):
            result = row.results[output]
            found = next((at for at, look in free.items() if look == result), None)
            if found is not None:
                places[number] = found
                del free[found]
        return places

    def _takes_no_more(self, made: list[Value], frees: list[list[Value]], passing: set[Value]) -> bool:
        """Whether all results that are needed, beside all that is read, are no more than there is at once otherwise:
        of what only passes, an operation's inputs go before the next one."""
        live = highest = 0
        for value, some in zip(made, frees, strict=True):
            live += value.nbytes
            highest = max(highest, live)
            live -= sum(one.nbytes for one in some if one in passing)
        new = [made[at].nbytes for place, at in enumerate(self.outputs) if place not in self.places]
        return sum(new) <= highest

    def is_as_planned(self) -> bool:
        """Whether nothing is needed of what the kernel does not write, or writes over."""
        for reference in self.others:
            value = reference()
            if value is not None and value.absent is not None:
                return False
        for at in self.places.values():
            call, place = self.inputs[at]
            item = call.args[place]
            if not isinstance(item, Ref) or item.value.saved is not None:
                return False
        return True

    def fits(self) -> bool:
        """Whether the kernel can run for the sizes that this step has, for which it is made ready."""
        if len(self.seen) == len(self.calls) and all(map(operator.is_, (call.args for call in self.calls), self.seen)):
            return self.layout is not None
        assert self.kernel is not None
        looks = [look_of(call) for call in self.calls]
        key = key_of(self.calls, looks)
        layouts = self.kernel.layouts
        if key not in layouts:  # else another group had the same sizes
            if len(layouts) >= _MOST_LAYOUTS:
                layouts.clear()
            layouts[key] = self._layout(looks)
        self.layout = found = layouts[key]
        if found is not None and not all(found.has_place(self.outputs[at], by) for at, by in self.places.items()):
            self.layout = None
        self.seen = [call.args for call in self.calls]
        return self.layout is not None

    def _layout(self, looks: list[Look | None]) -> Layout | None:
        """None where these sizes want another kernel."""
        assert self.kernel is not None
        example, now = self.kernel.example, Row()
        if not all(now.take(call, look) for call, look in zip(self.calls, looks, strict=True)):
            return None
        found = now.geometry()
        if found is None or tuple(now.operations) != self.operations:
            return None
        geometry, inputs = found
        if (inputs, len(geometry.sizes), geometry.width) != (example.inputs, example.num_dims, example.width):
            return None
        bound = Bound(self.kernel, geometry, len(inputs) + len(self.outputs), now.numbers)
        odd = [one.dtype.itemsize * geometry.width - 1 if one.inner == 1 else 0 for one in inputs]
        read = [call.args[place] for call, place in now.inputs]
        natures = [nature_of(one.tensor) if isinstance(one, Leaf) else None for one in read]
        return Layout(tuple(now.results), tuple(now.looks), tuple(odd), tuple(natures), bound)

    def run(self, there: dict[Value, torch.Tensor]) -> list[torch.Tensor] | None:
        """Runs the kernel.

        Args:
            there: what `View.over` takes, for each value that it reads.

        Returns:
            The like for each of `made`; None where an input does not lie as it should, so that nothing has run.

        Raises:
            UnsupportedError: a weight or an input changed since, in a way that autograd does not see.
        """
        layout = self.layout
        assert layout is not None
        addresses: list[ctypes.c_void_p | int | None] = []
        for (call, place), odd, nature in zip(self.inputs, layout.odd, layout.natures, strict=True):
            item = call.args[place]
            if nature is None:
                base = there[item.value]
                row = base.data_ptr() if base.dtype is torch.uint8 else base.untyped_storage().data_ptr()
                address = row + item.view.offset_bytes
            else:
                tensor = unchanged(item, call)
                if nature_of(tensor) != nature:
                    return None
                address = tensor.data_ptr()
            if address & odd:
                return None
            addresses.append(address)
        contents = [self._content(place, there) for place in range(len(self.outputs))]
        layout.bound.run([*addresses, *(one.data_ptr() for one in contents)])
        return contents

    def _content(self, place: int, there: dict[Value, torch.Tensor]) -> torch.Tensor:
        """Room for a result."""
        assert self.layout is not None
        look = self.layout.results[self.outputs[place]]
        at = self.places.get(place)
        if at is not None:
            call, where = self.inputs[at]
            item = call.args[where]
            return torch.as_strided(item.view.over(there[item.value]), look.size, look.stride)
        return torch.empty_strided(look.size, look.stride, dtype=look.dtype, device=self.calls[0].device)
