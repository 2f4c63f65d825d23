"""One model trained in every way that is asked for, what others offer set up as their users would.

Each way trains the same model on fresh random data. Before its time counts, its gradients are compared with those of
the run that keeps everything, to the last bit and under deterministic algorithms; a way that fails shows no time.
Compiled blocks round elsewhere than eager ones, so those of a Session are compared, to the last bit too, with the same
compiled blocks when they save everything; those of torch.compile alone with the eager ones, by size.

The run that keeps everything is timed at the start and at the end, and `over_unlimited` has the mean of both below the
line, since a GPU's clock drifts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from torchstorm.bench import ways
from torchstorm.bench.measure import Meter, clean
from torchstorm.bench.rows import Results, Row
from torchstorm.bench.sessions import CHECKED_STEPS, UNEVEN, compiled_reference, joined
from torchstorm.bench.side_by_side import SideBySide
from torchstorm.offload.compiled.blocks import repeated_blocks

NO_CHECKPOINTING = "this model has no gradient checkpointing of its own"
NO_BLOCKS = "this model has no repeated blocks to compile"
INSTEAD = "gradients are compared with those of checkpointing"


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """What Sessions are given, besides exactly what checkpointing and selective checkpointing take.

    Attributes:
        gib: GiB.
        shares: of the unlimited run's peak.
        middle: whether also what lies half way between checkpointing's peak and the unlimited run's.
        named: GiB by name. Where there are any, no others, what checkpointing takes neither.
    """

    gib: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    middle: bool = False
    named: dict[str, float] = field(default_factory=dict)

    def found(self, peaks_gib: dict[str, float]) -> list[tuple[float, str]]:
        """Every budget in GiB with its name, the largest first.

        Args:
            peaks_gib: what ways were measured to take.
        """
        if self.named:
            return sorted(((gib, name) for name, gib in self.named.items()), reverse=True)
        found = {gib: "" for gib in self.gib}
        unlimited, checkpoint = peaks_gib.get(ways.UNLIMITED), peaks_gib.get(ways.CHECKPOINT)
        if unlimited is not None:
            found.update({share * unlimited: f"{share:.0%} of the unlimited peak" for share in self.shares})
            if self.middle and checkpoint is not None:
                found[(unlimited + checkpoint) / 2] = "half way from checkpoint to unlimited"
        for way in (ways.SELECTIVE, ways.CHECKPOINT):
            if way in peaks_gib:
                found[peaks_gib[way]] = f"peak of {way}"
        return sorted(found.items(), reverse=True)


class Peers(SideBySide):
    """One model, way after way.

    Args:
        meter: of its training.
        shape: what its rows are called.
        results: where rows go.
        checkpointing: of the model; None where it has none.
        budgets: of Sessions.
        disk: where a Session spills to on a CPU.
        steps: timed steps of a way.
    """

    def __init__(
        self,
        meter: Meter,
        shape: str,
        results: Results,
        *,
        checkpointing: ways.Checkpointing | None,
        budgets: Budgets,
        disk: str | None,
        steps: int,
    ) -> None:
        super().__init__(meter, shape, results, disk=disk, steps=steps)
        self.model = meter.training.model
        self._checkpointing, self._budgets = checkpointing, budgets

    def run(self, chosen: Collection[str], *, note: str = "") -> None:
        """The named ways in their order, and what they are compared with.

        Args:
            chosen: of `ways.WAYS`.
            note: of the row of the run that keeps everything.
        """
        compiles = not set(ways.COMPILED).isdisjoint(chosen)
        unlimited = self._run_unlimited(note, chosen)
        if self.reference is None:
            return
        budgets = self._run_checkpointing(chosen)
        if ways.SESSION in chosen:
            for budget_gib, name in budgets:
                self.add_session(budget_gib, name=name)
        if compiles:
            self._run_compiled(chosen, budgets)
        if ways.TRL in chosen:
            self._run_trl()
        if ways.SAVE_ON_CPU in chosen:
            self.add(ways.SAVE_ON_CPU, lambda: ways.save_to_ram(self.device), slow=True)
        again = self.add(f"{ways.UNLIMITED}-again", ways.keep_everything, slow=True)
        self.settle(ways.UNLIMITED, unlimited, again)

    def _run_unlimited(self, note: str, chosen: Collection[str]) -> Row:
        """Keeps everything; where that cannot run, gradients are compared with those of checkpointing."""
        checked_steps = CHECKED_STEPS if ways.SESSION in chosen else 2
        if self.meter.training.share is not None:
            checked_steps *= UNEVEN
        keep_gradients = not set(ways.COMPILED).isdisjoint(chosen)
        row = self.row(ways.UNLIMITED, note=note if self._checkpointing is None else joined(note, INSTEAD))
        with self.kept(row):
            return self.add_unlimited(note=note, keep_gradients=keep_gradients, checked_steps=checked_steps)
        if self._checkpointing is not None:
            with self._checkpointing(None):
                self.reference = self.meter.reference(
                    ways.keep_everything, steps=checked_steps, keep_gradients=keep_gradients
                )
        return self.results.rows[-1]

    def _run_checkpointing(self, chosen: Collection[str]) -> list[tuple[float, str]]:
        """Full and selective checkpointing; returns the budgets of Sessions, some of which are their peaks."""
        sessions = not {ways.SESSION, ways.SESSION_COMPILED}.isdisjoint(chosen)
        peaks: dict[str, float] = {}
        for way in (ways.UNLIMITED, ways.CHECKPOINT, ways.SELECTIVE):
            is_wanted = way in chosen or (sessions and self.results.find(self.shape, way) is None)
            if is_wanted and way != ways.UNLIMITED:
                self._add_checkpointing(way)
            row = self.results.find(self.shape, way)
            if row is not None and row.peak_gib is not None:
                peaks[way] = row.peak_gib
        return self._budgets.found(peaks)

    def _add_checkpointing(self, way: str) -> None:
        row = self.row(way, note="" if self._checkpointing else NO_CHECKPOINTING)
        if self._checkpointing is None:
            self.results.add(row)
            return
        with self.kept(row), self._checkpointing(ways.selective_contexts if way == ways.SELECTIVE else None):
            self.add(way, ways.keep_everything)

    def _run_compiled(self, chosen: Collection[str], budgets: list[tuple[float, str]]) -> None:
        first = self.add_compiled(ways.COMPILE)
        if ways.COMPILE_CHECKPOINT in chosen and self._checkpointing is not None:
            with self._checkpointing(None):
                self.add_compiled(ways.COMPILE_CHECKPOINT)
        if ways.SESSION_COMPILED in chosen:
            with self.kept(self.row(ways.SESSION_COMPILED, against=ways.COMPILE)):
                reference = compiled_reference(self.meter)
                clean(self.device)
                for budget_gib, name in budgets[-2:]:  # the ones that are hard
                    self.add_session(budget_gib, name=name, compiled=reference)
        if ways.COMPILE_BUDGET in chosen:
            for budget in ways.MEMORY_BUDGETS:
                self.add_compiled(f"{ways.COMPILE_BUDGET}-{budget:g}", budget, slow=True)
        self.settle(ways.COMPILE, first, self.add_compiled(f"{ways.COMPILE}-again", slow=True))

    def add_compiled(self, way: str, memory_budget: float | None = None, *, slow: bool = False) -> Row:
        """Checks and times torch.compile of every block; gradients by size, against the eager ones.

        Args:
            way: its name.
            memory_budget: as in `ways.compiled`.
            slow: whether fewer steps have to do.
        """
        row = self.row(way, against=ways.COMPILE)
        blocks = repeated_blocks(self.model)
        drops = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in self.model.modules())
        if not blocks:
            return self.results.add(replace(row, note=NO_BLOCKS))
        with self.kept(row), contextlib.ExitStack() as compiled:
            assert self.reference is not None
            compiled.enter_context(ways.compiled(blocks, memory_budget, same_random=drops))
            error, wrong = self.meter.compare_size(ways.keep_everything, self.reference, same_random=drops)
            if drops:  # compiled blocks draw other numbers of their own, which is quicker and cannot be compared
                compiled.close()
                compiled.enter_context(ways.compiled(blocks, memory_budget))
            row = replace(row, note=f"gradients within {error:.1%} of the eager ones")
            return self.time(row, ways.keep_everything, wrong, slow=slow)
        return self.results.rows[-1]

    def _run_trl(self) -> None:
        if not ways.has_trl():
            self.results.add(self.row(ways.TRL, note=ways.NO_TRL))
            return
        with self.kept(self.row(ways.TRL)), ways.offloading_by_trl(self.model) as context:
            self.add(ways.TRL, context, slow=True)
