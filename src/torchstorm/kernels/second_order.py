"""Second derivatives: a function shared by the backward operators of all operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def own_views(tensors: Iterable[Tensor | None]) -> list[Any]:
    """A separate view of each tensor, to differentiate with respect to; None stays None.

    If one tensor was computed from another, that dependency is not part of the gradients.
    """
    return [None if x is None else x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in tensors]
