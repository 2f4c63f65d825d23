"""Requests that are split into blocks, and the threads that run the blocks."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch

from torchstorm.errors import StorageError, UnsupportedError
from torchstorm.storage.backend import Drive, StorageCopy, check_process, when_all_done

_LARGEST_OFFSET = 2**63 - 1
Part = TypeVar("Part")


class Block(NamedTuple):
    """Bytes [start, stop) of the file and their memory `address`: a part of a request for `nbytes` at `offset`."""

    address: int
    start: int
    stop: int
    offset: int
    nbytes: int


class RequestQueue(Generic[Part]):
    """Tracks requests of several parts: their order and their end. A subclass runs the parts.

    Args:
        name: of what the requests are for, said in errors.
        drive: of their copies, see `StorageCopy`.
    """

    def __init__(self, name: str, drive: Drive | None = None) -> None:
        self._name = name
        self._drive = drive
        self._pid = os.getpid()
        self._idle = threading.Condition(threading.Lock())
        self._outstanding = 0
        self._closed = False

    def check_usable(self) -> None:
        """Raises StorageError if it is closed or in a forked process."""
        check_process(self._name, self._pid)
        if self._closed:
            raise StorageError(f"{self._name} is closed. Open it again.")

    def accept(
        self, parts: Sequence[Part], *, tensors: list[torch.Tensor], after: Sequence[StorageCopy]
    ) -> StorageCopy:
        """Queues a request.

        Args:
            parts: parts of the request. The first error of a part is the request's error.
            tensors: tensors to keep alive until the copy has ended.
            after: copies that must succeed or fail before the first part starts.
        """
        return self._accept(len(parts), partial(self._start, parts), tensors=tensors, after=after)

    def _accept(
        self,
        num_parts: int,
        start: Callable[[Request], None],
        *,
        tensors: list[torch.Tensor],
        after: Sequence[StorageCopy],
    ) -> StorageCopy:
        request = Request(tensors, num_parts, self._drive)
        check_process(self._name, self._pid)  # before the lock, which another thread may have held at the fork
        with self._idle:
            self.check_usable()
            self._outstanding += 1
        when_all_done(after, partial(start, request))
        return request.copy

    def close(self) -> None:
        """Waits for all requests, then ends the threads. Does nothing in a forked process."""
        if os.getpid() != self._pid:
            return
        with self._idle:
            self._closed = True
            while self._outstanding:
                self._idle.wait()
        self._stop()

    def _start(self, parts: Sequence[Part], request: Request) -> None:
        if not parts:
            self._part_ended(request, None)
        for part in parts:
            self._begin(request, part)

    def _begin(self, request: Request, part: Part) -> None:
        """Starts one part. Some thread calls `_part_ended` once when it has ended."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Ends the threads. No request is running at this point."""
        raise NotImplementedError

    def _part_ended(self, request: Request, error: BaseException | None, *, count: int = 1) -> None:
        if request.parts_ended(count, error):
            with self._idle:
                self._outstanding -= 1
                self._idle.notify_all()


class BlockPool(RequestQueue[object]):
    """Runs the blocks of several requests in parallel, in the order of the requests.

    Args:
        name: of what the requests are for, said in errors.
        threads: number of blocks that run at once.
        drive: of the requests' copies, which may follow copies that no thread ends.
    """

    def __init__(self, name: str, threads: int, drive: Drive | None = None) -> None:
        super().__init__(name, drive)
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="torchstorm-storage")

    def queue(
        self,
        blocks: Sequence[Part],
        run: Callable[[Part], None],
        *,
        tensors: list[torch.Tensor],
        after: Sequence[StorageCopy],
    ) -> StorageCopy:
        """Queues a request as `accept` does. `run` processes one block. After an error, later blocks are skipped."""
        return self._accept(len(blocks), partial(self._share_out, blocks, run), tensors=tensors, after=after)

    def _share_out(self, blocks: Sequence[Part], run: Callable[[Part], None], request: Request) -> None:
        if not blocks:
            self._part_ended(request, None)
        waiting = deque(blocks)
        # One task per thread, not per block: submitting a task takes longer than reading a small block.
        for _ in range(min(self._threads, len(blocks))):
            try:
                self._executor.submit(self._run_blocks, waiting, run, request)
            except RuntimeError as error:  # the interpreter is shutting down and starts no tasks
                failed = StorageError(f"{self._name} cannot start a copy any more: {error}.")
                self._run_blocks(waiting, partial(_fail, failed), request)

    def _run_blocks(self, waiting: deque[Part], run: Callable[[Part], None], request: Request) -> None:
        """Runs blocks until there are no more."""
        count = 0
        error: BaseException | None = None
        while True:
            try:
                block = waiting.popleft()
            except IndexError:
                break
            count += 1
            if request.error is None:
                try:
                    run(block)
                except BaseException as caught:  # raised again by `wait`
                    request.error = error = caught
        if count:
            self._part_ended(request, error, count=count)

    def _stop(self) -> None:
        self._executor.shutdown()


class Request:
    """A running request: its copy, its first error, and the tensors that it keeps alive."""

    def __init__(self, tensors: list[torch.Tensor], num_parts: int, drive: Drive | None = None) -> None:
        self.copy = StorageCopy(drive)
        self.error: BaseException | None = None
        self.tensors = tensors
        self._remaining = max(num_parts, 1)
        self._lock = threading.Lock()

    def parts_ended(self, count: int, error: BaseException | None) -> bool:
        """Counts ended parts and stores the first error. Returns True if these were the last parts."""
        with self._lock:
            self.error = self.error or error
            self._remaining -= count
            last = self._remaining == 0
        if last:
            self.tensors.clear()
            self.copy.finish(self.error)
        return last


def check_request(name: str, tensor: torch.Tensor, offset: int) -> None:
    """Raises UnsupportedError unless the tensor is contiguous host memory; StorageError if the offset is invalid."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError(
            f"{name}: a contiguous CPU tensor is needed, but this one is {tuple(tensor.shape)} with strides "
            f"{tensor.stride()} on {tensor.device}. Pass tensor.cpu().contiguous() (and resolve_conj, resolve_neg)."
        )
    if offset < 0 or offset + tensor.nbytes > _LARGEST_OFFSET:
        raise StorageError(f"{name} has no {tensor.nbytes} bytes at offset {offset}: offsets go from 0 to 2**63 - 1.")


def _fail(error: BaseException, block: object) -> None:
    raise error
