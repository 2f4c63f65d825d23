"""What a step keeps alive outside the budget: counted, and named in the report.

Wrapper tensors (jagged nested tensors, DTensor) and sparse ones are saved as they are, since their bytes lie in other
tensors, which autograd does not hand out. What `torch.utils.checkpoint` computes again it keeps in a table of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchstorm.offload.step.packed import Untouched, is_of_parameter
from torchstorm.offload.step.residency import Residency
from torchstorm.offload.torch_private import watch_checkpoints
from torchstorm.sizes import format_size

_CHECKPOINTS = "tensors that torch.utils.checkpoint computed again in backward"


@dataclass(slots=True)
class _Held:
    """A storage, named by what keeps it alive."""

    name: str
    nbytes: int
    num_holders: int = 0


class Outside:
    """Counts the bytes of a Session's steps that are outside its budget, each storage once.

    Args:
        residency: knows what is within the budget.
        is_leaf: whether the storage at an address is a weight, a buffer or an input of the model.
        in_step: whether a step is running.

    Attributes:
        peak_bytes: by what keeps them alive, the most at once.
    """

    def __init__(self, residency: Residency, *, is_leaf: Callable[[int], bool], in_step: Callable[[], bool]) -> None:
        self.peak_bytes: dict[str, int] = {}
        self._residency = residency
        self._is_leaf = is_leaf
        self._in_step = in_step
        self._held: dict[int, _Held] = {}  # by address
        self._bytes: Counter[str] = Counter()
        self._gone: deque[list[int]] = deque()  # addresses that one holder had; filled from any thread, even within us
        self._lock = threading.Lock()
        watch_checkpoints(self._computed_again)

    def keep(self, tensor: torch.Tensor) -> Untouched:
        """What autograd gets for a tensor whose storage the Session does not manage."""
        kept = Untouched(tensor)
        if self._in_step() and not is_of_parameter(tensor):
            self._add(_kind(tensor), tensor, kept)
        return kept

    def notes(self) -> tuple[str, ...]:
        """What the report says of it."""
        return tuple(
            f"outside the budget: {format_size(nbytes)} of {name}"
            for name, nbytes in sorted(self.peak_bytes.items())
            if nbytes
        )

    def _computed_again(self, tensor: torch.Tensor, kept: torch.Tensor) -> None:
        if self._in_step() and not is_of_parameter(tensor):
            self._add(_CHECKPOINTS, tensor, kept)

    def _add(self, name: str, tensor: torch.Tensor, holder: object) -> None:
        """Counts a tensor's storages for as long as `holder` lives."""
        with self._lock, torch._C._DisableTorchDispatch():
            while self._gone:
                self._let_go(self._gone.popleft())
            addresses = []
            for storage in _storages(tensor):
                address, known = storage._cdata, self._held.get(storage._cdata)
                if known is None:
                    if storage.device != self._residency.device or self._is_leaf(address):
                        continue
                    if self._residency.known.holds(address) or self._residency.kept.holds(address):
                        continue
                    known = self._held[address] = _Held(name, storage.nbytes())
                    self._bytes[name] += known.nbytes
                known.num_holders += 1
                addresses.append(address)
            if addresses:
                weakref.finalize(holder, self._gone.append, addresses).atexit = False
                self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), self._bytes[name])

    def _let_go(self, addresses: list[int]) -> None:
        for address in addresses:
            held = self._held[address]
            held.num_holders -= 1
            if not held.num_holders:
                self._bytes[held.name] -= held.nbytes
                del self._held[address]


def _kind(tensor: torch.Tensor) -> str:
    """What a user calls tensors of this kind."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return type(tensor).__name__
    return "nested tensors" if tensor.is_nested else f"{tensor.layout} tensors"


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Where a tensor's numbers lie, also those of the tensors that it wraps."""
    parts: list[torch.Tensor] = []
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif tensor.layout == torch.strided and not torch._is_zerotensor(tensor):
        yield tensor.untyped_storage()
    for part in parts:
        yield from _storages(part)
