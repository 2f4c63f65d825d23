"""Gradients of gradients: what the backward operators of all operations do alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def own_views(tensors: Iterable[Tensor | None]) -> list[Any]:
    """A view of its own for each, from which autograd can differentiate; None stays None.

    So what one of them was made from stays out of the others' gradients.
    """
    return [None if x is None else x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in tensors]
