"""sLSTM: a recurrence with exponential gates and memory mixing, over whole sequences.

    (i, f, z, o)_t = x_t + h_{t-1} r                       r mixes within a head
    m_t = max(logsigmoid(f_t) + m_{t-1}, i_t)              stabilizer; h does not depend on it
    c_t = e^(logsigmoid(f_t) + m_{t-1} - m_t) c_{t-1} + e^(i_t - m_t) tanh(z_t)
    n_t = the same with 1 instead of tanh(z_t)
    h_t = sigmoid(o_t) c_t / n_t

Shapes: x (B, S, H, 4, D) with the pre-activations in the order i, f, z, o; r (H, D, 4 D); h (B, S, H, D). States
(B, H, D). Dtypes: fp32, fp16, bf16, and fp64 on the CPU; states and sums are fp32 (fp64 for fp64). A step is one matrix
product and one fused elementwise kernel; since h_t needs h_{t-1}, S steps run one after the other. Backward repeats the
matrix products of all steps at once. Source: Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory",
arXiv 2405.04517, section 2.2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchstorm.errors import ShapeError
from torchstorm.kernels.dtypes import FLOATS, wide
from torchstorm.kernels.operator import differentiable, fake, operator
from torchstorm.kernels.pytorch_fallback import without_autocast


class SLSTMState(NamedTuple):
    """The state after a sequence: h in x's dtype, c, n and m in fp32 (fp64 for fp64); each (B, H, D)."""

    h: Tensor
    c: Tensor
    n: Tensor
    m: Tensor


def slstm_reference(x_BSHGD: Tensor, r_HDF: Tensor) -> Tensor:
    """The definition, differentiable by autograd. Returns h (B, S, H, D)."""
    B, S, H, _, D = x_BSHGD.shape
    h = c = n = x_BSHGD.new_zeros(B, H, D)
    m = x_BSHGD.new_full((B, H, D), -math.inf)
    outs = []
    for t in range(S):
        i, f, z, o = (x_BSHGD[:, t] + torch.einsum("bhd,hdf->bhf", h, r_HDF).unflatten(-1, (4, D))).unbind(2)
        log_f = F.logsigmoid(f)
        m_new = torch.maximum(log_f + m, i).detach()
        forget, write = (log_f + m - m_new).exp(), (i - m_new).exp()
        c, n, m = forget * c + write * z.tanh(), forget * n + write, m_new
        h = o.sigmoid() * c / n
        outs.append(h)
    return torch.stack(outs, 1)


# ---------------------------------------------------------------------- one step


def _step_fwd(raw_BHGD: Tensor, c: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h, c, n, m) after a step. The states may be overwritten."""
    if raw_BHGD.is_cuda:  # pragma: gpu
        from torchstorm.kernels.slstm_triton import launch_step_fwd

        return launch_step_fwd(raw_BHGD, c, n, m)
    i, f, z, o = raw_BHGD.unbind(2)
    log_f = F.logsigmoid(f)
    m_new = torch.maximum(log_f + m, i)
    forget, write = (log_f + m - m_new).exp_(), (i - m_new).exp_()
    c = forget * c + write * z.tanh()
    n = forget * n + write
    return o.sigmoid() * c / n, c, n, m_new


def _step_bwd(
    raw: Tensor, dh: Tensor, dc: Tensor, dn: Tensor, now: tuple[Tensor, ...], before: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """(d raw (B, H, 4, D), dc, dn before the step) from the gradients after it and the states before and after."""
    if raw.is_cuda:  # pragma: gpu
        from torchstorm.kernels.slstm_triton import launch_step_bwd

        return launch_step_bwd(raw, dh, dc, dn, now, before)
    (c, n, m), (c_before, n_before, m_before) = now, before
    i, f, z, o = raw.unbind(2)
    forget, write, value, out = (F.logsigmoid(f) + m_before - m).exp(), (i - m).exp(), z.tanh(), o.sigmoid()
    y = c / n
    dy = dh * out / n
    dc, dn = dc + dy, dn - dy * y
    draw = torch.stack(
        (
            write * (dc * value + dn),
            forget * (dc * c_before + dn * n_before) * torch.sigmoid(-f),
            dc * write * (1 - value * value),
            dh * y * out * (1 - out),
        ),
        dim=2,
    )
    return draw, dc * forget, dn * forget


# ---------------------------------------------------------------------- the operators


def _in_order(x: Tensor) -> Tensor:
    """x, contiguous on a CPU: PyTorch's loops there round differently within a vector than in what is left of a row."""
    return x if x.is_cuda else x.contiguous()


@operator("slstm_fwd")
def _slstm_fwd(
    x_BSHGD: Tensor, r_HDF: Tensor, h0: Tensor, c0: Tensor, n0: Tensor, m0: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h in x's dtype, and c, n, m of each step: (B, S, H, D) each."""
    # Autocast would round the sums.
    with without_autocast(x_BSHGD), torch.cuda.device_of(x_BSHGD):
        return _forward(x_BSHGD, r_HDF, h0, c0, n0, m0)


def _forward(
    x_BSHGD: Tensor, r_HDF: Tensor, h0: Tensor, c0: Tensor, n0: Tensor, m0: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, S, H, _, D = x_BSHGD.shape
    sums = c0.dtype
    x_BSHGD = _in_order(x_BSHGD)
    h_all = x_BSHGD.new_empty(B, S, H, D)
    states = [x_BSHGD.new_empty((B, S, H, D), dtype=sums) for _ in range(3)]
    h, c, n, m = h0, c0, n0, m0
    for t in range(S):
        mixed_HBF = torch.bmm(h.transpose(0, 1), r_HDF)
        raw = x_BSHGD[:, t].to(sums) + mixed_HBF.transpose(0, 1).unflatten(-1, (4, D)).to(sums)
        h, c, n, m = _step_fwd(raw, c, n, m)
        h = h.to(x_BSHGD.dtype)
        h_all[:, t] = h
        for kept, state in zip(states, (c, n, m), strict=True):
            kept[:, t] = state
    c_all, n_all, m_all = states
    return h_all, c_all, n_all, m_all


@fake(_slstm_fwd)
def _(
    x_BSHGD: Tensor, r_HDF: Tensor, h0: Tensor, c0: Tensor, n0: Tensor, m0: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, S, H, _, D = x_BSHGD.shape
    c, n, m = (x_BSHGD.new_empty((B, S, H, D), dtype=c0.dtype) for _ in range(3))
    return x_BSHGD.new_empty(B, S, H, D), c, n, m


@operator("slstm_bwd")
def _slstm_bwd(
    dh_BSHD: Tensor,
    x_BSHGD: Tensor,
    r_HDF: Tensor,
    h_BSHD: Tensor,
    c_BSHD: Tensor,
    n_BSHD: Tensor,
    m_BSHD: Tensor,
    h0: Tensor,
    c0: Tensor,
    n0: Tensor,
    m0: Tensor,
) -> tuple[Tensor, Tensor]:
    """(dx, dr) in the dtypes of x and r."""
    with without_autocast(x_BSHGD), torch.cuda.device_of(x_BSHGD):
        return _backward_of(dh_BSHD, x_BSHGD, r_HDF, (h_BSHD, c_BSHD, n_BSHD, m_BSHD), SLSTMState(h0, c0, n0, m0))


def _backward_of(
    dh_BSHD: Tensor, x_BSHGD: Tensor, r_HDF: Tensor, made: tuple[Tensor, ...], start: SLSTMState
) -> tuple[Tensor, Tensor]:
    h_BSHD, c_BSHD, n_BSHD, m_BSHD = made
    h0, c0, n0, m0 = start
    B, S, H, _, D = x_BSHGD.shape
    sums = c0.dtype
    before_HND = torch.cat([h0[:, None], h_BSHD[:, :-1]], 1).permute(2, 0, 1, 3).reshape(H, B * S, D)
    raw = _in_order(x_BSHGD).to(sums) + torch.bmm(before_HND, r_HDF).view(H, B, S, 4, D).permute(1, 2, 0, 3, 4).to(sums)
    draw = torch.empty_like(raw)
    dc = dn = torch.zeros_like(c0)
    dh_mixed = torch.zeros_like(c0)
    back_HFD = r_HDF.to(sums).transpose(1, 2)
    first = (c0, n0, m0)
    for t in reversed(range(S)):
        now = (c_BSHD[:, t], n_BSHD[:, t], m_BSHD[:, t])
        before = (c_BSHD[:, t - 1], n_BSHD[:, t - 1], m_BSHD[:, t - 1]) if t else first
        draw[:, t], dc, dn = _step_bwd(raw[:, t], dh_BSHD[:, t].to(sums) + dh_mixed, dc, dn, now, before)
        dh_mixed = torch.bmm(draw[:, t].flatten(2).transpose(0, 1), back_HFD).transpose(0, 1)
    draw_HNF = draw.permute(2, 0, 1, 3, 4).reshape(H, B * S, 4 * D)
    dr = torch.bmm(before_HND.to(sums).transpose(1, 2), draw_HNF)
    return draw.to(x_BSHGD.dtype), dr.to(r_HDF.dtype)


@fake(_slstm_bwd)
def _(
    dh_BSHD: Tensor,
    x_BSHGD: Tensor,
    r_HDF: Tensor,
    h_BSHD: Tensor,
    c_BSHD: Tensor,
    n_BSHD: Tensor,
    m_BSHD: Tensor,
    h0: Tensor,
    c0: Tensor,
    n0: Tensor,
    m0: Tensor,
) -> tuple[Tensor, Tensor]:
    return x_BSHGD.new_empty(x_BSHGD.shape), r_HDF.new_empty(r_HDF.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    x, r, *first = inputs
    ctx.save_for_backward(x, r, *output, *first)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dh: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dh is None:
        return (None,) * 6
    dx, dr = torch.ops.torchstorm.slstm_bwd(dh, *ctx.saved_tensors)
    return dx, dr, None, None, None, None


differentiable(_slstm_fwd, _backward, setup_context=_setup_context)


def slstm(x_BSHGD: Tensor, r_HDF: Tensor, *, initial_state: SLSTMState | None = None) -> tuple[Tensor, SLSTMState]:
    """Runs the recurrence over every sequence of a batch.

    Args:
        x_BSHGD: pre-activations (B, S, H, 4, D), S at least 1, in the order i, f, z, o.
        r_HDF: recurrent weights (H, D, 4 D), of x's dtype.
        initial_state: state of an earlier call; None for an empty state.

    Returns:
        h (B, S, H, D) in x's dtype, and the state after the last step. Differentiable in x and r through h; states have
        no gradients.

    Raises:
        ShapeError: the shapes, dtypes or devices do not match.
    """
    if x_BSHGD.dim() != 5 or x_BSHGD.shape[3] != 4 or x_BSHGD.shape[1] < 1:
        raise ShapeError(f"x has shape {tuple(x_BSHGD.shape)}, but it must be (B, S, H, 4, D) with S at least 1.")
    B, _, H, _, D = x_BSHGD.shape
    if r_HDF.shape != (H, D, 4 * D):
        raise ShapeError(
            f"r has shape {tuple(r_HDF.shape)}, but x of {tuple(x_BSHGD.shape)} needs (H, D, 4 D) = {(H, D, 4 * D)}."
        )
    if x_BSHGD.dtype not in FLOATS or r_HDF.dtype != x_BSHGD.dtype or r_HDF.device != x_BSHGD.device:
        raise ShapeError(
            f"x is {x_BSHGD.dtype} on {x_BSHGD.device} and r {r_HDF.dtype} on {r_HDF.device}: they must be equal, and "
            f"one of {', '.join(str(dtype).removeprefix('torch.') for dtype in FLOATS)}."
        )
    sums = wide(x_BSHGD.dtype)
    if initial_state is None:
        zeros = x_BSHGD.new_zeros((B, H, D), dtype=sums)
        initial_state = SLSTMState(zeros.to(x_BSHGD.dtype), zeros, zeros, torch.full_like(zeros, -math.inf))
    wrong = [name for name, part in initial_state._asdict().items() if part.shape != (B, H, D)]
    if wrong:
        raise ShapeError(
            f"The initial state's {wrong[0]} has shape {tuple(getattr(initial_state, wrong[0]).shape)}, but x of "
            f"{tuple(x_BSHGD.shape)} needs (B, H, D) = {(B, H, D)}."
        )
    found = torch.ops.torchstorm.slstm_fwd(x_BSHGD, r_HDF, *(part.detach() for part in initial_state))
    return found[0], SLSTMState(*(part[:, -1].detach() for part in found))
