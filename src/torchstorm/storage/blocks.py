"""Requests cut into blocks, and the threads that work them off."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from torchstorm.errors import StorageError
from torchstorm.storage.backend import StorageCopy, check_process, when_all_done


class Block(NamedTuple):
    """File bytes [start, stop) at memory `address`: a part of the request for `nbytes` at `offset`."""

    address: int
    start: int
    stop: int
    offset: int
    nbytes: int


class BlockPool:
    """Runs the blocks of many requests in parallel, first come first served.

    Args:
        name: of what the requests are for, said in errors.
        threads: blocks under way at once.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._pid = os.getpid()
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="torchstorm-storage")
        self._idle = threading.Condition(threading.Lock())
        self._outstanding = 0
        self._closed = False

    def check_usable(self) -> None:
        """Raises StorageError where it is closed or in a forked process."""
        check_process(self._name, self._pid)
        if self._closed:
            raise StorageError(f"{self._name} is closed. Open it again.")

    def queue(
        self,
        blocks: Sequence[Block],
        run: Callable[[Block], None],
        *,
        tensors: list[torch.Tensor],
        after: Sequence[StorageCopy],
    ) -> StorageCopy:
        """Queues a request.

        Args:
            blocks: its parts.
            run: does one; the first error that it raises is the request's, and later blocks are left out.
            tensors: what must stay alive until the copy has ended.
            after: copies that must have ended, well or not, before the first block.
        """
        request = _Request(tensors, len(blocks))
        check_process(self._name, self._pid)  # before the lock, which another thread may have held at the fork
        with self._idle:
            self.check_usable()
            self._outstanding += 1
        when_all_done(after, lambda: self._start(request, blocks, run))
        return request.copy

    def close(self) -> None:
        """Lets every request end, then the threads. In a forked process, where there are none, does nothing."""
        if os.getpid() != self._pid:
            return
        with self._idle:
            self._closed = True
            while self._outstanding:
                self._idle.wait()
        self._executor.shutdown()

    def _start(self, request: _Request, blocks: Sequence[Block], run: Callable[[Block], None]) -> None:
        if not blocks:
            self._blocks_ended(request, 1, None)
        waiting = deque(blocks)
        # A task a thread and not a block: handing a task over costs more than reading a small block.
        for _ in range(min(self._threads, len(blocks))):
            try:
                self._executor.submit(self._run_blocks, request, waiting, run)
            except RuntimeError as error:  # the interpreter is shutting down: nothing new is started
                failed = StorageError(f"{self._name} cannot start a copy any more: {error}.")
                self._run_blocks(request, waiting, partial(_fail, failed))

    def _run_blocks(self, request: _Request, waiting: deque[Block], run: Callable[[Block], None]) -> None:
        """Runs blocks until there are no more."""
        count = 0
        error: BaseException | None = None
        while True:
            try:
                block = waiting.popleft()
            except IndexError:
                break
            count += 1
            if request.error is None and error is None:
                try:
                    run(block)
                except BaseException as caught:  # raised again by whoever waits
                    request.error = error = caught
        if count:
            self._blocks_ended(request, count, error)

    def _blocks_ended(self, request: _Request, count: int, error: BaseException | None) -> None:
        if request.blocks_ended(count, error):
            with self._idle:
                self._outstanding -= 1
                self._idle.notify_all()


class _Request:
    def __init__(self, tensors: list[torch.Tensor], num_blocks: int) -> None:
        self.copy = StorageCopy()
        self.error: BaseException | None = None
        self._tensors = tensors
        self._remaining = max(num_blocks, 1)
        self._lock = threading.Lock()

    def blocks_ended(self, count: int, error: BaseException | None) -> bool:
        """Notes the first error. True for the last block, with which the copy has ended."""
        with self._lock:
            self.error = self.error or error
            self._remaining -= count
            last = self._remaining == 0
        if last:
            self._tensors.clear()
            self.copy.finish(self.error)
        return last


def _fail(error: BaseException, block: Block) -> None:
    raise error
