"""One model trained in several ways, one after the other: every way becomes a row, also one that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from torchstorm.bench import ways
from torchstorm.bench.measure import Context, Meter, Reference, clean
from torchstorm.bench.rows import GIB, Results, Row
from torchstorm.bench.sessions import CHECKED_STEPS, joined, measure_session
from torchstorm.errors import TorchstormError
from torchstorm.offload.session import Session

_SLOW_STEPS = 5


class SideBySide:
    """Ways of training one model.

    Args:
        meter: of its training.
        shape: what its rows are called.
        results: where rows go.
        disk: where a Session spills to on a CPU.
        steps: timed steps of a way.
    """

    def __init__(self, meter: Meter, shape: str, results: Results, *, disk: str | None, steps: int) -> None:
        self.meter, self.shape, self.results = meter, shape, results
        self.device = meter.training.device
        self.reference: Reference | None = None
        self._disk, self._steps = disk, steps

    def row(self, way: str, *, budget_gib: float | None = None, against: str = ways.UNLIMITED, note: str = "") -> Row:
        """A row without figures."""
        return Row(shape=self.shape, way=way, budget_gib=budget_gib, against=against, note=note)

    def add_unlimited(self, *, note: str = "", keep_gradients: bool = False, checked_steps: int = CHECKED_STEPS) -> Row:
        """Keeps everything; others are compared with that from then on.

        Args:
            note: of the row.
            keep_gradients: whether gradients will be compared by size, too.
            checked_steps: how many others can be compared with.
        """
        self.reference = self.meter.reference(ways.keep_everything, steps=checked_steps, keep_gradients=keep_gradients)
        return self.add(ways.UNLIMITED, ways.keep_everything, note=note)

    def add(self, way: str, context: Context, *, note: str = "", slow: bool = False) -> Row:
        """Checks and times a way that is a context around forward and backward.

        Args:
            way: its name.
            context: entered anew for each step.
            note: of the row.
            slow: whether fewer steps have to do.
        """
        row = self.row(way, note=note)
        with self.kept(row):
            assert self.reference is not None
            wrong = self.meter.compare(context, self.reference)
            return self.time(replace(row, note=joined(note, self.reference.note)), context, wrong, slow=slow)
        return self.results.rows[-1]

    def time(self, row: Row, context: Context, wrong: str, *, slow: bool = False) -> Row:
        """Times a way whose gradients have been checked.

        Args:
            row: what is known.
            context: the way.
            wrong: what is wrong with its gradients, "" for nothing.
            slow: whether fewer steps have to do.
        """
        steps = min(self._steps, _SLOW_STEPS) if slow else self._steps
        self.meter.highest_bytes = 0
        timing = self.meter.time(context, warm=1 if slow else 2, steps=steps)
        busy = self.meter.profile(context)
        peak_bytes = self.meter.saved_bytes(context) if self.device.type == "cpu" else timing.peak_bytes
        highest_gib = self.meter.highest_bytes / GIB if self.device.type == "cuda" else None
        row = replace(
            row,
            peak_gib=peak_bytes / GIB,
            highest_gib=highest_gib,
            gpu_busy=busy.gpu_busy,
            overlap=busy.overlap,
            steps=steps,
        )
        if wrong:
            return self.finish(replace(row, note=joined(row.note, f"gradients: {wrong}; so no time is shown")))
        return self.finish(replace(row.timed(timing.seconds), checked=True, host_s=timing.host_s))

    def add_session(self, budget_gib: float, *, name: str = "", compiled: Reference | None = None) -> Row:
        """Checks and times Session at a budget on the fast tier.

        Args:
            budget_gib: in GiB.
            name: of the budget.
            compiled: what its compiled blocks must compute; None for a Session that compiles nothing.
        """
        way, against = (ways.SESSION_COMPILED, ways.COMPILE) if compiled else (ways.SESSION, ways.UNLIMITED)
        row = replace(self.row(way, budget_gib=budget_gib, against=against), budget_name=name)
        with self.kept(row):
            reference = compiled or self.reference
            assert reference is not None
            return self.finish(
                measure_session(
                    self.meter,
                    reference,
                    row,
                    self.open_session,
                    steps=self._steps,
                    compiled=compiled is not None,
                )
            )
        return self.results.rows[-1]

    def open_session(self, budget_bytes: int) -> Session:
        """A Session with a budget on the fast tier; on a CPU with a disk to spill to."""
        training = self.meter.training
        optimizer = training.optimizer or torch.optim.SGD(training.model.parameters())  # one that has no state
        if self.device.type == "cuda":  # pragma: gpu
            return Session(training.model, vram=budget_bytes, optimizer=optimizer)
        return Session(training.model, ram=budget_bytes, disk=self._disk, optimizer=optimizer)

    def finish(self, row: Row) -> Row:
        """Adds a row, with its time over what there is of the way that it compares with, and of everything kept."""
        return self.results.add(
            replace(row, over_unlimited=self._over(row, row.against), over_eager=self._over(row, ways.UNLIMITED))
        )

    def _over(self, row: Row, way: str) -> float | None:
        base = row if row.way == way else self.results.find(self.shape, way)
        if row.step_s is None or base is None or base.step_s is None:
            return None
        return row.step_s / base.step_s

    def settle(self, way: str, *rows: Row) -> float | None:
        """Relates all rows that compare with a way to the mean of those rows of it, in seconds; None without any."""
        times = [row.step_s for row in rows if row.step_s is not None]
        if not times:
            return None
        mean_s = sum(times) / len(times)
        self.results.against(self.shape, way, mean_s)
        return mean_s

    @contextlib.contextmanager
    def kept(self, row: Row) -> Iterator[None]:
        """A way that fails inside has that as its row, and the others still run."""
        try:
            yield
        except Exception as error:
            self.results.add(replace(row, note=joined(row.note, failure(error))))
        clean(self.device)


def failure(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if isinstance(error, TorchstormError) else text[:300]}"
