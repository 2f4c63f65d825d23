"""The initial and final states of the mLSTM and their gradients, for all Triton variants."""

from __future__ import annotations

import torch
from torch import Tensor

from torchstorm.kernels.mlstm.maximum import maximum_backward

States = tuple[Tensor, Tensor]
"""C and n."""


def as_states(C: Tensor | None, n: Tensor | None) -> States | None:
    """An initial state for the kernels; None for none. With sigmoid gates n is unused."""
    if C is None:
        return None
    return C.float().contiguous(), C if n is None else n.float().contiguous()


def copy_state(to: tuple[Tensor, ...], given: tuple[Tensor | None, ...]) -> None:
    """Fills a final state with the initial one, or with zeros, for sequences without tokens."""
    for x, there in zip(to, given, strict=True):
        x.zero_() if there is None else x.copy_(there)


def empty_start_gradients(C0: Tensor | None, C: Tensor, n: Tensor) -> States | None:
    """Uninitialized gradients of an initial state; None without an initial state."""
    return None if C0 is None else (torch.empty_like(C), torch.empty_like(n))


def end_gradients(dC: Tensor | None, dn: Tensor | None, C: Tensor, n: Tensor) -> States | None:
    """The gradients of the final state, with zeros for one that is None; None if both are."""
    if dC is None and dn is None:
        return None
    return _or_zero(dC, C), _or_zero(dn, n)


def gradients_along_maximum(
    end: States | None,
    dm: Tensor | None,
    final: tuple[Tensor, Tensor, Tensor],
    i: Tensor,
    f: Tensor,
    m0: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Gradients of i, f and m_0 through m_T, if there is a gradient of the final state (C, n, m)."""
    if end is None and dm is None:
        return None
    C, n, m = final
    d_max = _or_zero(dm, m).double()
    if end is not None:
        # C_T = e^-m_T (e^m_T C_T), and the factor in parentheses does not depend on m_T.
        d_max = d_max - (end[0].double() * C).sum((-2, -1)) - (end[1].double() * n).sum(-1)
    return maximum_backward(d_max, i, f, m0, cu_seqlens)


def start_gradients(
    grads: States | None,
    start: tuple[Tensor | None, Tensor | None, Tensor | None],
    own: tuple[Tensor, ...] | None,
    *,
    sigmoid: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of an initial state; None without one. With sigmoid gates only C has a gradient.

    grads: gradients of e^m_0 C_0 and e^m_0 n_0, the unscaled state. own: results of `gradients_along_maximum`.
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
