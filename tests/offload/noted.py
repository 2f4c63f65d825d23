"""What settled steps do, whether Python or C++ does it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from torchstorm.offload.native import library
from torchstorm.offload.recompute import watched
from torchstorm.offload.recompute.repeats import LONG_WAY, NOT_REPEATED, Repeats
from torchstorm.offload.step import step as steps


def note_packed(patch: pytest.MonkeyPatch, found: list[object]) -> None:
    """Notes what autograd gets in steps that begin from now on, by its type."""

    def hooks_of(saved_tensors: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        pack, unpack = library.hooks_of(saved_tensors)
        return lambda tensor: found.append(type(packed := pack(tensor))) or packed, unpack  # type: ignore[func-returns-value]

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

        def again(repeats: Any, tape: Any, number: int, func: Any, *args: Any) -> Any:
            out = found.run(repeats, tape, number, func, *args)
            if out is not LONG_WAY:
                note(func, True)
            return out

        return SimpleNamespace(run=again)

    patch.setattr(Repeats, "run", noted)
    patch.setattr(watched, "library", by_library)
