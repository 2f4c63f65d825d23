"""Finds out in the traced step what may be computed again: by doing it, and by watching the bytes.

Each kind of operation runs once more after it ran for its user, and what both leave is compared to the last bit: so
an operation that is not deterministic, or writes where its schema does not say, is found and not planned with. And the
bytes of every value are summed up when they are made, read and saved: so a kernel that PyTorch does not see, writing
into a tensor that an operation made (rotary embeddings in place do), is found too. The sums are read by the host once,
when the step is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from torchstorm.errors import UnsupportedError
from torchstorm.offload.fast import FastTier
from torchstorm.offload.recompute.fingerprint import fingerprint
from torchstorm.offload.recompute.replay import run
from torchstorm.offload.recompute.tape import Probe
from torchstorm.offload.recompute.tensors import tensors_of
from torchstorm.offload.step.parcels import Call, Leaf, Ref, Value
from torchstorm.offload.step.views import flat_bytes, row_of

_SUMS_BYTES = 2**19  # of the rows and columns that a fingerprint adds up, and more


class TracingProbe(Probe):
    """Watches one step.

    Args:
        fast: the fast device.
        aside: entered around all that the probe does, so that it counts neither as the step's time nor as its memory.
        room_bytes: what may still be allocated.
    """

    def __init__(
        self,
        fast: FastTier,
        *,
        aside: Callable[[], contextlib.AbstractContextManager[None]],
        room_bytes: Callable[[], int],
    ) -> None:
        self._fast = fast
        self._aside = aside
        self._room_bytes = room_bytes
        self._made: dict[Value, tuple[int, torch.Tensor, tuple[Any, ...]]] = {}
        self._seen: list[tuple[Value, torch.Tensor, torch.Tensor]] = []
        self._unequal: list[tuple[tuple[Any, ...], int, torch.Tensor]] = []
        self._refused: set[tuple[Any, ...]] = set()
        self._scratch: dict[tuple[Any, ...], int] = {}
        self._judged: dict[tuple[tuple[Any, ...], int], bool] = {}  # kinds and places: whether they came out the same
        self._changed: set[Value] = set()
        self._num_judged = self._num_compared = 0
        # Of the operation that is running.
        self._storages: dict[Value, torch.UntypedStorage] = {}
        self._kind: tuple[Any, ...] = ()
        self._is_new = False
        self._overwritten: torch.Tensor | None = None

    def before(self, call: Call, storages: dict[Value, torch.UntypedStorage]) -> None:
        """Sums up what is read, and keeps what an operation of a new kind is about to overwrite."""
        with self._aside():
            for value, storage in storages.items():
                self.see(value, storage)
            self._storages = storages
            self._kind = _kind(call)
            self._overwritten = None
            self._is_new = self._kind not in self._scratch and self._room_bytes() > _expected_bytes(call)
            if self._is_new and call.operator.in_place and isinstance(call.args[0], Ref):
                self._overwritten = flat_bytes(storages[call.args[0].value]).clone()

    def after(self, call: Call, out: Any) -> None:
        """Sums up what was made, and compares with what running the operation again leaves."""
        with self._aside():
            self._compare(call, out)  # a call of its own: what it makes is gone when the step goes on
            # What the last operation of forward has read would lie there through backward.
            self._storages, self._overwritten = {}, None

    def _compare(self, call: Call, out: Any) -> None:
        own_bytes = self._scratch_of_the_run()
        tensors = tensors_of(out)
        rows = [flat_bytes(tensors[place].untyped_storage()) for place in call.places]
        for reference, place, row in zip(call.outputs, call.places, rows, strict=True):
            value = reference()
            if value is not None:
                self._made[value] = (place, fingerprint(row), self._kind)
        # Again, and as much for the sums, of which the signs take an eighth.
        needed_bytes = own_bytes + sum(9 * row.nbytes // 8 for row in rows) + _SUMS_BYTES
        if self._is_new and rows and self._room_bytes() > needed_bytes:
            try:
                again = self._again(call)
            except UnsupportedError:
                self._refused.add(self._kind)
            else:
                for place, one, other in zip(call.places, again, rows, strict=True):
                    self._unequal.append((self._kind, place, _differs(row_of(one), other)))
        # Where there was no room to run it again, what it took for its user tells at least that much.
        call.scratch_bytes = self._scratch.get(self._kind, own_bytes)

    def see(self, value: Value, storage: torch.UntypedStorage) -> None:
        """The value is read or saved now: are its bytes still those that were made?"""
        made = self._made.get(value)
        if made is not None:
            self._seen.append((value, made[1], fingerprint(flat_bytes(storage))))

    def can_make(self, value: Value) -> bool:
        """Whether running its operation again will make a value, and nobody has changed it since, as far as the step
        has come. The host waits for the device."""
        for kind, place, differs in self._unequal[self._num_judged :]:
            self._judged[kind, place] = not differs.item() and self._judged.get((kind, place), True)
        for one, made, seen in self._seen[self._num_compared :]:
            if not torch.equal(made, seen):
                self._changed.add(one)
        self._num_judged, self._num_compared = len(self._unequal), len(self._seen)
        known = self._made.get(value)
        if known is None or value in self._changed or known[2] in self._refused:
            return False
        return self._judged.get((known[2], known[0]), False)

    def is_as_made(self, value: Value, row: torch.Tensor) -> bool:
        """Whether (nbytes,) uint8 are the bytes that a value was made with; True where that is not known."""
        known = self._made.get(value)
        return known is None or torch.equal(known[1], fingerprint(row))

    def finish(self) -> None:
        """Takes the means to run again from every operation that failed. The host waits for the device."""
        bad: dict[tuple[Any, ...], set[int]] = {}
        if self._unequal:
            failed = torch.stack([differs for _, _, differs in self._unequal]).tolist()
            for (kind, place, _), differs in zip(self._unequal, failed, strict=True):
                if differs:
                    bad.setdefault(kind, set()).add(place)
        for value, (place, _, kind) in self._made.items():
            if value.call is None or not (bad or self._refused):
                continue
            # Of several outputs some may be as before: attention's, beside a seed that it draws and does not use.
            if kind in self._refused or place in bad.get(kind, ()):
                value.call = None
        if self._seen:
            made = torch.stack([one for _, one, _ in self._seen])
            seen = torch.stack([other for _, _, other in self._seen])
            for (value, _, _), changed in zip(self._seen, (made != seen).any(1).tolist(), strict=True):
                if changed:
                    value.call = None
        self._made, self._seen, self._unequal, self._storages = {}, [], [], {}

    def _again(self, call: Call) -> list[torch.Tensor]:
        """Runs the operation again, and learns what it allocates meanwhile."""

        there = {value: flat_bytes(storage) for value, storage in self._storages.items()}
        target = call.args[0] if call.args else None
        if self._overwritten is not None and isinstance(target, Ref):
            there[target.value] = self._overwritten
        self._fast.reset_peak()
        rows = run(call, there)
        self._scratch[self._kind] = self._fast.peak_bytes() - self._fast.allocated_bytes()
        return rows

    def _scratch_of_the_run(self) -> int:
        """What the operation that has just run for its user allocated besides its results."""
        # `before` began the interval whose peak this is.
        return self._fast.peak_bytes() - self._fast.allocated_bytes()


def _expected_bytes(call: Call) -> int:
    """About what running an operation again allocates."""
    return 2 * sum(value.nbytes for value in call.inputs) + 2**20


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A scalar on the device: whether two rows of bytes differ. Sums of both, so that no third row is needed."""
    if one.nbytes != other.nbytes:
        return torch.ones((), dtype=torch.bool, device=one.device)
    return (fingerprint(one) != fingerprint(other)).any()


def _kind(call: Call) -> tuple[Any, ...]:
    """What must agree for two calls to behave alike: the operator, and all about its arguments but their bytes."""

    def described(item: Any) -> Any:
        if isinstance(item, Ref):
            return item.view
        if isinstance(item, Leaf):
            return (item.tensor.dtype, tuple(item.tensor.shape), item.tensor.stride())
        if isinstance(item, list | tuple):
            return tuple(described(one) for one in item)
        return repr(item)

    named = tuple((name, described(item)) for name, item in sorted(call.kwargs.items()))
    return (call.operator.name, described(call.args), named)
