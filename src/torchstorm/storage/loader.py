"""A data loader that reads batches of a volume's records ahead of time and copies them to a device.

    loader = NVMeDataLoader(volume, batch_size=32, shuffle=True, device="cuda")
    for tokens in loader:               # (32, 2048) int32, ready for work on the current stream
        ...

One thread requests the next batches from the disk, all at once. For a GPU, it then copies finished ones from pinned
buffers on a copy stream. The iterating thread allocates the device memory, so that it belongs to that thread's stream.
At most `prefetch_depth` batches are allocated at a time.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from torchstorm.errors import ConfigError
from torchstorm.storage.aligned import AlignedPool
from torchstorm.storage.choice import device_of
from torchstorm.storage.request import Request
from torchstorm.storage.volume import Volume
from torchstorm.transfer.engine import Engine, StreamCopy
from torchstorm.transfer.pinned import PinnedArena, Slot, pin_memory

Batch = torch.Tensor | dict[str, torch.Tensor]


class NVMeDataLoader:
    """An iterable over batches, similar to `torch.utils.data.DataLoader`.

    Every `iter()` starts an epoch. With `shuffle`, each epoch has its own order. The last batch of an epoch can be
    smaller, or is dropped with `drop_last`.

    Args:
        volume: the volume to read. The loader does not close it.
        batch_size: records per batch.
        kinds: names of the kinds to read, all of the same length; None for all kinds of the volume.
        shuffle: whether the order is random, drawn from `seed` and the epoch; else it is the order of the records.
        prefetch_depth: number of batches to read ahead. It can be changed during iteration.
        device: device of the batches.
        seed: seed of the random order.
        drop_last: drops an incomplete last batch and, with several ranks, the records left after an even division.
        rank: this process's rank among `world_size`. Each rank reads the same number of different records (without
            `drop_last` some are read twice). None uses `torch.distributed`, if it is initialized.
        world_size: number of ranks; None as for `rank`.
        verify: compares records with their checksums, if they have some.

    Raises:
        ConfigError: a number is out of range, a kind does not exist, or kinds have different lengths.
        DeviceError: the device does not exist.
    """

    def __init__(
        self,
        volume: Volume,
        batch_size: int,
        *,
        kinds: Sequence[str | int] | None = None,
        shuffle: bool = False,
        prefetch_depth: int = 8,
        device: torch.device | str | None = None,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        verify: bool = True,
    ) -> None:
        self.volume, self.batch_size, self.shuffle = volume, _at_least(1, "batch_size", batch_size), shuffle
        self.seed, self.drop_last, self.verify = seed, drop_last, verify
        self.device = device_of(device)
        self.rank, self.world_size = _rank(rank, world_size)
        names = list(volume) if kinds is None else list(kinds)
        if isinstance(kinds, str) or not names:
            raise ConfigError(f"kinds={kinds!r}: give a list of at least one; {volume.path} has {list(volume)!r}.")
        self._records = {name: volume[name] for name in names}
        lengths = {name: len(records) for name, records in self._records.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError(
                f"kinds of equal length are needed, but {volume.path} has {lengths}: select some with kinds=."
            )
        self._num_records = next(iter(lengths.values()))
        self._depth = _at_least(1, "prefetch_depth", prefetch_depth)
        self._next_epoch = self._next_batch = 0
        self._running: _Epoch | None = None

    @property
    def prefetch_depth(self) -> int:
        """Number of batches to read ahead."""
        return self._depth

    @prefetch_depth.setter
    def prefetch_depth(self, value: int) -> None:
        self._depth = _at_least(1, "prefetch_depth", value)
        if self._running is not None:
            self._running.set_depth(value)

    def __len__(self) -> int:
        """Number of batches per epoch for this rank."""
        count = self._records_per_rank()
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def __iter__(self) -> _Batches:
        """Starts the next epoch, or the one set by `load_state_dict` or `set_epoch`. Ends an earlier iterator."""
        if self._running is not None:
            self._running.stop(superseded=True)
        order = self._order(self._next_epoch)
        self._running = _Epoch(self, self._next_epoch, order, self._next_batch)
        self._next_epoch, self._next_batch = self._next_epoch + 1, 0
        return _Batches(self._running)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next `iter()` start this epoch.

        Raises:
            ConfigError: it is negative.
        """
        self._next_epoch, self._next_batch = _at_least(0, "epoch", epoch), 0
        self._end()

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was returned, without batches read ahead."""
        running = self._running
        at = (self._next_epoch, self._next_batch) if running is None else (running.number, running.num_given)
        if at[1] == len(self) and at[1] > 0:
            at = (at[0] + 1, 0)
        return {"epoch": at[0], "batch": at[1], **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next `iter()` continue from a saved position.

        Raises:
            ConfigError: the state is from a loader with other batches.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ConfigError(
                    f"The state is from a loader with {name}={state.get(name)!r}, but this one has {name}={value!r}, "
                    "so its batches differ. Create the loader with the same options."
                )
        epoch, batch = (_at_least(0, name, state.get(name)) for name in ("epoch", "batch"))
        if batch > len(self):
            raise ConfigError(
                f"The state is at batch {batch}, but an epoch has {len(self)}: it is from another loader."
            )
        self._next_epoch, self._next_batch = epoch, batch
        self._end()

    def close(self) -> None:
        """Ends the current epoch and its threads, and frees its memory."""
        if self._running is not None:
            self._running.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "batch_size": self.batch_size,
            "num_records": self._num_records,
            "drop_last": self.drop_last,
            "rank": self.rank,
            "world_size": self.world_size,
        }

    def _records_per_rank(self) -> int:
        whole, rest = divmod(self._num_records, self.world_size)
        return whole if self.drop_last or not rest else whole + 1

    def _order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Numbers of this rank's records in the epoch's order."""
        if self.shuffle:
            order = np.random.default_rng([self.seed % 2**64, epoch]).permutation(self._num_records)
        else:
            order = np.arange(self._num_records)
        count = self._records_per_rank()
        return np.resize(order, count * self.world_size)[self.rank :: self.world_size] if count else order[:0]


class _Batches(Iterator[Batch]):
    """The iterator of a loader. Deleting it ends the epoch's thread."""

    def __init__(self, epoch: _Epoch) -> None:
        self._epoch = epoch
        self._stop = weakref.finalize(self, epoch.stop)

    def __next__(self) -> Batch:
        batch = self._epoch.take()
        if batch is None:
            self._stop()
            raise StopIteration
        return batch

    def close(self) -> None:
        """Ends the epoch's thread and frees its memory."""
        self._stop()


@dataclass(eq=False)
class _Slot:
    """A batch that is being read.

    Attributes:
        out: kind -> (B, *shape), the batch to return.
        ready: on CUDA, the event on the iterating thread's stream after which `out` may be written.
        host: kind -> (B, *shape) on the host; the same as `out` on a CPU.
        pinned: the pinned memory of `host`.
        requests: the reads.
        copies: on CUDA, the copies from `host` to `out`.
        error: the error of a failed read.
    """

    out: dict[str | int, torch.Tensor]
    ready: Any
    host: dict[str | int, torch.Tensor] = field(default_factory=dict)
    pinned: list[Slot] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    copies: list[StreamCopy] = field(default_factory=list)
    error: BaseException | None = None

    def has_come(self) -> bool:
        """Whether all reads have ended."""
        return self.error is not None or all(request.done() for request in self.requests)


class _Epoch:
    """The thread that reads one epoch ahead, and the state that it shares with the iterating thread."""

    def __init__(
        self, loader: NVMeDataLoader, number: int, order: np.ndarray[Any, np.dtype[np.int64]], first: int
    ) -> None:
        self.number, self.num_given = number, first
        self._volume, self._records, self._verify = loader.volume, loader._records, loader.verify
        self._device, self._order, self._batch_size = loader.device, order, loader.batch_size
        self._num_batches, self._depth = len(loader), loader.prefetch_depth
        self._num_begun = first
        self._begun: deque[_Slot] = deque()  # passed to the thread, oldest first
        self._waiting: deque[_Slot] = deque()  # not yet requested
        self._done: deque[_Slot] = deque()  # finished, in order
        self._changed = threading.Condition()
        self._stopped = self._is_superseded = False
        self._engine: Engine | None = None
        self._arena: PinnedArena | None = None
        self._pools: dict[str | int, AlignedPool] = {}
        if self._device.type == "cuda":  # pragma: gpu
            self._engine = Engine(self._device)
        self._thread: threading.Thread | None = None

    def set_depth(self, depth: int) -> None:
        """Sets the number of batches to read ahead."""
        self._depth = depth

    def take(self) -> Batch | None:
        """The next batch; None after the last one. Raises the error of a failed read."""
        if self._is_superseded:
            raise ConfigError(
                "Another iter() of this loader was started, which ended this one: use one loader for each."
            )
        if self._stopped:
            return None
        self._ask()
        with self._changed:
            while not self._done and self._begun and not self._stopped:
                self._changed.wait()
            if self._stopped or not self._done:
                return None
            slot = self._done.popleft()
        if slot.error is not None:
            self.stop()
            raise slot.error
        for copy in slot.copies:
            copy.wait()
        self.num_given += 1
        self._ask()
        if len(slot.out) > 1:
            return {str(name): tensor for name, tensor in slot.out.items()}
        return next(iter(slot.out.values()))

    def stop(self, *, superseded: bool = False) -> None:
        """Ends the thread after its requested reads. A second call does nothing."""
        with self._changed:
            self._is_superseded = superseded and not self._stopped
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._done.clear()
        self._pools.clear()

    def _ask(self) -> None:
        """Allocates memory for the batches to read ahead, in the iterating thread and on its stream."""
        while self._num_begun < self._num_batches and len(self._begun) + len(self._done) < self._depth:
            count = min(self._batch_size, len(self._order) - self._num_begun * self._batch_size)
            out = {name: self._empty(name, count) for name in self._records}
            slot = _Slot(out, self._engine.mark() if self._engine is not None else None)
            self._num_begun += 1
            with self._changed:
                self._begun.append(slot)
                self._waiting.append(slot)
                self._changed.notify_all()
        if self._thread is None and self._begun:
            self._thread = threading.Thread(target=self._run, name="torchstorm-loader", daemon=True)
            self._thread.start()

    def _empty(self, name: str | int, count: int) -> torch.Tensor:
        kind = self._records[name].kind
        if self._device.type == "cpu":
            nbytes = self._batch_size * kind.record_bytes
            if name not in self._pools:
                self._pools[name] = AlignedPool(nbytes, 2)
            return self._pools[name].take()[: count * kind.record_bytes].view(kind.dtype).view(count, *kind.shape)
        return torch.empty((count, *kind.shape), dtype=kind.dtype, device=self._device)  # pragma: gpu

    def _run(self) -> None:
        asked: deque[_Slot] = deque()
        next_batch = self.num_given
        try:
            while True:
                with self._changed:
                    while not (self._waiting or self._stopped or (asked and asked[0].has_come())):
                        self._changed.wait()
                    if self._stopped:
                        return
                    new = list(self._waiting)
                    self._waiting.clear()
                for slot in new:
                    self._begin(slot, next_batch)
                    next_batch += 1
                    asked.append(slot)
                if asked and asked[0].has_come():
                    self._finish(asked.popleft())
        finally:
            for slot in asked:
                self._let_end(slot)
            self._close()

    def _begin(self, slot: _Slot, batch: int) -> None:
        """Requests a batch from the disk."""
        numbers = self._order[batch * self._batch_size : (batch + 1) * self._batch_size]
        are_neighbours = bool((np.diff(numbers) == 1).all())
        try:
            slot.host = slot.out if self._device.type == "cpu" else self._pinned(slot)
            for name, records in self._records.items():
                if are_neighbours:
                    slot.requests.append(records.read_async(int(numbers[0]), len(numbers), slot.host[name]))
                else:
                    slot.requests.append(records.read_rows_async(numbers, slot.host[name], verify=self._verify))
            for request in slot.requests:
                request.when_ended(self._wake)
        except BaseException as error:
            slot.error = error

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _finish(self, slot: _Slot) -> None:
        """Waits for a batch, and starts its copy to the device."""
        try:
            for request in slot.requests:
                request.wait(verify=self._verify)
            if self._engine is not None and slot.error is None:  # pragma: gpu
                for name, out in slot.out.items():
                    slot.copies.append(self._engine.copy_in(out, slot.host[name], ready=slot.ready))
        except BaseException as error:
            slot.error = error
        self._let_end(slot)
        self._give_back(slot)
        with self._changed:
            self._begun.remove(slot)
            self._done.append(slot)
            self._changed.notify_all()

    def _let_end(self, slot: _Slot) -> None:
        """Waits for running reads and copies into a batch's memory."""
        for request in slot.requests:
            request.ended()
        slot.requests = []

    def _pinned(self, slot: _Slot) -> dict[str | int, torch.Tensor]:  # pragma: gpu
        """Allocates pinned memory for a batch, after the copies of its previous owners."""
        host = {}
        for name, out in slot.out.items():
            if self._arena is None:
                self._arena = PinnedArena(
                    2**62, pin=pin_memory, available_bytes=lambda: 2**62, segment_bytes=max(2**20, out.nbytes)
                )
            room = self._arena.allocate(out.nbytes)
            for copy in room.after:
                copy.synchronize()
            slot.pinned.append(room)
            (memory,) = room.pieces
            host[name] = memory.view(out.dtype).view(out.shape)
        return host

    def _give_back(self, slot: _Slot) -> None:
        for room in slot.pinned:  # pragma: gpu
            assert self._arena is not None
            self._arena.free(room, after=slot.copies)
        slot.pinned = []
        slot.host = {}

    def _close(self) -> None:
        if self._arena is not None:  # pragma: gpu
            self._arena.close()
        with self._changed:
            self._stopped = True
            self._begun.clear()
            self._waiting.clear()
            self._changed.notify_all()


def _at_least(least: int, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}, but it must be an integer of at least {least}.")
    return value


def _rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank!r}, world_size={world_size!r}: give both, with 0 <= rank < world_size.")
    return rank, world_size
