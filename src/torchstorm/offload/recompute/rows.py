"""Finds pointwise operations that lie one behind another in a chain and may be one kernel."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from torchstorm.offload.recompute import pointwise
from torchstorm.offload.recompute.geometry import Geometry, Look, aligned
from torchstorm.offload.recompute.pointwise import Input, Operand, Operation
from torchstorm.offload.step.parcels import Call, Leaf, Ref, Value
from torchstorm.offload.step.views import View

_MOST_INPUTS = 8
_EXACT = 2**53  # whole numbers beyond it are rounded twice on their way to float32


class Row:
    """Operations that may be one kernel, for the sizes that they have now.

    Attributes:
        calls: they.
        members: which of them made which value.
        inputs: what they read that none of them makes: the call that reads it first, and its place among the arguments.
        looks, offsets: of these, as `Geometry.of` takes them.
        numbers: that they read.
        operations, templates, results: of each call.
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
        room, base = call.operator.name.split(".")[:2]
        if room not in ("torch", "aten"):
            return None
        numbers = [one for one in call.args if isinstance(one, int | float) and not isinstance(one, bool)]
        kwargs = dict(call.kwargs)
        approximate = kwargs.pop("approximate", "none")
        if kwargs.pop("alpha", 1) != 1 or kwargs.pop("inplace", False):
            return None
        swapped = base == "rsub"
        known = pointwise.formula_of("sub" if swapped else base, tuple(map(float, numbers)), approximate)
        if known is None:
            return None
        name, num_operands = known
        is_said = len(call.args) == num_operands + (base == "pow")
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

    def geometry(self) -> tuple[Geometry, tuple[Input, ...]] | None:
        """How a kernel walks through them, and what it reads; None where it cannot."""
        geometry = Geometry.of(self.results[0], self.looks, self.offsets)
        if geometry is None:
            return None
        inputs = (
            Input(look.dtype, steps[-1] if steps[-1] in (0, 1) else 2)
            for look, steps in zip(self.looks, geometry.steps, strict=True)
        )
        return geometry, tuple(inputs)


def _is_same(one: Ref | Leaf, other: Ref | Leaf) -> bool:
    """Whether two arguments are one, in each step: a leaf may be another tensor in another step."""
    return isinstance(one, Ref) and isinstance(other, Ref) and one.value is other.value and one.view == other.view


def key_of(calls: list[Call], looks: list[Look | None]) -> tuple[Any, ...]:
    """What of operations, beside what they are, decides how a kernel runs them."""
    known: dict[Value, int] = {}
    parts: list[Any] = list(looks)
    for call in calls:
        for item in call.args:
            if isinstance(item, Ref):
                parts.append((item.view, known.setdefault(item.value, len(known))))
            elif isinstance(item, Leaf):
                tensor = item.tensor
                parts.append((nature_of(tensor), tensor.storage_offset()))
            else:
                parts.append(struct.pack("d", item) if isinstance(item, float) else item)
        parts.append(tuple(call.kwargs.items()))
        made = call.outputs[0]()
        if made is not None:
            known[made] = len(known)
    return tuple(parts)


def nature_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All of a tensor but its bytes."""
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_neg(), tensor.is_conj()


def look_of(call: Call) -> Look | None:
    """How the result of a call looks in this step; None where its record does not say."""
    made = call.outputs[0]()
    view = None if made is None else made.view
    if made is None or view is None or view.conjugate or view.negative:
        return None
    num = math.prod(view.size)
    is_whole = num > 1 and made.nbytes == view.dtype.itemsize * num
    return Look(view.dtype, tuple(view.size), view.stride) if is_whole else None
