"""The softmax of a chunk of rows as one Triton kernel: computes losses, and overwrites logits with their gradients.

A program processes a row of V logits. A row is too long for registers (256 KB at V = 131072 in bf16), so it is read
twice: first for the maximum and the sum of exponentials in one pass ("online softmax", arXiv 1805.02867), then in
reverse, partly from L2, for the gradients, which overwrite it. Each lane has its own maximum and sum, over GROUP
neighbours at a time, so lanes are combined once per row, not once per block.

Memory traffic of a chunk of n rows: n V elements are read twice and written once; PyTorch's operators read and write
them about ten times. Arithmetic in fp32. Logits are subtracted before any multiplication, so equal values give exactly
0: the loss and the gradients of a certain class, or of the only class, are exactly 0. With a softcap, logits are stored
in units of it, since a compiler may fuse a multiplication and an addition without rounding in between.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchstorm.kernels.elementwise.operations_triton import exp
from torchstorm.kernels.linear_cross_entropy.rows_torch import Options

BLOCK_BYTES = 16384
NUM_WARPS = 16


@triton.jit
def _tanh(x):
    # Near 0 an odd polynomial, where 1 - 2 / (e^2x + 1) cancels (Moshier's Cephes, tanhf).
    square = x * x
    near = ((-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2) * square + 1.33314422036e-1
    near = (near * square - 3.33332819422e-1) * square * x + x
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def _exp(x, softcap, SOFTCAP: tl.constexpr):
    """e^x, of x in units of the softcap where there is one."""
    return tl.exp2(x * (1.4426950408889634 * softcap)) if SOFTCAP else exp(x)


@triton.jit
def rows_kernel(
    logits_ptr,  # (n, stride), of which V count; what stands behind them may be anything
    target_ptr,
    scale_ptr,  # one number, or with LSE_GIVEN one a row
    loss_ptr,
    lse_ptr,
    V,
    stride,
    ignore_index,
    smoothing,
    share,  # of it, each class's
    softcap,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GRADIENTS: tl.constexpr,
    LSE_GIVEN: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    target = tl.load(target_ptr + row)
    counted = target != ignore_index
    num = tl.where(counted, V, 0)
    column = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    fits = (target >= 0) & (target < V)

    if LSE_GIVEN:
        lse = tl.load(lse_ptr + row)
        scale = tl.load(scale_ptr + row)
    else:
        # A target that is no class makes its row NaN.
        at_target = tl.load(row_ptr + target, mask=counted & fits, other=float("nan")).to(tl.float32)
        if SOFTCAP:
            at_target = _tanh(at_target / softcap)
        top = tl.full([LANES], float("-inf"), tl.float32)
        exp_sum = tl.zeros([LANES], tl.float32)
        plain_sum = tl.zeros([LANES], tl.float32)
        for start in range(0, num, LANES * GROUP):
            at = start + column
            # Whole groups are read, so that the loads are wide whatever V is.
            z = tl.load(row_ptr + at, mask=at < stride, other=0.0).to(tl.float32)
            if SOFTCAP:
                z = _tanh(z / softcap)
            z = tl.where(at < V, z, float("-inf"))
            if SMOOTHING:
                plain_sum += tl.sum(tl.where(at < V, z, 0.0), 1)
            new_top = tl.maximum(top, tl.max(z, 1))
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            lost = _exp(top - finite_top, softcap, SOFTCAP)
            exp_sum = exp_sum * lost + tl.sum(_exp(z - finite_top[:, None], softcap, SOFTCAP), 1)
            top = new_top
        row_top = tl.max(top, 0)
        log_sum = tl.log(tl.sum(exp_sum * _exp(top - row_top, softcap, SOFTCAP), 0))
        middle = tl.where(tl.abs(at_target) < float("inf"), at_target, 0.0)
        beyond = (row_top - middle) - (1.0 - smoothing) * (at_target - middle)
        if SMOOTHING:
            beyond -= share * (tl.sum(plain_sum, 0) - V * middle)
        if SOFTCAP:
            beyond *= softcap
            lse = row_top + log_sum / softcap
        else:
            lse = row_top + log_sum
        loss = log_sum + beyond
        tl.store(loss_ptr + row, tl.where(counted, loss, 0.0))
        tl.store(lse_ptr + row, lse)
        if GRADIENTS:
            scale = tl.load(scale_ptr)

    if GRADIENTS:
        scale = tl.where(fits, scale, float("nan"))
        # Backwards: what was read last is what L2 still has, where all rows under way are more than it holds.
        last = (num + LANES * GROUP - 1) // (LANES * GROUP) * (LANES * GROUP) - LANES * GROUP
        for start in range(0, num, LANES * GROUP):
            at = last - start + column
            z = tl.load(row_ptr + at, mask=at < stride, other=0.0).to(tl.float32)
            if SOFTCAP:
                z = _tanh(z / softcap)
            gradient = _exp(z - lse, softcap, SOFTCAP)
            gradient = tl.where(at == target, gradient - 1.0, gradient)
            if SMOOTHING:
                gradient += tl.where(at == target, smoothing - share, -share)
            if SOFTCAP:
                gradient *= 1.0 - z * z
            # Zeros behind the row: products on a CPU may read one number more than they should.
            gradient = tl.where(at < V, gradient * scale, 0.0)
            tl.store(row_ptr + at, gradient.to(logits_ptr.dtype.element_ty), mask=at < stride)
        for start in range(0, V - num, LANES * GROUP):  # an ignored row
            at = start + column
            zero = tl.zeros([LANES, GROUP], logits_ptr.dtype.element_ty)
            tl.store(row_ptr + at, zero, mask=at < stride)


def losses(
    logits: Tensor, V: int, target: Tensor, options: Options, loss: Tensor, lse: Tensor, scale: Tensor | None
) -> None:
    """As in `rows_torch`. Also fills lse (n), the logarithm of each row's sum of exponentials (in units of softcap)."""
    _launch(logits, V, target, options, loss, lse, scale, lse_given=False)


def gradients(logits: Tensor, V: int, target: Tensor, options: Options, lse: Tensor, scale: Tensor) -> None:
    """Overwrites the logits with scale * gradients of their rows' losses; lse and scale (n)."""
    _launch(logits, V, target, options, None, lse, scale, lse_given=True)


def _launch(
    logits: Tensor,
    V: int,
    target: Tensor,
    options: Options,
    loss: Tensor | None,
    lse: Tensor,
    scale: Tensor | None,
    *,
    lse_given: bool,
) -> None:
    n = logits.shape[0]
    group = 16 // logits.element_size()
    lanes = min(BLOCK_BYTES // 16, triton.next_power_of_2(-(-V // group)))
    rows_kernel[(n,)](
        logits, target, scale, loss, lse, V, logits.stride(0), options.ignore_index, options.label_smoothing,
        options.label_smoothing / V, options.softcap or 1.0, SMOOTHING=bool(options.label_smoothing),
        SOFTCAP=options.softcap is not None, GRADIENTS=scale is not None, LSE_GIVEN=lse_given, LANES=lanes, GROUP=group,
        num_warps=max(1, min(NUM_WARPS, lanes // 32)),
    )  # fmt: skip
