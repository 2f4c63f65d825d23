"""One step of sLSTM as one elementwise kernel, forward and backward; see `kernels/slstm.py`.

Shapes: raw (B, H, 4, D) in fp32; all other tensors (B, H, D) in fp32, with any stride for B and contiguous D. Memory
traffic per step: forward reads 7 and writes 4 values for each of B H D; backward reads 13 and writes 6. Imported only
with a GPU or Triton's interpreter.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit
def _sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1 / (1 + e), e / (1 + e))


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1 + tl.exp(-tl.abs(x)))


@triton.jit(do_not_specialize=["num", "c_stride", "n_stride", "m_stride"])
def _step_fwd_kernel(
    raw, c, n, m, h_new, c_new, n_new, m_new, num, width, row, c_stride, n_stride, m_stride, BLOCK: tl.constexpr
):
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < num
    # Rows of H D values lie one batch stride apart; in raw, the four gates of a head lie D apart.
    b, rest = (e // row).to(tl.int64), e % row
    gate = raw + (e // width) * 4 * width + e % width
    i = tl.load(gate, mask=inside, other=0.0)
    log_f = _log_sigmoid(tl.load(gate + width, mask=inside, other=0.0))
    z = 2 * _sigmoid(2 * tl.load(gate + 2 * width, mask=inside, other=0.0)) - 1
    o = _sigmoid(tl.load(gate + 3 * width, mask=inside, other=0.0))
    m_old = tl.load(m + b * m_stride + rest, mask=inside, other=0.0)
    stable = tl.maximum(log_f + m_old, i)
    forget, write = tl.exp(log_f + m_old - stable), tl.exp(i - stable)
    c_now = forget * tl.load(c + b * c_stride + rest, mask=inside, other=0.0) + write * z
    n_now = forget * tl.load(n + b * n_stride + rest, mask=inside, other=0.0) + write
    tl.store(h_new + e, o * c_now / n_now, mask=inside)
    tl.store(c_new + e, c_now, mask=inside)
    tl.store(n_new + e, n_now, mask=inside)
    tl.store(m_new + e, stable, mask=inside)


@triton.jit(do_not_specialize=["num", "raw_stride", "now_stride", "old_stride"])
def _step_bwd_kernel(
    raw, dh, dc, dn, c, n, m, c_old, n_old, m_old, draw, dc_old, dn_old,
    num, width, row, raw_stride, now_stride, old_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < num
    b, rest = (e // row).to(tl.int64), e % row
    now, old = b * now_stride + rest, b * old_stride + rest
    gate = (rest // width) * 4 * width + rest % width
    read = raw + b * raw_stride + gate
    i = tl.load(read, mask=inside, other=0.0)
    f = tl.load(read + width, mask=inside, other=0.0)
    z = 2 * _sigmoid(2 * tl.load(read + 2 * width, mask=inside, other=0.0)) - 1
    o = _sigmoid(tl.load(read + 3 * width, mask=inside, other=0.0))
    stable = tl.load(m + now, mask=inside, other=0.0)
    forget = tl.exp(_log_sigmoid(f) + tl.load(m_old + old, mask=inside, other=0.0) - stable)
    write = tl.exp(i - stable)
    norm = tl.load(n + now, mask=inside, other=1.0)
    y = tl.load(c + now, mask=inside, other=0.0) / norm
    up = tl.load(dh + e, mask=inside, other=0.0)
    dy = up * o / norm
    to_c = tl.load(dc + e, mask=inside, other=0.0) + dy
    to_n = tl.load(dn + e, mask=inside, other=0.0) - dy * y
    carried = to_c * tl.load(c_old + old, mask=inside, other=0.0) + to_n * tl.load(n_old + old, mask=inside, other=0.0)
    out = draw + b * 4 * row + gate
    tl.store(out, write * (to_c * z + to_n), mask=inside)
    tl.store(out + width, forget * carried * _sigmoid(-f), mask=inside)
    tl.store(out + 2 * width, to_c * write * (1 - z * z), mask=inside)
    tl.store(out + 3 * width, up * y * o * (1 - o), mask=inside)
    tl.store(dc_old + e, to_c * forget, mask=inside)
    tl.store(dn_old + e, to_n * forget, mask=inside)


def launch_step_fwd(raw: Tensor, c: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h, c, n, m) after a step."""
    raw = raw.contiguous()
    B, H, _, D = raw.shape
    c, n, m = (_rows(part) for part in (c, n, m))
    h_new, c_new, n_new, m_new = (raw.new_empty(B, H, D) for _ in range(4))
    grid = (triton.cdiv(h_new.numel(), _BLOCK),)
    _step_fwd_kernel[grid](
        raw, c, n, m, h_new, c_new, n_new, m_new, h_new.numel(), D, H * D, c.stride(0), n.stride(0), m.stride(0),
        BLOCK=_BLOCK,
    )  # fmt: skip
    return h_new, c_new, n_new, m_new


def launch_step_bwd(
    raw: Tensor, dh: Tensor, dc: Tensor, dn: Tensor, now: tuple[Tensor, ...], before: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """(d raw, dc, dn before the step)."""
    B, H, _, D = raw.shape
    raw = raw if raw[0].is_contiguous() else raw.contiguous()
    dh, dc, dn = dh.contiguous(), dc.contiguous(), dn.contiguous()
    now, before = tuple(_rows(part) for part in now), tuple(_rows(part) for part in before)
    assert len({part.stride(0) for part in now}) == len({part.stride(0) for part in before}) == 1
    draw = torch.empty((B, H, 4, D), dtype=raw.dtype, device=raw.device)
    dc_old, dn_old = torch.empty_like(dc), torch.empty_like(dn)
    grid = (triton.cdiv(dh.numel(), _BLOCK),)
    _step_bwd_kernel[grid](
        raw, dh, dc, dn, *now, *before, draw, dc_old, dn_old,
        dh.numel(), D, H * D, raw.stride(0), now[0].stride(0), before[0].stride(0), BLOCK=_BLOCK,
    )  # fmt: skip
    return draw, dc_old, dn_old


def _rows(part: Tensor) -> Tensor:
    """part with contiguous H D values per batch."""
    return part if part[0].is_contiguous() else part.contiguous()
