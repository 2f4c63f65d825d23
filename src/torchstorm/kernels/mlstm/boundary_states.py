"""A sequence's ends, alike in all Triton variants of the mLSTM: its initial and final state, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from torchstorm.kernels.mlstm.maximum import maximum_backward

States = tuple[Tensor, Tensor]
"""C and n."""


def given_state(C: Tensor | None, n: Tensor | None) -> States | None:
    """An initial state as kernels read it; None for none. Sigmoid gates have no n, and nobody reads it."""
    if C is None:
        return None
    return C.float().contiguous(), C if n is None else n.float().contiguous()


def carry_over(to: tuple[Tensor, ...], given: tuple[Tensor | None, ...]) -> None:
    """Fills a state with another, or zeros: what becomes of one where there are no tokens."""
    for x, there in zip(to, given, strict=True):
        x.zero_() if there is None else x.copy_(there)


def start_room(C0: Tensor | None, C: Tensor, n: Tensor) -> States | None:
    """Room for the gradients to an initial state, not filled; None for none."""
    return None if C0 is None else (torch.empty_like(C), torch.empty_like(n))


def end_gradients(dC: Tensor | None, dn: Tensor | None, C: Tensor, n: Tensor) -> States | None:
    """The gradients to the final state, zeros for the one that is None; None where both are."""
    if dC is None and dn is None:
        return None
    return _or_zero(dC, C), _or_zero(dn, n)


def along_maximum(
    end: States | None,
    dm: Tensor | None,
    final: tuple[Tensor, Tensor, Tensor],
    i: Tensor,
    f: Tensor,
    m0: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Gradients to i, f and m_0 along m_T's own path, where a gradient came to the final state (C, n, m)."""
    if end is None and dm is None:
        return None
    C, n, m = final
    d_max = _or_zero(dm, m).double()
    if end is not None:
        # C_T = e^-m_T (e^m_T C_T), and the part in brackets does not depend on m_T.
        d_max = d_max - (end[0].double() * C).sum((-2, -1)) - (end[1].double() * n).sum(-1)
    return maximum_backward(d_max, i, f, m0, cu_seqlens)


def start_gradients(
    grads: States | None,
    start: tuple[Tensor | None, Tensor | None, Tensor | None],
    own: tuple[Tensor, ...] | None,
    *,
    sigmoid: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients to an initial state, None where there is none. Of a state of sigmoid gates only C counts.

    grads: to e^m_0 C_0 and e^m_0 n_0, which is what is meant by a state. own: what `along_maximum` found.
    """
    C0, n0, m0 = start
    if grads is None or C0 is None:
        return None, None, None
    dC0, dn0 = grads
    if sigmoid:
        no_n, no_m = (None if x is None else torch.zeros_like(x) for x in (n0, m0))
        return dC0, no_n, no_m
    assert n0 is not None, "a state of exponential gates has C, n and m"
    dm0 = (dC0.double() * C0).sum((-2, -1)) + (dn0.double() * n0).sum(-1)
    return dC0, dn0, (dm0 if own is None else dm0 + own[2]).float()


def _or_zero(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.float().contiguous()
