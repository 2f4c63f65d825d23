"""What autograd has let go of: it leaves every tier, but not before all has been computed again that needs it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torchstorm.offload.step.kept import KeptStorage
from torchstorm.offload.step.parcels import Parcel, Saved, Value
from torchstorm.offload.step.residency import Residency
from torchstorm.offload.step.running import Running


class LetGo:
    """Saved tensors that autograd has dropped, from any thread and even from within the Session's own work.

    Args:
        residency: what is where.
        running: the step that runs.
    """

    def __init__(self, residency: Residency, *, running: Callable[[], Running]) -> None:
        self._residency = residency
        self._running = running
        self._dropped: deque[tuple[Saved, int]] = deque()
        self._awaited: list[Saved] = []  # read by what is yet to be computed again
        self._num_awaited = 0  # of those that stay, when it was last looked at what is read
        residency.kept.is_read_later = lambda storage: self._is_read_later(self._running(), storage)

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to settle."""
        return bool(self._dropped) or self._residency.kept.is_waiting

    def add(self, saved: Saved, placeholder_id: int) -> None:
        """Autograd has dropped a placeholder. Needs no lock."""
        self._dropped.append((saved, placeholder_id))

    def settle(self) -> None:
        """Forgets what nobody needs any more; under the lock of the hooks."""
        kept = self._residency.kept
        if kept.is_waiting:
            kept.settle()
        if not self._dropped and len(kept.awaited) <= self._num_awaited:
            return
        run = self._running()
        while self._dropped:
            saved, placeholder_id = self._dropped.popleft()
            saved.kept.pop(placeholder_id, None)
            saved.live -= 1
            if saved.live:
                continue
            if run.recorder is not None:
                run.recorder.let_go(saved)
            if self._is_read_later(run, saved):
                self._awaited.append(saved)
            else:
                self._remove(saved)
        while (self._awaited or kept.awaited) and self._look():
            pass

    def _look(self) -> bool:
        """Forgets what nothing reads that is yet to be computed again; returns whether something less is now."""
        kept, absent = self._residency.kept, self._residency.absent
        read, num_absent = _read_later(absent), len(absent)
        kept.forget_all_but(read)
        self._num_awaited = len(kept.awaited)
        awaited, self._awaited = self._awaited, []
        for saved in awaited:
            if saved.value in read:
                self._awaited.append(saved)
            else:
                self._remove(saved)
        return len(absent) < num_absent

    def _is_read_later(self, run: Running, saved: Saved | KeptStorage) -> bool:
        """Whether something else may yet be computed again from it, because backward takes another order than it did
        when the step was measured."""
        if not self._residency.absent or saved.value is None or not saved.value.is_read:
            return False
        if run.table is None or saved.ordinal < 0 or run.has_changed:
            return True
        until = run.table.read_until.get(saved.ordinal)
        return saved.value.call is None if until is None else run.moment < until

    def _remove(self, saved: Saved) -> None:
        value, saved.value = saved.value, None
        self._residency.remove(saved)
        if value is not None and value.saved is saved:
            value.saved = None
            for other in self._residency.known.at(saved.address):
                if other.value is value:  # saved with another version counter, too
                    value.saved = other


def _read_later(absent: set[Parcel]) -> set[Value]:
    """What is read when all that is absent is computed again."""
    wanted = [saved.value for parcel in absent for saved in parcel.members]
    read: set[Value] = set()
    while wanted:
        value = wanted.pop()
        if value is None or value.call is None:
            continue
        new = [one for one in value.call.inputs if one not in read]
        read.update(new)
        gone = [one for one in new if one.held is None and (one.saved is None or one.saved.parcel in absent)]
        wanted += gone
    return read
