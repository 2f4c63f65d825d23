"""Pointwise operations that lie one behind another in a chain, as one kernel runs them."""

from __future__ import annotations

import ctypes
import math
import operator
import struct
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from torchstorm.errors import UnsupportedError
from torchstorm.offload.recompute import pointwise
from torchstorm.offload.recompute.compared import Bound, Example, Kernel, kernel_for
from torchstorm.offload.recompute.geometry import Geometry, Look, aligned
from torchstorm.offload.recompute.pointwise import Input, Operand, Operation
from torchstorm.offload.step.parcels import Call, Chain, Leaf, Place, Ref, Value
from torchstorm.offload.step.views import View

_MOST_INPUTS = 8
_MOST_LAYOUTS = 4096
_EXACT = 2**53  # whole numbers beyond it are rounded twice on their way to float32


@dataclass(frozen=True)
class Layout:
    """How a group runs for certain sizes.

    Attributes:
        results: how they look.
        odd: of each input, the bits that its address does not have.
        natures: all but the bytes of those that are leaves, which may be other tensors in each step; None for others.
        bound: the kernel's arguments.
    """

    results: tuple[Look, ...]
    odd: tuple[int, ...]
    natures: tuple[tuple[Any, ...] | None, ...]
    bound: Bound


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


def _is_same(one: Ref | Leaf, other: Ref | Leaf) -> bool:
    """Whether two arguments are one, in each step: a leaf may be another tensor in another step."""
    return isinstance(one, Ref) and isinstance(other, Ref) and one.value is other.value and one.view == other.view


def _key_of(calls: list[Call], looks: list[Look | None]) -> tuple[Any, ...]:
    """What of operations, beside what they are, decides how a kernel runs them."""
    known: dict[Value, int] = {}
    parts: list[Any] = list(looks)
    for call in calls:
        for item in call.args:
            if isinstance(item, Ref):
                parts.append((item.view, known.setdefault(item.value, len(known))))
            elif isinstance(item, Leaf):
                tensor = item.tensor
                parts.append((_nature(tensor), tensor.storage_offset()))
            else:
                parts.append(struct.pack("d", item) if isinstance(item, float) else item)
        parts.append(tuple(call.kwargs.items()))
        made = call.outputs[0]()
        if made is not None:
            known[made] = len(known)
    return tuple(parts)


def _nature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All of a tensor but its bytes."""
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_neg(), tensor.is_conj()


def _look_of(call: Call) -> Look | None:
    """How the result of a call looks in this step; None where its record does not say."""
    made = call.outputs[0]()
    view = None if made is None else made.view
    if made is None or view is None or view.conjugate or view.negative:
        return None
    num = math.prod(view.size)
    is_whole = num > 1 and made.nbytes == view.dtype.itemsize * num
    return Look(view.dtype, tuple(view.size), view.stride) if is_whole else None


class Group:
    """Operations of a chain that lie one behind another and are pointwise, while they are found and afterwards.

    Attributes:
        calls: they.
        members: which operation made which value, while the group is found. (Not later: a value that knows the chain
            which makes it would be a cycle.)
        inputs: what they read that none of them makes: the call that reads it first, and its place among the arguments.
        looks, offsets: of these, as `Geometry.of` takes them.
        numbers: that they read.
        operations, templates, results: of each call.
        outputs: which results are needed afterwards.
        others: values that are made and not needed.
        made: the values of these.
        passed: those of them that others read afterwards.
        frees: what is let go afterwards.
        kernel: what runs them.
        places: of outputs that lie where an input did, which input.
        begin: the first call's place in the chain.
        layout: how it runs for the sizes at hand, once the kernel is taken up.
        seen: the calls' arguments that this is for.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.members: dict[Value, int] = {}
        self.inputs: list[tuple[Call, int]] = []
        self.looks: list[Look] = []
        self.offsets: list[int] = []
        self.numbers: list[float] = []
        self.operations: list[Operation] = []
        self.templates: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.results: list[Look] = []
        self.outputs: list[int] = []
        self.others: list[weakref.ref[Value]] = []
        self.made: list[weakref.ref[Value]] = []
        self.passed: set[Value] = set()
        self.frees: list[Value] = []
        self.kernel: Kernel | None = None
        self.places: dict[int, int] = {}
        self.begin = 0
        self.layout: Layout | None = None
        self.seen: list[tuple[Any, ...]] = []

    # -- found

    def take(self, call: Call, look: Look | None) -> bool:
        """Adds a call if it is pointwise and goes with those before; else leaves all as it is."""
        if look is None or call.operator.in_place or call.state is not None or call.places != [0]:
            return False
        if self.results and (look.size, look.stride) != (self.results[0].size, self.results[0].stride):
            return False
        kept = len(self.inputs), len(self.numbers)
        found = self._operation(call, look)
        made = call.outputs[0]()
        if found is None or made is None or len(self.inputs) > _MOST_INPUTS:
            del self.inputs[kept[0] :], self.looks[kept[0] :], self.offsets[kept[0] :], self.numbers[kept[1] :]
            return False
        operation, template = found
        self.templates.append((call.func, template, dict(call.kwargs)))
        self.members[made] = len(self.calls)
        self.calls.append(call)
        self.operations.append(operation)
        self.results.append(look)
        return True

    def _operation(self, call: Call, look: Look) -> tuple[Operation, tuple[Any, ...]] | None:
        """What a call is to the kernel, and its arguments with an `Operand` for each tensor."""
        room, name = call.operator.name.split(".")[:2]
        if room not in ("torch", "aten"):
            return None
        numbers = [one for one in call.args if isinstance(one, int | float) and not isinstance(one, bool)]
        kwargs = dict(call.kwargs)
        approximate = kwargs.pop("approximate", "none")
        if kwargs.pop("alpha", 1) != 1 or kwargs.pop("inplace", False):
            return None
        swapped = name == "rsub"
        known = pointwise.formula_of("sub" if swapped else name, tuple(map(float, numbers)), approximate)
        if known is None:
            return None
        name, num_operands = known
        is_said = len(call.args) == num_operands + (call.operator.name.split(".")[1] == "pow")
        if (not is_said and name != "convert") or any(float(one) != one or abs(one) > _EXACT for one in numbers):
            return None
        if kwargs and (name != "convert" or any(isinstance(one, Ref | Leaf) for one in kwargs.values())):
            return None
        read: list[Operand] = []
        template: list[Any] = []
        for position, item in enumerate(call.args):
            if position >= num_operands:
                if isinstance(item, Ref | Leaf | list | tuple):
                    return None
                template.append(item)
                continue
            if isinstance(item, int | float) and not isinstance(item, bool):
                read.append(Operand("number", len(self.numbers)))
                self.numbers.append(float(item))
                template.append(read[-1])
                continue
            operand = self._operand(call, position, look, converts=name == "convert")
            if operand is None:
                return None
            read.append(operand)
            template.append(operand)
        if len(read) != num_operands or not any(one.kind != "number" for one in read):
            return None
        return Operation(name, tuple(reversed(read) if swapped else read), look.dtype), tuple(template)

    def _operand(self, call: Call, place: int, result: Look, *, converts: bool) -> Operand | None:
        """What an argument is to the kernel."""
        item = call.args[place]
        if isinstance(item, Ref):
            view = item.view
            at = self.members.get(item.value)
            if at is not None:
                made = self.results[at]
                natural = View(made.dtype, made.size, made.stride, 0, conjugate=False, negative=False)
                is_natural = tuple(view.size) == natural.size and view == natural._replace(size=view.size)
                return Operand("made", at) if is_natural and self._goes(made.dtype, result, converts) else None
            if view.conjugate or view.negative:
                return None
            dtype, size, stride, offset = view.dtype, view.size, view.stride, view.offset_bytes
        elif isinstance(item, Leaf):
            tensor = item.tensor
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device != call.device:
                return None
            if tensor.is_conj() or tensor.is_neg() or tensor.layout is not torch.strided:
                return None
            dtype, size, stride = tensor.dtype, tuple(tensor.shape), tensor.stride()
            offset = int(tensor.storage_offset()) * dtype.itemsize
        else:
            return None
        steps = aligned(size, stride, result.size)
        if steps is None or min(steps, default=0) < 0 or not self._goes(dtype, result, converts):
            return None
        look = Look(dtype, result.size, steps)
        for at, (other, where) in enumerate(self.inputs):
            if self.looks[at] == look and _is_same(other.args[where], item):
                return Operand("input", at)
        self.inputs.append((call, place))
        self.looks.append(look)
        self.offsets.append(offset)
        return Operand("input", len(self.inputs) - 1)

    @staticmethod
    def _goes(dtype: torch.dtype, result: Look, converts: bool) -> bool:
        """Whether an operand's elements are exact where the operation computes: a wider one would be rounded first."""
        if dtype not in pointwise.C_TYPES:
            return False
        return converts or dtype is result.dtype or result.dtype is torch.float32

    def close(self, chain: Chain, begin: int, wanted: set[Value]) -> bool:
        """All calls are there, from one place of the chain: says which results are needed, and finds the kernel. False
        where they do not pay, or would take more memory at once than one after another."""
        end = begin + len(self.calls)
        later = {one for call in chain.calls[end:] for one in call.inputs}
        frees = chain.frees[begin:end]
        made = list(self.members)
        self.outputs = [at for at, one in enumerate(made) if one in wanted or one in later]
        self.made = [self.calls[at].outputs[0] for at in self.outputs]
        self.others = [weakref.ref(one) for at, one in enumerate(made) if at not in self.outputs]
        mine = set(made)
        self.passed = mine & later
        self.frees = [one for some in frees for one in some if one not in mine]
        passing = chain.passed - wanted
        if len(self.calls) < 2 or not self.outputs:
            return False
        self._give_places({one for some in frees for one in some if one in passing})
        if not self._takes_no_more(frees, passing):
            return False
        found = self._geometry()
        if found is None:
            return False
        geometry, inputs = found
        code = pointwise.source_of(
            tuple(self.operations),
            inputs,
            tuple(self.outputs),
            num_numbers=len(self.numbers),
            num_dims=len(geometry.sizes),
            width=geometry.width,
        )
        example = Example(
            calls=tuple(self.templates),
            results=tuple(self.results),
            looks=tuple(self.looks),
            outputs=tuple(self.outputs),
            numbers=tuple(self.numbers),
            inputs=inputs,
            num_dims=len(geometry.sizes),
            width=geometry.width,
        )
        self.begin = begin
        self.kernel = kernel_for(code, tuple(call.operator.name for call in self.calls), example, self.calls[0].device)
        self.members.clear()
        return self.kernel.is_exact is not False

    def _geometry(self) -> tuple[Geometry, tuple[Input, ...]] | None:
        geometry = Geometry.of(self.results[0], self.looks, self.offsets)
        if geometry is None:
            return None
        inputs = (
            Input(look.dtype, steps[-1] if steps[-1] in (0, 1) else 2)
            for look, steps in zip(self.looks, geometry.steps, strict=True)
        )
        return geometry, tuple(inputs)

    def _give_places(self, passing: set[Value]) -> None:
        """Has results lie where an input lies that nothing reads afterwards, and that is read as a whole alone: each
        thread reads its elements first."""
        free = {}
        read = [item.value for call, place in self.inputs if isinstance(item := call.args[place], Ref)]
        for at, ((call, place), look) in enumerate(zip(self.inputs, self.looks, strict=True)):
            item = call.args[place]
            nbytes = look.dtype.itemsize * math.prod(look.size)
            if not isinstance(item, Ref) or item.value not in passing:
                continue
            if item.value.nbytes == nbytes and read.count(item.value) == 1:
                free[at] = look
        for number, output in enumerate(self.outputs):
            result = self.results[output]
            found = next((at for at, look in free.items() if look == result), None)
            if found is not None:
                self.places[number] = found
                del free[found]

    def _takes_no_more(self, frees: list[list[Value]], passing: set[Value]) -> bool:
        """Whether all results that are needed, beside all that is read, are no more than there is at once otherwise:
        of what only passes, an operation's inputs go before the next one."""
        live = highest = 0
        for value, some in zip(self.members, frees, strict=True):
            live += value.nbytes
            highest = max(highest, live)
            live -= sum(one.nbytes for one in some if one in passing)
        made = list(self.members)
        new = [made[at].nbytes for place, at in enumerate(self.outputs) if place not in self.places]
        return sum(new) <= highest

    # -- run

    def is_as_planned(self) -> bool:
        """Whether nothing is needed of what the kernel does not write, or writes over."""
        for reference in self.others:
            value = reference()
            if value is not None and value.saved is not None and value.saved.parcel.place is Place.ABSENT:
                return False
        for at in self.places.values():
            call, place = self.inputs[at]
            if call.args[place].value.saved is not None:
                return False
        return True

    def fits(self) -> bool:
        """Whether the kernel can run for the sizes that this step has, for which it is made ready."""
        if len(self.seen) == len(self.calls) and all(map(operator.is_, (call.args for call in self.calls), self.seen)):
            return self.layout is not None
        assert self.kernel is not None
        looks = [_look_of(call) for call in self.calls]
        key = _key_of(self.calls, looks)
        layouts = self.kernel.layouts
        if key not in layouts:  # else another group had the same sizes
            if len(layouts) >= _MOST_LAYOUTS:
                layouts.clear()
            layouts[key] = self._layout(looks)
        self.layout = layouts[key]
        self.seen = [call.args for call in self.calls]
        return self.layout is not None

    def _layout(self, looks: list[Look | None]) -> Layout | None:
        """None where these sizes want another kernel."""
        assert self.kernel is not None
        example, now = self.kernel.example, Group()
        if not all(now.take(call, look) for call, look in zip(self.calls, looks, strict=True)):
            return None
        found = now._geometry()
        if found is None or tuple(now.operations) != tuple(self.operations):
            return None
        geometry, inputs = found
        if (inputs, len(geometry.sizes), geometry.width) != (example.inputs, example.num_dims, example.width):
            return None
        bound = Bound(self.kernel, geometry, len(inputs) + len(self.outputs), now.numbers)
        odd = [one.dtype.itemsize * geometry.width - 1 if one.inner == 1 else 0 for one in inputs]
        if any(now.looks[at] != now.results[self.outputs[number]] for number, at in self.places.items()):
            return None
        read = [call.args[place] for call, place in now.inputs]
        natures = [_nature(one.tensor) if isinstance(one, Leaf) else None for one in read]
        return Layout(tuple(now.results), tuple(odd), tuple(natures), bound)

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
                if _nature(tensor) != nature:
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
