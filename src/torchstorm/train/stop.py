"""Handles Ctrl-C and SIGTERM. After the first signal, a run finishes its step and saves. The second ends it at once."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """The work was stopped by a signal, and has cleaned up.

    Attributes:
        signum: the signal.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(f"{signal.Signals(signum).name} {message}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The shell's exit code for the signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signum


class Stopped(Interrupted):
    """A run was stopped by a signal, and has saved a checkpoint.

    Attributes:
        step: number of completed optimizer steps.
        checkpoint_dir: folder for `--resume`.
    """

    def __init__(self, signum: int, step: int, checkpoint_dir: Path) -> None:
        super().__init__(signum, f"after step {step}; saved in {checkpoint_dir}")
        self.step = step
        self.checkpoint_dir = checkpoint_dir


class StopRequest:
    """Catches SIGINT and SIGTERM within a `with`. Does nothing outside the main thread, where Python forbids it.

    Attributes:
        signum: the signal received, or None.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._caught)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _caught(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        # The second signal ends a run whose step does not finish.
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}
