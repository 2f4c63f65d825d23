"""From a step's records to the operations and values of its `Trace`."""

from __future__ import annotations

from torchstorm.offload.step.clock import seconds_between
from torchstorm.offload.step.parcels import Call, Value
from torchstorm.plan.trace import Op
from torchstorm.plan.trace import Value as TraceValue


class Origins:
    """What the saved storages can be traced back to, numbered.

    Args:
        saved: of every saved storage where its bytes come from, None where that is not known.
    """

    def __init__(self, saved: list[Value | None]) -> None:
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
            if value.call is not None:
                self._calls[value.call] = None
                wanted += value.call.inputs
                # All that one run of it makes counts, wanted or not.
                wanted += [made for reference in value.call.outputs if (made := reference()) is not None]

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
                op=-1 if value.call is None else place[value.call],
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

    def _ordered(self) -> list[Call]:
        return sorted(self._calls, key=lambda call: call.order)


def call_seconds(call: Call) -> float:
    """Seconds that an operation took; 0 where its time was not taken."""
    return 0.0 if call.marks is None else max(0.0, seconds_between(*call.marks))
