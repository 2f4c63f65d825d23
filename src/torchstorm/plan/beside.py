"""Solves problems in a process of its own, while training goes on.

Every problem has its own process, at low priority, and one runs at a time. It is a fresh interpreter without torch that
runs this module (`python -m`), not the user's script. It gets the problem through its standard input, which stays open:
when that ends, the process that asked has died, and this one ends, too. A thread of the asking process writes and
reads, so asking and looking for an answer never wait.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torchstorm.errors import BudgetError
from torchstorm.plan.choose import Blocks, Choice, choose_variants
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget, Plan
from torchstorm.plan.solve import solve
from torchstorm.plan.trace import Trace

PLAN_NOW = "TORCHSTORM_PLAN_NOW"
"""Set to 1, this environment variable has everything planned at once, while steps wait: plans are the same in every
run as far as measured times are."""


_ARGUMENTS = ("-P", "-m", "torchstorm.plan.beside")


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What `solve` is asked.

    Attributes:
        trace, machine, budget, spare, time_limit_s, fixed, start: as in `solve`.
        than_s: seconds of a step by the plan that the answer is to be better than.
        blocks: of which variants are chosen first, from plans that each take so much time; None for a plan alone.
    """

    trace: Trace
    machine: Machine
    budget: Budget
    spare: Budget
    time_limit_s: float
    than_s: float
    fixed: dict[int, str]
    start: tuple[str, ...] = ()
    blocks: Blocks | None = None


def plans_now(*, on_cpu: bool) -> bool:
    """Whether everything is planned at once: as the user says, else where training itself is on the processor, from
    which a search beside it would take more than the wait."""
    said = os.environ.get(PLAN_NOW)
    return said == "1" if said else on_cpu


class Beside:
    """Has problems solved by processes, one after another."""

    def __init__(self) -> None:
        self.failure = ""  # why nothing is solved any more; "" as long as all is well
        self._waiting: deque[Problem] = deque()
        self._running: _Run | None = None
        self._end: weakref.finalize[..., Beside] | None = None  # ends the process, at the latest with this one

    def ask(self, problem: Problem) -> None:
        """Has a problem solved; `answer` will tell."""
        if not self.failure:
            self._waiting.append(problem)
            self._begin()

    def answer(self, is_wanted: Callable[[Problem], bool]) -> tuple[Problem, Plan | Choice | None] | None:
        """A problem that has been solved, and its plan, or None where nothing fits; or its blocks' variants. Does not
        wait.

        Args:
            is_wanted: whether a problem's answer is of use still. Others are given up.
        """
        found = None
        run = self._running
        if run is not None and not is_wanted(run.problem):
            self._stop()
        elif run is not None and not run.thread.is_alive():
            self._stop()
            if run.failure:
                self._fail(run.failure)
            else:
                found = run.problem, run.found
        while self._waiting and not is_wanted(self._waiting[0]):
            self._waiting.popleft()
        self._begin()
        return found

    def close(self) -> None:
        """Ends the process, and forgets what was asked."""
        self._waiting.clear()
        self._stop()

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._running = self._end = None

    def _begin(self) -> None:
        if self._running is not None or not self._waiting or self.failure:
            return
        try:
            self._running = _Run(self._waiting.popleft())
        except OSError as error:
            self._fail(f"it cannot be started: {error}")
        else:
            self._end = weakref.finalize(self, self._running.stop)

    def _fail(self, why: str) -> None:
        self.failure = why
        self._waiting.clear()


class _Run:
    """One problem's process, and the thread that speaks with it.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.found: Plan | Choice | None = None
        self.failure = ""
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, *_ARGUMENTS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the process that trains
            # The same modules as here, also where a script has changed the path.
            env={**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
        )
        self.thread = threading.Thread(target=self._speak, name="torchstorm plans", daemon=True)
        self.thread.start()

    def _speak(self) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        told = b""
        with process.stdout:
            with suppress(OSError):  # it has ended; its status says how
                process.stdin.write(pickle.dumps(self.problem))
                process.stdin.flush()
                told = process.stdout.read()
            with suppress(OSError):
                process.stdin.close()
        status = process.wait()
        if status or not told:
            self.failure = f"it ended with status {status}"
        elif isinstance(answer := pickle.loads(told), dict):
            self.found = Plan(trace=self.problem.trace, budget=self.problem.budget, **answer)
        else:
            self.found = answer

    def stop(self) -> None:
        """Ends the process, and waits for its end."""
        self._process.kill()
        if threading.current_thread() is not self.thread:  # where that one collects garbage
            self.thread.join()


def main() -> None:
    """What the process does: reads a problem, writes what its plan adds to that, or None where nothing fits; or the
    variants that it was asked for."""
    os.nice(10)
    problem: Problem = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout.buffer.write(pickle.dumps(_solved(problem)))
    sys.stdout.flush()


def _solved(problem: Problem) -> dict[str, object] | Choice | None:
    def plan_of(trace: Trace, fixed: dict[int, str], start: tuple[str, ...]) -> Plan:
        asked = trace, problem.machine, problem.budget
        return solve(*asked, spare=problem.spare, time_limit_s=problem.time_limit_s, fixed=fixed, start=start)

    if (blocks := problem.blocks) is not None:
        return choose_variants(problem.trace, blocks, lambda trace: plan_of(trace, {}, ()))
    with suppress(BudgetError):
        plan = plan_of(problem.trace, problem.fixed, problem.start)
        return {"placements": plan.placements, "forecast": plan.forecast, "notes": plan.notes}
    return None


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    main()
