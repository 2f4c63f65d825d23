"""Blocks that the kernel transfers by itself, while no thread of this process takes part.

Where all cores compute, a thread that makes a system call and then takes Python's lock delays the model more than the
transfer itself. Here a block is handed to an io_uring in the calling thread, which goes on. That it has ended is seen
when somebody asks for its copy. So this is for callers that do ask: a callback alone never runs.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from torchstorm.storage.backend import ELSEWHERE_S
from torchstorm.storage.blocks import Block, Request, RequestQueue
from torchstorm.storage.uring import Ring

_ENTRIES = 64
# With transfers on their way: the kernel writes to their memory, so they live on, whoever has forgotten them meanwhile,
# until some other one is asked.
_busy: set[Unattended] = set()


class Unattended(RequestQueue[tuple[Block, bool]]):
    """Requests whose parts are whole blocks, aligned as O_DIRECT wants them, and whether each is written.

    Args:
        name: of what the requests are for, said in errors.
        fd: of the file, opened with O_DIRECT.
        alignment: of offsets and lengths in the file, and of addresses.
        attend: counts a block, or transfers it where the kernel has not done all of it, or raises what is wrong. Takes
            the block, whether it is written, and the bytes that the kernel has transferred, less than 0 for an error.

    Raises:
        OSError: there is no io_uring.
    """

    def __init__(
        self, name: str, fd: int, alignment: tuple[int, int], attend: Callable[[Block, bool, int], None]
    ) -> None:
        super().__init__(name, self.drive)
        self._fd = fd
        self._align_bytes, self._address_align = alignment
        self._attend = attend
        self._ring = Ring(_ENTRIES)
        self._lock = threading.Lock()  # of the ring, and of the two below
        self._on_their_way: dict[int, tuple[Request, Block, bool]] = {}
        self._waiting: deque[tuple[Request, Block, bool]] = deque()
        self._number = 0
        for other in list(_busy):
            other.drive(False)

    def takes(self, blocks: Iterable[Block]) -> bool:
        """Whether the kernel transfers all of these blocks directly."""
        of_file = self._align_bytes
        return not any(one.start % of_file or one.stop % of_file or one.address % self._address_align for one in blocks)

    def _begin(self, request: Request, part: tuple[Block, bool]) -> None:
        refused: list[tuple[Request, Block, bool, int]] = []
        with self._lock:
            self._waiting.append((request, *part))
            self._submit(refused)
        self._end(refused)

    def _submit(self, refused: list[tuple[Request, Block, bool, int]]) -> None:
        while self._waiting and len(self._on_their_way) < _ENTRIES:
            request, block, write = self._waiting.popleft()
            number = self._number = self._number + 1
            try:
                self._ring.submit(self._fd, block.address, block.start, block.stop - block.start, number, write=write)
            except OSError:
                refused.append((request, block, write, 0))
            else:
                self._on_their_way[number] = request, block, write
                _busy.add(self)

    def drive(self, wait: bool) -> bool:
        """Ends what the kernel has transferred.

        Args:
            wait: for something that is on its way.

        Returns:
            Whether something was, or is on its way. Nothing is in a forked process: what the kernel says is for its
            parent.
        """
        if os.getpid() != self._pid:
            return False
        if not self._lock.acquire(blocking=wait):
            return True
        try:
            is_any = bool(self._on_their_way)
            come = self._ring.ended(wait=wait) if is_any else []
            ended = [(*self._on_their_way.pop(number), count) for number, count in come]
            self._submit(ended)
            if not self._on_their_way:
                _busy.discard(self)
        finally:
            self._lock.release()
        self._end(ended)
        return is_any

    def _end(self, ended: list[tuple[Request, Block, bool, int]]) -> None:
        for request, block, write, count in ended:
            error: BaseException | None = None
            try:
                self._attend(block, write, count)
            except BaseException as caught:  # raised again by the copy's `wait`
                error = caught
            self._part_ended(request, error)

    def close(self) -> None:
        """Waits for all requests."""
        if os.getpid() != self._pid:
            return
        while self._outstanding:
            if not self.drive(True):
                time.sleep(ELSEWHERE_S)  # what a request follows ends elsewhere
        super().close()

    def _stop(self) -> None:
        del self._ring
