"""From a step's records to the operations and values of its `Trace`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch

from torchstorm.offload.recompute.operators import Operator
from torchstorm.offload.step.clock import seconds_between
from torchstorm.offload.step.parcels import Call, Value
from torchstorm.plan.trace import Op, Trace
from torchstorm.plan.trace import Value as TraceValue


class TracedOps:
    """What the saved storages can be traced back to, numbered.

    Args:
        saved: of every saved storage where its bytes come from, None where that is not known.
        before: what made values that were made before the step was recorded.
    """

    def __init__(self, saved: Sequence[Value | None], before: Mapping[Value, Call]) -> None:
        self._before = before
        self.numbers: dict[Value, int] = {}
        self._storage: dict[Value, int] = {}
        self._calls: dict[Call, None] = {}
        wanted: list[Value] = []
        for number, value in enumerate(saved):
            if value is not None:
                self._storage[value] = number
                wanted.append(value)
        while wanted:
            value = wanted.pop()
            if value in self.numbers:
                continue
            self.numbers[value] = len(self.numbers)
            call = self._maker(value)
            if call is not None:
                self._calls[call] = None
                wanted += call.inputs
                # All that one run of it makes counts, wanted or not.
                wanted += [made for reference in call.outputs if (made := reference()) is not None]

    def number_of(self, value: Value | None, storage: int) -> int:
        """The number of a saved storage's value; -1 where it has none, or where a later storage holds the same value,
        which then is the one that can be computed again."""
        return self.numbers[value] if value is not None and self._storage[value] == storage else -1

    def values(self) -> tuple[TraceValue, ...]:
        """In the order of their numbers."""
        place = {call: index for index, call in enumerate(self._ordered())}
        return tuple(
            TraceValue(
                nbytes=value.nbytes,
                op=-1 if (call := self._maker(value)) is None else place[call],
                storage=self._storage.get(value, -1),
            )
            for value in self.numbers
        )

    def ops(self) -> tuple[Op, ...]:
        """In the order in which they ran."""
        return tuple(
            Op(
                name=call.operator.name,
                compute_s=call_seconds(call),
                scratch_bytes=call.scratch_bytes,
                inputs=tuple(self.numbers[value] for value in call.inputs),
                outputs=tuple(
                    self.numbers[made]
                    for reference in call.outputs
                    if (made := reference()) is not None and made in self.numbers
                ),
                number=call.number,
            )
            for call in self._ordered()
        )

    def _maker(self, value: Value) -> Call | None:
        return self._before.get(value, value.call)

    def _ordered(self) -> list[Call]:
        return sorted(self._calls, key=lambda call: call.order)


def made_before(trace: Trace, saved: Sequence[Value | None]) -> dict[Value, Call]:
    """What made the values that a step saved as long as it went like a traced one, as that trace has it.

    Args:
        trace: of the other step.
        saved: the values of the first storages, None where nobody can ask for one any more.
    """
    found: dict[int, Value] = {}
    taken: set[Value] = set()
    for storage, value in zip(trace.storages, saved, strict=False):
        if storage.value >= 0:
            # Two of that step's values are never one of this step's, or they would be made of each other.
            one = value if value is not None and value not in taken else Value(storage.nbytes, None)
            found[storage.value] = one
            taken.add(one)
    calls: dict[int, Call] = {}
    wanted = list(found)
    while wanted:
        number = trace.values[wanted.pop()].op
        if number < 0 or number in calls:
            continue
        op = trace.ops[number]
        for other in (*op.inputs, *op.outputs):
            if other not in found:
                found[other] = Value(trace.values[other].nbytes, None)
                wanted.append(other)
        what = Operator(name=op.name, repeatable=True, is_view=False)
        inputs, outputs = [found[at] for at in op.inputs], [weakref.ref(found[at]) for at in op.outputs]
        call = Call(torch.device(trace.device), None, what, (), {}, inputs, outputs, [], None, op.number, number)
        call.order -= len(trace.ops)  # before what was recorded
        call.scratch_bytes, call.marks = op.scratch_bytes, (0.0, op.compute_s)
        calls[number] = call
    return {found[at]: calls[one.op] for at, one in enumerate(trace.values) if at in found and one.op in calls}


def call_seconds(call: Call) -> float:
    """Seconds that an operation took; 0 where its time was not taken."""
    return 0.0 if call.marks is None else max(0.0, seconds_between(*call.marks))
