"""Tests that run in processes of their own, on a disk that fails when told to (fault_shim.c).

    @on_a_faulty_disk
    def test_a_read_that_fails_is_reported(disk: Disk, path: Path) -> None:
        with disk.failing(path, READS, error=errno.EIO): ...

The shim must be there when a process starts, so one that has it, started once, forks another for each test: torch is
imported once, and what a test does to its process ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

READS, WRITES, SYNCS = 1, 2, 4
_END = "test ended with "
_SECONDS = 60


class Disk:
    """All files, as this process finds them."""

    def __init__(self) -> None:
        self._shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
        numbers = (ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_int, ctypes.c_long, ctypes.c_int)
        self._shim.fault_set.argtypes = (ctypes.c_char_p, *numbers, ctypes.c_long)
        self._shim.fault_hits.restype = ctypes.c_long

    @contextlib.contextmanager
    def failing(
        self,
        path: str | Path,
        calls: int,
        *,
        start: int = 0,
        stop: int = 2**62,
        error: int = 0,
        most: int = 0,
        delay_ms: int = 0,
        times: int = 2**62,
    ) -> Iterator[None]:
        """Lets calls on a file fail or do little within the block, which fails itself where none was made.

        Args:
            path: of the file, or how it ends.
            calls: READS, WRITES, SYNCS or a sum of them.
            start: first byte of the file whose reads and writes fail.
            stop: where those bytes end.
            error: what they fail with; 0 lets them go on.
            most: bytes that each moves at most; 0 for all.
            delay_ms: how long each waits before.
            times: how many calls fail.
        """
        self._shim.fault_set(os.fsencode(path), calls, start, stop, error, most, delay_ms, times)
        try:
            yield
            assert self.num_struck, "the disk never failed"
        finally:
            self._shim.fault_set(b"", 0, 0, 0, 0, 0, 0, 0)

    @property
    def num_struck(self) -> int:
        """Calls that the fault has met so far."""
        found: int = self._shim.fault_hits()
        return found


class FaultyProcess:
    """What forks the tests' processes.

    Args:
        shim: the compiled shim.
    """

    def __init__(self, shim: Path) -> None:
        environment = os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, test: Callable[[Disk, Path], None], path: Path) -> None:
        """Runs a test, and fails where it does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        module = f"{__package__ or 'storage'}.{Path(test.__code__.co_filename).stem}"
        self._process.stdin.write(json.dumps([module, test.__name__, str(path)]) + "\n")
        self._process.stdin.flush()
        lines = []
        for line in self._process.stdout:
            if line.startswith(_END):
                assert line == f"{_END}0\n", f"{line}{''.join(lines)}"
                return
            lines.append(line)
        raise AssertionError(f"the process is gone: {''.join(lines)}")

    def close(self) -> None:
        """Ends it."""
        self._process.communicate(timeout=_SECONDS)


def on_a_faulty_disk(test: Callable[[Disk, Path], None]) -> Callable[[FaultyProcess, Path], None]:
    """A test that runs elsewhere; it is given the disk, and a path where nothing is yet."""

    def run(faulty_process: FaultyProcess, tmp_path: Path) -> None:
        faulty_process.run(test, tmp_path / "file")

    run.__name__ = run.__qualname__ = test.__name__
    run.__doc__, run.__module__ = test.__doc__, test.__module__
    run.elsewhere = test  # type: ignore[attr-defined]
    return run


def _serve() -> None:
    for line in sys.stdin:
        module, name, path = json.loads(line)
        test = getattr(import_module(module), name).elsewhere
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(_SECONDS, exit=True)
            status = 1
            try:
                test(Disk(), Path(path))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"{_END}{status}", flush=True)


if __name__ == "__main__":
    _serve()
