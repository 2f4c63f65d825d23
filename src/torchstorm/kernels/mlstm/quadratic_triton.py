"""The quadratic mLSTM in Triton, forward and backward: all pairs of rows and earlier tokens, as in FlashAttention-2.

Forward:  gates -> the final state, a sum over tokens -> outputs.
Backward: gates -> 1 / N and the gradient of den -> the gradient of the initial state, if there is one -> dq ->
          dk, dv and sums of dD -> sums that pass over each block -> di and df.
Saved for backward besides inputs and output: den, one number per token. There are no states within the sequence, and
nothing of size S x S is stored. The time grows as S^2, so it is for short sequences, and for comparison with chunks.
With `tensor_cores` the kernels multiply fp16 and bf16 tiles on tensor cores; otherwise in fp32 on CUDA cores.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import torch
from torch import Tensor

from torchstorm.errors import ShapeError
from torchstorm.kernels.mlstm.boundary_states import (
    States,
    as_states,
    copy_state,
    empty_start_gradients,
    end_gradients,
    gradients_along_maximum,
    start_gradients,
)
from torchstorm.kernels.mlstm.launch_triton import Launch, rows, strides_of
from torchstorm.kernels.mlstm.quadratic_gradients_triton import (
    passing_kernel,
    quadratic_k_v_gradients_kernel,
    quadratic_q_gradients_kernel,
)
from torchstorm.kernels.mlstm.quadratic_outputs_triton import outer_sums_kernel, quadratic_outputs_kernel
from torchstorm.kernels.mlstm.quadratic_tiles import pick_quadratic
from torchstorm.kernels.mlstm.tiles import Tiles

_STEP = 128


class _Launch(Launch):
    """The kernels of one call. `tiles.chunk` and `tiles.chunk_backward` are tokens per block."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        m0: Tensor | None,
        cu_seqlens: Tensor | None,
        gate: str,
        tiles: Tiles,
        *,
        tensor_cores: bool,
    ) -> None:
        super().__init__(q, k, v, i, f, m0, cu_seqlens, gate, tiles)
        self.tensor_cores = tensor_cores
        if not tensor_cores:
            self.precision = "ieee"

    def end_state(self, start: States | None, C: Tensor, n: Tensor) -> None:
        """Fills C and n, the final state."""
        self._outer_sums(self.k, self.v, self.tiles.chunk, start, C, n, forward=True)

    def start_gradients(self, dh: Tensor, end: States | None, dC: Tensor, dn: Tensor) -> None:
        """Fills dC and dn, the gradient of the initial state."""
        self._outer_sums(self.q, dh, self.tiles.chunk_backward, end, dC, dn, forward=False)

    def _outer_sums(
        self, x: Tensor, y: Tensor, block: int, given: States | None, C: Tensor, n: Tensor, *, forward: bool
    ) -> None:
        tile = self.tiles.states
        align, strides = strides_of(x, y)
        given_C, given_n = given or (None, None)
        outer_sums_kernel[(self.num_heads * self._num_tiles(tile),)](
            x, y, self.u, self.frame, self.m0, self.inverse, self.d_den, given_C, given_n, C, n, self.cu, *strides,
            self.S, self.H, self.scale, DK=self.DK, DV=self.DV, SIGMOID=self.sigmoid, FORWARD=forward,
            HAS_STATE=given is not None, HAS_START=self.m0 is not None, PACKED=self.packed, BLOCK=block,
            BLOCK_K=tile.block_k, BLOCK_V=tile.block_v, ALIGN=align, PRECISION=self.precision,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    def rows_of(self, start: States | None, h: Tensor, den: Tensor) -> None:
        """Fills h and den."""
        tile, block = self.tiles.outputs, self.tiles.chunk
        align, strides = strides_of(self.q, self.k, self.v, h)
        start_C, start_n = start or (None, None)
        quadratic_outputs_kernel[(self.num_slots(block) * self.H * -(-self.DV // tile.block_v),)](
            self.q, self.k, self.v, self.u, self.frame, self.floor, self.m0, start_C, start_n, h, den, self.cu,
            self.slots(block), *strides, self.S, self.H, self.scale, DK=self.DK, DV=self.DV, SIGMOID=self.sigmoid,
            HAS_START=self.m0 is not None, HAS_STATE=start is not None, PACKED=self.packed, BLOCK=block,
            BLOCK_K=tile.block_k, BLOCK_V=tile.block_v, ALIGN=align, TENSOR_CORES=self.tensor_cores,
            PRECISION=self.precision, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    def gradients(
        self,
        dh: Tensor,
        start: States | None,
        end: States | None,
        grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        own: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        """Fills dq, dk, dv, di and df; `own` are the gradients of i and f through m."""
        dq, dk, dv, di, df = grads
        q_part, start_part = self._q_gradients(dh, start, dq)
        sums, end_part, between = self._k_v_gradients(dh, end, dk, dv)
        across = None
        if start is not None and end is not None:
            across = self._carried(start, end)
        passing = self._passing(between, start_part, end_part, across)
        self.gate_gradients(sums, q_part, passing, own, di, df)

    def _q_gradients(self, dh: Tensor, start: States | None, dq: Tensor) -> tuple[Tensor, Tensor | None]:
        """Fills dq. Returns q . the parts of dq from before each block, per K tile, and from the initial state."""
        tile, block = self.tiles.q_gradients, self.tiles.chunk_backward
        align, strides = strides_of(self.q, self.k, self.v, dh, dq)
        sheets = -(-self.DK // tile.block_k)
        q_part = self.q.new_empty((sheets, self.num_tokens), dtype=torch.float32)
        start_part = None if start is None else torch.empty_like(q_part)
        start_C, start_n = start or (None, None)
        quadratic_q_gradients_kernel[(self.num_slots(block) * self.H * sheets,)](
            self.q, self.k, self.v, dh, self.u, self.frame, self.m0, self.inverse, self.d_den, start_C, start_n, dq,
            q_part, start_part, self.cu, self.slots(block), *strides, self.S, self.H, self.scale, self.num_tokens,
            DK=self.DK, DV=self.DV, SIGMOID=self.sigmoid, HAS_START=self.m0 is not None, HAS_STATE=start is not None,
            PACKED=self.packed, BLOCK=block, BLOCK_K=tile.block_k, BLOCK_V=tile.block_v, ALIGN=align,
            TENSOR_CORES=self.tensor_cores, PRECISION=self.precision, num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip
        return q_part, None if start_part is None else start_part.sum(0)

    def _k_v_gradients(
        self, dh: Tensor, end: States | None, dk: Tensor, dv: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None, Tensor]:
        """Fills dk and dv. Returns sums of dD per token, k . the part of dk from the end, and sums of whole tiles."""
        tile, block = self.tiles.k_v_gradients, self.tiles.chunk_backward
        align, strides = strides_of(self.q, self.k, self.v, dh, dk, dv)
        sheets = max(-(-self.DK // tile.block_k), -(-self.DV // tile.block_v))
        row_sum = self.q.new_empty(
            (1, self.num_tokens), dtype=torch.float32
        )  # with a leading dimension for gate_gradients
        column_sum, k_own, k_part = (self.per_token() for _ in range(3))
        end_part = None if end is None else self.q.new_empty((sheets, self.num_tokens), dtype=torch.float32)
        num_blocks = -(-self.S // block)
        between = self.q.new_empty((self.num_slots(block) * self.H, num_blocks), dtype=torch.float64)
        end_dC, end_dn = end or (None, None)
        quadratic_k_v_gradients_kernel[(self.num_slots(block) * self.H * sheets,)](
            self.q, self.k, self.v, dh, self.u, self.frame, self.inverse, self.d_den, end_dC, end_dn, dk, dv, row_sum,
            column_sum, k_own, k_part, end_part, between, self.cu, self.slots(block), *strides, self.S, self.H,
            self.scale, self.num_tokens, num_blocks, DK=self.DK, DV=self.DV, SIGMOID=self.sigmoid,
            HAS_END=end is not None, PACKED=self.packed, BLOCK=block, BLOCK_K=tile.block_k, BLOCK_V=tile.block_v,
            INNER=min(tile.block_k, tile.block_v, 64), TILES=sheets, ALIGN=align, TENSOR_CORES=self.tensor_cores,
            PRECISION=self.precision, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        if end_part is None:
            return (row_sum, column_sum, k_own, k_part), None, between
        from_end = end_part.sum(0)
        return (row_sum, column_sum, k_own, k_part + from_end.view_as(k_part)), from_end, between

    def _carried(self, start: States, end: States) -> Tensor:
        """<the initial state carried to the end, the gradient of the final state>, float64 (N, H)."""
        first = torch.zeros(self.N, self.H, dtype=torch.float64, device=self.q.device)
        if self.m0 is not None:
            first = self.m0.double() / torch.log(torch.tensor(2.0, dtype=torch.float64, device=self.q.device))
        if self.cu is None:
            last = self.frame[:, :, -1]
        else:
            last = self.frame[0].t()[(self.cu[1:].long() - 1).clamp(min=0)]
            last = torch.where((self.cu[1:] > self.cu[:-1])[:, None], last, first)
        both = (start[0].double() * end[0]).sum((-2, -1))
        if not self.sigmoid:
            both = both + (start[1].double() * end[1]).sum(-1)
        return both * torch.exp2(first - last)

    def _passing(
        self, between: Tensor, start_part: Tensor | None, end_part: Tensor | None, across: Tensor | None
    ) -> Tensor:
        block = self.tiles.chunk_backward
        passing = self.q.new_empty((between.shape[0], 1), dtype=torch.float64)
        passing_kernel[(between.shape[0],)](
            between, start_part, end_part, across, passing, self.cu, self.slots(block), self.S, self.H,
            between.shape[1], HAS_STATE=start_part is not None, HAS_END=end_part is not None, PACKED=self.packed,
            BLOCK=block, STEP=_STEP, num_warps=1,
        )  # fmt: skip
        return passing


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    C0: Tensor | None,
    n0: Tensor | None,
    m0: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int | None,
    gate: str,
    *,
    tensor_cores: bool = False,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The outputs and the final state, with arguments and results as in chunkwise_triton's `forward`.

    Args:
        tensor_cores: multiplies fp16 and bf16 on tensor cores. fp32 always uses CUDA cores, without rounding.
        tiles: launch parameters instead of the default ones for this head and dtype.

    Raises:
        ShapeError: float64.
    """
    if q.dtype == torch.float64:
        raise ShapeError("q is torch.float64, which the Triton kernels do not support: use variant='quadratic'.")
    tiles = tiles or pick_quadratic(q.shape[-1], v.shape[-1], q.dtype, tensor_cores=tensor_cores)
    launch = _Launch(q, k, v, i, f, m0, cu_seqlens, gate, tiles, tensor_cores=tensor_cores)
    h = v.new_empty(v.shape)
    C, n, m = launch.new_state()
    den, nothing, states = empty_saved(q, v, cu_seqlens, chunk, gate)
    if not launch.num_heads or not launch.num_tokens:
        copy_state((C, n, m), (C0, n0, m0))
        return h, C, n, m, den, nothing, states
    start = as_states(C0, n0)
    with torch.cuda.device_of(q):
        launch.gates(m)
        launch.end_state(start, C, n)
        launch.rows_of(start, h, den)
    if launch.sigmoid:
        n.zero_()
    return h, C, n, m, den, nothing, states


def empty_saved(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int | None, gate: str
) -> tuple[Tensor, Tensor, Tensor]:
    """An uninitialized tensor like den from `forward`, and two empty ones."""
    B, H, S, _ = q.shape
    sizes = (B, H, 0 if gate == "sigmoid" else S), (0,), (0,)
    den, nothing, states = (q.new_empty(size, dtype=torch.float32) for size in sizes)
    return den, nothing, states


def backward(
    dh: Tensor,
    dC: Tensor | None,
    dn: Tensor | None,
    dm: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    C0: Tensor | None,
    n0: Tensor | None,
    m0: Tensor | None,
    cu_seqlens: Tensor | None,
    h: Tensor,
    den: Tensor,
    nothing: Tensor,
    states: Tensor,
    C: Tensor,
    n: Tensor,
    m: Tensor,
    chunk: int | None,
    gate: str,
    *,
    tensor_cores: bool = False,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, i, f and the initial state, as in chunkwise_triton's `backward`."""
    tiles = tiles or pick_quadratic(q.shape[-1], v.shape[-1], q.dtype, tensor_cores=tensor_cores)
    launch = _Launch(q, k, v, i, f, m0, cu_seqlens, gate, tiles, tensor_cores=tensor_cores)
    dh, h = rows(dh), rows(h)
    dq, dk, dv, di, df = (x.new_empty(x.shape) for x in (q, k, v, i, f))
    end = end_gradients(dC, None if launch.sigmoid else dn, C, n)
    own = None if launch.sigmoid else gradients_along_maximum(end, dm, (C, n, m), i, f, m0, cu_seqlens)
    start = empty_start_gradients(C0, C, n)
    if not launch.num_heads or not launch.num_tokens:
        if start is not None:
            copy_state(start, end or (None, None))
    else:
        with torch.cuda.device_of(q):
            launch.gates(None)
            launch.denominator(h, dh, den)
            if start is not None:
                launch.start_gradients(dh, end, *start)
            launch.gradients(dh, as_states(C0, n0), end, (dq, dk, dv, di, df), own)
    return dq, dk, dv, di, df, *start_gradients(start, (C0, n0, m0), own, sigmoid=launch.sigmoid)
