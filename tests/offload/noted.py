"""What ran: PyTorch's operations, and what settled steps do, whether Python or C++ does it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchstorm.offload.native import library
from torchstorm.offload.recompute import watched
from torchstorm.offload.recompute.operators import operator
from torchstorm.offload.recompute.repeats import NOT_REPEATED, Repeats
from torchstorm.offload.step import step as steps
from torchstorm.offload.step.kept import Kept


class SeenOperations(TorchDispatchMode):
    """Notes all operations but views, with shape, strides and dtype of each tensor that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not operator(func).is_view:
            shapes = [(one.shape, one.stride(), one.dtype) for one in args if isinstance(one, torch.Tensor)]
            self.seen.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


def note_packed(patch: pytest.MonkeyPatch, found: list[object]) -> None:
    """Notes what autograd gets in steps that begin from now on, by its type."""

    def hooks_of(saved_tensors: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        pack, unpack = library.hooks_of(saved_tensors)

        def noted(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            found.append(Kept if type(packed).__name__ == "Stay" else type(packed))  # what C++ has in place of it
            return packed

        return noted, unpack

    patch.setattr(steps, "hooks_of", hooks_of)


def note_repeats(patch: pytest.MonkeyPatch, note: Callable[[Any, bool], None]) -> None:
    """Has every function noted that may use a record again, and whether it did."""
    run = Repeats.run

    def noted(self: Repeats, tape: Any, number: int, func: Any, *args: Any) -> Any:
        out = run(self, tape, number, func, *args)
        note(func, out is not NOT_REPEATED)
        return out

    def by_library() -> Any:
        found = library.library()
        if found is None:
            return None

        def watch(mode: Any, tape: Any, *rest: Any) -> Any:
            instead = found.watch(mode, tape, *rest)
            return instead if instead is None else _NotedWatch(instead, tape, note)

        # Without operators, which stand in for the functions that are noted.
        return SimpleNamespace(watch=watch, see_writes=found.see_writes, Operators=lambda _: None)

    patch.setattr(Repeats, "run", noted)
    patch.setattr(watched, "library", by_library)


class _NotedWatch:
    """Stands for the C++ in a mode. Where Python has not recorded a call that was counted, the C++ has."""

    def __init__(self, instead: Any, tape: Any, note: Callable[[Any, bool], None]) -> None:
        self.__self__ = instead.__self__
        self._instead, self._tape, self._note = instead, tape, note

    @property
    def moment(self) -> int:
        return int(self._instead.moment)

    def leave(self) -> Any:
        return self._instead.leave()

    def __call__(self, func: Any, *rest: Any) -> Any:
        before, in_python = self._tape.num_calls, []
        with pytest.MonkeyPatch.context() as patch:
            within = self.__self__._within
            patch.setitem(vars(self.__self__), "_within", lambda *call: in_python.append(1) or within(*call))
            out = self._instead(func, *rest)
        if self._tape.num_calls != before and not in_python:
            self._note(func, True)
        return out
