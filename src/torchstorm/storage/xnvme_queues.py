"""Submits NVMe commands: several threads, each with its own xNVMe queue, take pieces from a shared list.

A queue belongs to one thread, since xNVMe's queues are not thread-safe. xNVMe must be polled for completions. So a
thread with commands in flight polls, and sleeps a little longer after each poll without a completion. A thread without
commands waits for work.

A piece of a write that covers only a part of a sector is a read-modify-write. Meanwhile no other such piece of this
object accesses the sector, so concurrent writes to one sector lose nothing. Other processes are not synchronized.

A command that exceeds its time limit cannot be cancelled, and the drive may still write to its memory. So its queue is
abandoned: every request fails, and memory that the drive may access is never freed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torchstorm.errors import StorageError
from torchstorm.storage.aligned import round_down, round_up
from torchstorm.storage.backend import IOCounters
from torchstorm.storage.blocks import Block, Request, RequestQueue
from torchstorm.storage.xnvme_library import Callback, clear_completion, completion

_SHORTEST_SLEEP_S = 10e-6
_LONGEST_SLEEP_S = 200e-6
_BUSY = {-errno.EAGAIN, -errno.EBUSY, -errno.EINTR}  # temporary: try again
_abandoned: list[object] = []  # memory that a lost drive may still write to


class Piece(NamedTuple):
    """A part of a request for one command, or for two if a part of a sector is written."""

    block: Block
    writing: bool


@dataclass(frozen=True, kw_only=True)
class Target:
    """An open namespace: its handles, and the limits of its commands.

    Attributes:
        library: libxnvme.
        device: the `struct xnvme_dev *`.
        uri: URI of the device.
        namespace: number of the namespace.
        sector_bytes: size of a sector.
        command_bytes: largest size of a command, a multiple of `sector_bytes`.
        address_align: required alignment of host memory; 0 if commands can use only the library's own buffers.
        counts_bytes: whether a completion reports the number of bytes moved.
        timeout_seconds: time limit of a command.
        explain: makes the error of a piece: (piece, what happened, errno or 0) -> error.
    """

    library: ctypes.CDLL
    device: int
    uri: str
    namespace: int
    sector_bytes: int
    command_bytes: int
    address_align: int
    counts_bytes: bool
    timeout_seconds: float
    explain: Callable[[Piece, str, int], StorageError]


class CommandQueues(RequestQueue[Piece]):
    """Runs pieces.

    Args:
        target: the namespace; closed when the last thread has ended.
        queue_depth: commands in flight per queue; a power of two.
        num_queues: number of queues, each with its own thread.

    Raises:
        StorageError: a queue cannot be created. The target is closed then.
    """

    def __init__(self, target: Target, queue_depth: int, num_queues: int) -> None:
        super().__init__(target.uri)
        self.target = target
        self.queue_depth = queue_depth
        # A re-entrant lock: the garbage collector may run `stop_soon` in a thread that holds it.
        self.changed = threading.Condition()
        self.lost: StorageError | None = None
        self.ending = False
        self._pieces: deque[tuple[Request, Piece]] = deque()
        self._partial: dict[int, deque[tuple[Request, Piece]]] = {}  # sector being changed -> pieces that wait for it
        self._counts = [0, 0, 0, 0]
        queues: list[int] = []
        for _ in range(num_queues):
            queue = ctypes.c_void_p()
            status = target.library.xnvme_queue_init(target.device, queue_depth, 0, ctypes.byref(queue))
            if status or not queue.value:
                for made in queues:
                    target.library.xnvme_queue_term(made)
                target.library.xnvme_dev_close(target.device)
                raise StorageError(
                    f"{target.uri}: cannot create a queue of {queue_depth} commands: {os.strerror(abs(status))}. "
                    "io_uring_cmd needs Linux 5.19 or newer, and io_uring must not be disabled "
                    "(/proc/sys/kernel/io_uring_disabled)."
                )
            queues.append(queue.value)
        self._running = num_queues
        self._threads = [
            threading.Thread(target=_Submitter(self, queue).run, name="torchstorm-xnvme", daemon=True)
            for queue in queues
        ]
        for thread in self._threads:
            thread.start()

    def counters(self) -> IOCounters:
        """Successful commands so far."""
        with self.changed:
            read_bytes, reads, write_bytes, writes = self._counts
        return IOCounters(
            nvme_read_bytes=read_bytes,
            nvme_read_commands=reads,
            nvme_write_bytes=write_bytes,
            nvme_write_commands=writes,
        )

    def count(self, writing: bool, nbytes: int) -> None:
        """Counts a successful command."""
        with self.changed:
            self._counts[2 * writing] += nbytes
            self._counts[2 * writing + 1] += 1

    def stop_soon(self) -> None:
        """Makes the threads end after the remaining pieces. Does not wait for them."""
        with self.changed:
            self.ending = True
            self.changed.notify_all()

    def take(self, wait: bool) -> tuple[Request, Piece] | None:
        """The next piece whose sector is free, or None. With `wait`, blocks until there is one, or the object ends."""
        with self.changed:
            while True:
                while self._pieces:
                    request, piece = self._pieces.popleft()
                    if not self.changes_part(piece):
                        return request, piece
                    sector = piece.block.start // self.target.sector_bytes
                    if sector not in self._partial:
                        self._partial[sector] = deque()
                        return request, piece
                    self._partial[sector].append((request, piece))
                if not wait or (self.ending and not self._outstanding):
                    return None
                self.changed.wait()

    def changes_part(self, piece: Piece) -> bool:
        """Whether the piece writes only a part of a sector."""
        start, stop = piece.block.start, piece.block.stop
        return piece.writing and (start % self.target.sector_bytes > 0 or stop % self.target.sector_bytes > 0)

    def end(self, request: Request, piece: Piece, error: StorageError | None) -> None:
        """Ends a piece that `take` returned."""
        if self.changes_part(piece):
            with self.changed:
                self._pieces.extendleft(self._partial.pop(piece.block.start // self.target.sector_bytes))
                self.changed.notify_all()
        self._part_ended(request, error)

    def thread_ended(self) -> None:
        """Called at the end of a thread. The last one closes the namespace."""
        with self.changed:
            self._running -= 1
            last = not self._running
        if last and self.lost is None:
            self.target.library.xnvme_dev_close(self.target.device)

    def _begin(self, request: Request, part: Piece) -> None:
        with self.changed:
            self._pieces.append((request, part))
            self.changed.notify()

    def _part_ended(self, request: Request, error: BaseException | None, *, count: int = 1) -> None:
        super()._part_ended(request, error, count=count)
        if self.ending:
            self.stop_soon()  # wakes the threads, since this may have been the last part

    def _stop(self) -> None:
        self.stop_soon()
        for thread in self._threads:
            thread.join()


@dataclass(slots=True)
class _Command:
    request: Request
    piece: Piece
    writing: bool  # of this command: a read-modify-write piece reads first
    address: int
    first: int  # sector
    count: int  # sectors
    bounce: int  # the library's buffer; 0 if the command uses the tensor's memory
    deadline: float


class _Submitter:
    """One thread's queue and its commands in flight."""

    def __init__(self, owner: CommandQueues, queue: int) -> None:
        self._owner = owner
        self._target = owner.target
        self._library = owner.target.library
        self._queue = queue
        self._under_way: dict[int, _Command] = {}  # by command context, oldest first
        self._refused: deque[_Command] = deque()  # the library's queue was full
        self._ended: list[int] = []
        self._bounces: list[int] = []
        ended = self._ended
        self._callback = Callback(lambda context, _: ended.append(context))
        self._library.xnvme_queue_set_cb(queue, self._callback, None)

    def run(self) -> None:
        """Runs the thread until the owner ends and no piece is left."""
        sleep_s = _SHORTEST_SLEEP_S
        while True:
            began = self._begin_what_fits()
            if not self._under_way and not self._refused:
                if began:
                    continue
                break
            if self._reap():
                sleep_s = _SHORTEST_SLEEP_S
            else:
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
        if self._owner.lost is None:
            self._library.xnvme_queue_term(self._queue)
            for bounce in self._bounces:
                self._library.xnvme_buf_free(self._target.device, bounce)
        self._owner.thread_ended()

    def _begin_what_fits(self) -> bool:
        """Starts pieces until the queue is full. Blocks if none is in flight. Returns whether it started any."""
        began = False
        while self._refused and len(self._under_way) < self._owner.queue_depth:
            if not self._submit(self._refused.popleft()):
                return began
        while len(self._under_way) < self._owner.queue_depth:
            taken = self._owner.take(wait=not (began or self._under_way or self._refused))
            if taken is None:
                break
            began = True
            request, piece = taken
            lost = self._owner.lost
            if request.error is not None or lost is not None:
                self._owner.end(request, piece, lost and self._target.explain(piece, f"not begun: {lost}", 0))
                continue
            try:
                command = self._command(request, piece)
            except StorageError as error:
                self._owner.end(request, piece, error)
                continue
            if not self._submit(command):
                break
        return began

    def _command(self, request: Request, piece: Piece) -> _Command:
        sector = self._target.sector_bytes
        block, align = piece.block, self._target.address_align
        first, count = block.start // sector, -(-block.stop // sector) - block.start // sector
        whole = block.start % sector == 0 and block.stop % sector == 0
        address, bounce = block.address, 0
        if not (whole and align and address % align == 0):
            address = bounce = self._borrow(piece)
            if piece.writing and whole:
                ctypes.memmove(bounce, block.address, block.stop - block.start)
        writing = piece.writing and whole
        return _Command(request, piece, writing, address, first, count, bounce, self._deadline())

    def _deadline(self) -> float:
        return time.monotonic() + self._target.timeout_seconds

    def _submit(self, command: _Command) -> bool:
        """Whether the library accepted the command. Otherwise it is submitted again later."""
        context = self._library.xnvme_queue_get_cmd_ctx(self._queue)
        assert context, "a queue has a context for each of its commands"
        clear_completion(context)
        move = self._library.xnvme_nvm_write if command.writing else self._library.xnvme_nvm_read
        # NVMe encodes the number of sectors minus one.
        status = move(context, self._target.namespace, command.first, command.count - 1, command.address, None)
        if status == 0:
            self._under_way[context] = command
            return True
        self._library.xnvme_queue_put_cmd_ctx(self._queue, context)
        if status in _BUSY and time.monotonic() < command.deadline:
            self._refused.append(command)
            return False
        self._fail(command, f"the library refused the command: {os.strerror(abs(status))}", abs(status))
        return True

    def _reap(self) -> bool:
        """Polls for completions and handles them. Returns whether there were any."""
        status = self._library.xnvme_queue_poke(self._queue, 0)
        ended, self._ended[:] = self._ended[:], []
        for context in ended:
            command = self._under_way.pop(context)
            kind, code, result = completion(context)
            self._library.xnvme_queue_put_cmd_ctx(self._queue, context)
            self._completed(command, kind, code, result)
        if status < 0 and status not in _BUSY:
            self._lose(f"polling for completions failed: {os.strerror(abs(status))}", abs(status))
        elif self._under_way and not ended:
            oldest = next(iter(self._under_way.values()))
            if time.monotonic() > oldest.deadline:
                self._lose(f"the drive has not answered for {self._target.timeout_seconds:g} s", 0)
        return bool(ended)

    def _completed(self, command: _Command, kind: int, code: int, result: int) -> None:
        nbytes = command.count * self._target.sector_bytes
        if kind or code:
            # xNVMe reports errors of the kernel as vendor-specific codes, truncated to a byte.
            number = min(code, 256 - code) if kind == 7 else 0
            told = f" (the kernel: {os.strerror(number)})" if number else _MEANINGS.get((kind, code), "")
            self._fail(command, f"NVMe status code type {kind:#x}, status code {code:#04x}{told}", number)
            return
        if self._target.counts_bytes and result != nbytes:
            self._fail(command, f"the drive moved {result} of {nbytes} bytes", 0)
            return
        self._owner.count(command.writing, nbytes)
        block = command.piece.block
        start = command.bounce + block.start - command.first * self._target.sector_bytes
        if command.bounce and command.writing is not command.piece.writing:
            ctypes.memmove(start, block.address, block.stop - block.start)
            command.writing = True
            command.deadline = self._deadline()
            self._submit(command)
            return
        if command.bounce:
            if not command.writing:
                ctypes.memmove(block.address, start, block.stop - block.start)
            self._bounces.append(command.bounce)
        self._owner.end(command.request, command.piece, None)

    def _fail(self, command: _Command, happened: str, number: int) -> None:
        if command.bounce:
            self._bounces.append(command.bounce)
        self._owner.end(command.request, command.piece, self._target.explain(command.piece, happened, number))

    def _lose(self, happened: str, number: int) -> None:
        """Abandons the queue and the memory that the drive may still access."""
        commands = [*self._under_way.values(), *self._refused]
        _abandoned.append([self._callback, *(list(command.request.tensors) for command in commands)])
        self._under_way.clear()
        self._refused.clear()
        with self._owner.changed:
            self._owner.lost = self._owner.lost or StorageError(f"{self._target.uri}: {happened}.")
        for command in commands:
            command.bounce = 0  # never used again
            self._fail(command, happened, number)

    def _borrow(self, piece: Piece) -> int:
        if self._bounces:
            return self._bounces.pop()
        size = round_up(self._target.command_bytes, 4096)
        address = self._library.xnvme_buf_alloc(self._target.device, size)
        if not address:
            raise self._target.explain(piece, f"the library cannot allocate a buffer of {size} bytes", errno.ENOMEM)
        return int(address)


_MEANINGS = {
    (0, 0x02): " (invalid field in the command)",
    (0, 0x04): " (data transfer error)",
    (0, 0x06): " (internal error of the drive)",
    (0, 0x07): " (the command was aborted)",
    (0, 0x0B): " (no such namespace or format)",
    (0, 0x20): " (the namespace is write protected)",
    (0, 0x80): " (sector out of range)",
    (0, 0x81): " (capacity exceeded)",
    (0, 0x82): " (the namespace is not ready)",
    (2, 0x80): " (write fault)",
    (2, 0x81): " (unrecovered read error)",
    (2, 0x86): " (access denied)",
    (2, 0x87): " (a sector that was never written)",
    (3, 0x70): " (the path to the drive failed)",
    (3, 0x71): " (the host aborted the command: the drive is gone or was reset)",
}


def cut(block: Block, *, writing: bool, sector_bytes: int, command_bytes: int) -> list[Piece]:
    """Splits a request into pieces for single commands.

    It is split at multiples of `command_bytes` of the device. A write is also split at the edges of its whole sectors.
    """
    edges = {block.start, block.stop}
    edges.update(range(round_down(block.start, command_bytes) + command_bytes, block.stop, command_bytes))
    if writing:
        inner = (round_up(block.start, sector_bytes), round_down(block.stop, sector_bytes))
        edges.update(edge for edge in inner if block.start < edge < block.stop)
    ordered = sorted(edges)
    base = block.address - block.start
    return [
        Piece(Block(base + start, start, stop, block.offset, block.nbytes), writing)
        for start, stop in pairwise(ordered)
    ]
