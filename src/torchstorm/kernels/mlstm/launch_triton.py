"""A call of the mLSTM's Triton kernels: sizes, buffers and grids, with one method per kernel."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import torch
from torch import Tensor

from torchstorm.kernels.mlstm.boundary_states import States, as_states
from torchstorm.kernels.mlstm.gates_triton import gate_gradients_kernel, gates_kernel
from torchstorm.kernels.mlstm.gradients_triton import denominator_kernel, k_v_gradients_kernel, q_gradients_kernel
from torchstorm.kernels.mlstm.outputs_triton import outputs_kernel
from torchstorm.kernels.mlstm.states_triton import state_gradients_kernel, states_kernel
from torchstorm.kernels.mlstm.tiles import Tile, Tiles, tile_size

_GATE_BLOCK = 1024
_DENOMINATOR_ROWS = 32


class Launch:
    """The shared state of one call's kernels.

    Attributes:
        u, frame, floor: results of `gates`: u and M in float64, e^-m in fp32, each (B, H, S).
        inverse, d_den: results of `denominator`: 1 / N and the gradient of den, fp32 (B, H, S).
    """

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
    ) -> None:
        self.q, self.k, self.v = (rows(x) for x in (q, k, v))
        self.i, self.f = i.contiguous(), f.contiguous()
        self.B, self.H, self.S, self.DK = q.shape
        self.DV = v.shape[-1]
        self.cu = cu_seqlens
        self.packed = cu_seqlens is not None
        self.N = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.num_heads = self.N * self.H
        self.num_tokens = self.B * self.H * self.S
        self.sigmoid = gate == "sigmoid"
        self.m0 = None if self.sigmoid or m0 is None else m0.float().contiguous()
        self.scale = self.DK**-0.5
        self.tiles = tiles
        self.group = tiles.group
        self.state_dtype = state_dtype(q.dtype)
        self.precision = "ieee" if q.dtype == torch.float32 else "tf32"
        self._slots: dict[int, Tensor] = {}
        self.u = self.frame = self.floor = self.inverse = self.d_den = self.i

    def num_slots(self, span: int) -> int:
        return num_slots(self.B, self.S, self.N if self.packed else None, span)

    def slots(self, span: int) -> Tensor | None:
        """The sequence of each slot; None if it follows from the slot's number."""
        if self.cu is None:
            return None
        if span not in self._slots:
            self._slots[span] = self._sequences(self.cu, span)
        return self._slots[span]

    def _sequences(self, cu: Tensor, span: int) -> Tensor:
        first = cu[:-1] // span + torch.arange(self.N, device=cu.device)
        slot = torch.arange(self.num_slots(span), device=cu.device)
        return (torch.searchsorted(first, slot, right=True) - 1).int()

    def per_token(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.q.new_empty((self.B, self.H, self.S), dtype=dtype)

    def new_state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Uninitialized C, n and m of each sequence."""
        sizes = ((self.DK, self.DV), (self.DK,), ())
        C, n, m = (self.q.new_empty((self.N, self.H, *size), dtype=torch.float32) for size in sizes)
        return C, n, m

    def new_chunk_states(self, chunk: int) -> States:
        """Uninitialized C and n for each chunk."""
        num = self.num_slots(chunk) * self.H
        C = self.q.new_empty((num, self.DK, self.DV), dtype=self.state_dtype)
        return C, self.q.new_empty((num, self.DK), dtype=torch.float32)

    def gates(self, m: Tensor | None) -> None:
        """Fills u, frame and floor, and m, if given, with m at the end of each sequence."""
        self.u, self.frame = self.per_token(torch.float64), self.per_token(torch.float64)
        self.floor = self.per_token()
        m_T = self.q.new_empty(self.num_heads, dtype=torch.float32) if m is None else m
        gates_kernel[(self.num_heads,)](
            self.i, self.f, self.m0, self.cu, self.u, self.frame, self.floor, m_T, self.S, self.H, SIGMOID=self.sigmoid,
            HAS_START=self.m0 is not None, PACKED=self.packed, BLOCK=_GATE_BLOCK, num_warps=8,
        )  # fmt: skip

    def states(self, *, start: tuple[Tensor | None, Tensor | None], end: States) -> States:
        """The states at the start of each chunk. Fills `end`."""
        return self._walk(self.tiles.states, self.tiles.chunk, as_states(*start), end, by_group=False)

    def states_again(self, kept: Tensor) -> States:
        """Recomputes the states of each chunk in backward, from the saved ones of each group."""
        start = self._of_groups(kept)
        return self._walk(self.tiles.states_backward, self.tiles.chunk_backward, start, None, by_group=True)

    def keep(self, chunks: States, kept: Tensor) -> None:
        """Fills `kept` with the states at each group of chunks."""
        ratio = self.group // self.tiles.chunk
        if not self.sigmoid and self.H * self.DK % 8:
            kept.zero_()  # a few elements are padding
        at = valid = None
        if self.cu is not None:
            begin, length = self.cu[:-1], self.cu.diff()
            sequence = self._sequences(self.cu, self.group)
            slot = torch.arange(self.num_slots(self.group), device=self.cu.device)
            group = slot - (begin // self.group)[sequence] - sequence
            valid = group * self.group < length[sequence]
            at = torch.where(valid, (begin // self.tiles.chunk)[sequence] + sequence + group * ratio, 0)
        for x, out in list(zip(chunks, self._of_groups(kept), strict=True))[: 1 if self.sigmoid else 2]:
            x = x.unflatten(0, (-1, self.H))
            if at is None or valid is None:
                out.unflatten(0, (self.B, -1)).copy_(x.unflatten(0, (self.B, -1))[:, ::ratio])
            else:
                out.copy_(x[at].masked_fill(~valid.view(-1, *[1] * (x.dim() - 1)), 0.0))

    def _of_groups(self, kept: Tensor) -> States:
        """C and n of each group, as views of the flat tensor. n is fp32, and missing for sigmoid gates."""
        num = self.num_slots(self.group)
        size = num * self.H * self.DK * self.DV
        n, C = kept.split([kept.numel() - size, size])
        C = C.view(num, self.H, self.DK, self.DV)
        if self.sigmoid:
            return C, C  # n is not read
        return C, n.view(torch.float32)[: num * self.H * self.DK].view(num, self.H, self.DK)

    def _walk(self, tile: Tile, chunk: int, start: States | None, end: States | None, *, by_group: bool) -> States:
        """The states at each chunk: whole sequences from `start`, or each group from its own start."""
        align, strides = strides_of(self.k, self.v)
        chunks = self.new_chunk_states(chunk)
        num_walks = self.num_slots(self.group) if by_group else self.N
        start_C, start_n = start or (None, None)
        end_C, end_n = end or (None, None)
        states_kernel[(num_walks * self.H * self._num_tiles(tile),)](
            self.k, self.v, self.u, self.frame, self.m0, start_C, start_n, *chunks, end_C, end_n, self.cu,
            self.slots(self.group) if by_group else None, *strides, self.S, self.H, DK=self.DK, DV=self.DV,
            SIGMOID=self.sigmoid, BY_GROUP=by_group, STORE_END=end is not None, HAS_STATE=start is not None,
            HAS_START=self.m0 is not None, PACKED=self.packed, CHUNK=chunk, GROUP=self.group, BLOCK_K=tile.block_k,
            BLOCK_V=tile.block_v, ALIGN=align, PRECISION=self.precision, **tile.options,
        )  # fmt: skip
        return chunks

    def outputs(self, chunks: States, h: Tensor, den: Tensor) -> None:
        """Fills h and den."""
        tile, chunk = self.tiles.outputs, self.tiles.chunk
        align, strides = strides_of(self.q, self.k, self.v, h)
        row_tiles = chunk // tile.rows
        outputs_kernel[(self.num_slots(chunk) * self.H * row_tiles * -(-self.DV // tile.block_v),)](
            self.q, self.k, self.v, self.u, self.frame, self.floor, self.m0, *chunks, h, den, self.cu,
            self.slots(chunk), *strides, self.S, self.H, self.scale, DK=self.DK, DV=self.DV, SIGMOID=self.sigmoid,
            HAS_START=self.m0 is not None, PACKED=self.packed, CHUNK=chunk, ROWS=tile.rows, BLOCK_K=tile.block_k,
            BLOCK_V=tile.block_v, ALIGN=align, PRECISION=self.precision, **tile.options,
        )  # fmt: skip

    def denominator(self, h: Tensor, dh: Tensor, den: Tensor) -> None:
        """Fills inverse and d_den."""
        if self.sigmoid:
            return
        self.inverse, self.d_den = self.per_token(), self.per_token()
        align, strides = strides_of(h, dh)
        block = min(128, tile_size(self.DV))
        denominator_kernel[(self.B * self.H * -(-self.S // _DENOMINATOR_ROWS),)](
            h, dh, den, self.floor, self.inverse, self.d_den, *strides, self.S, self.H, DV=self.DV,
            ROWS=_DENOMINATOR_ROWS, BLOCK_V=block, ALIGN=align, num_warps=4,
        )  # fmt: skip

    def state_gradients(
        self, dh: Tensor, before: States, end: States | None, start: States | None
    ) -> tuple[States, Tensor]:
        """Gradients of the state after each chunk, and the terms that pass over each chunk. Fills `start`."""
        tile, chunk = self.tiles.state_gradients, self.tiles.chunk_backward
        align, strides = strides_of(self.q, dh)
        after = self.new_chunk_states(chunk)
        passing = self.q.new_empty((after[0].shape[0], self._num_tiles(tile)), dtype=torch.float64)
        end_dC, end_dn = end or (None, None)
        start_dC, start_dn = start or (None, None)
        state_gradients_kernel[(self.num_heads * self._num_tiles(tile),)](
            self.q, dh, self.inverse, self.d_den, self.frame, self.m0, end_dC, end_dn, *before, *after, start_dC,
            start_dn, passing, self.cu, *strides, self.S, self.H, self.scale, DK=self.DK, DV=self.DV,
            SIGMOID=self.sigmoid, HAS_END=end is not None, STORE_START=start is not None,
            HAS_START=self.m0 is not None, PACKED=self.packed, CHUNK=chunk, BLOCK_K=tile.block_k, BLOCK_V=tile.block_v,
            ALIGN=align, PRECISION=self.precision, **tile.options,
        )  # fmt: skip
        return after, passing

    def q_gradients(self, dh: Tensor, before: States, dq: Tensor) -> Tensor:
        """Fills dq. Returns q . its part from the state before, (B, H, S) per K tile."""
        tile, chunk = self.tiles.q_gradients, self.tiles.chunk_backward
        align, strides = strides_of(self.q, self.k, self.v, dh, dq)
        tiles_k = -(-self.DK // tile.block_k)
        part = self.q.new_empty((tiles_k, self.num_tokens), dtype=torch.float32)
        tile_rows = tile.rows or chunk
        q_gradients_kernel[(self.num_slots(chunk) * self.H * (chunk // tile_rows) * tiles_k,)](
            self.q, self.k, self.v, dh, self.u, self.frame, self.m0, self.inverse, self.d_den, *before, dq, part,
            self.cu, self.slots(chunk), *strides, self.S, self.H, self.scale, self.num_tokens, DK=self.DK, DV=self.DV,
            SIGMOID=self.sigmoid, HAS_START=self.m0 is not None, PACKED=self.packed, CHUNK=chunk, ROWS=tile_rows,
            BLOCK_K=tile.block_k, BLOCK_V=tile.block_v, ALIGN=align, PRECISION=self.precision,
            **tile.options,
        )  # fmt: skip
        return part

    def k_v_gradients(self, dh: Tensor, after: States, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fills dk and dv. Returns the inputs of `gate_gradients`."""
        tile, chunk = self.tiles.k_v_gradients, self.tiles.chunk_backward
        align, strides = strides_of(self.q, self.k, self.v, dh, dk, dv)
        tile_rows = tile.rows or chunk
        num_tiles = chunk // tile_rows
        row_sum = self.q.new_empty((num_tiles, self.num_tokens), dtype=torch.float32)
        column_sum, own, part = (self.per_token() for _ in range(3))
        k_v_gradients_kernel[(self.num_slots(chunk) * self.H * num_tiles,)](
            self.q, self.k, self.v, dh, self.u, self.frame, self.inverse, self.d_den, *after, dk, dv, row_sum,
            column_sum, own, part, self.cu, self.slots(chunk), *strides, self.S, self.H, self.scale, self.num_tokens,
            DK=self.DK, DV=self.DV, SIGMOID=self.sigmoid, PACKED=self.packed, CHUNK=chunk, ROWS=tile_rows,
            BLOCK_K=tile.block_k, BLOCK_V=tile.block_v, ALIGN=align, PRECISION=self.precision,
            **tile.options,
        )  # fmt: skip
        return row_sum, column_sum, own, part

    def gate_gradients(
        self,
        sums: tuple[Tensor, Tensor, Tensor, Tensor],
        q_part: Tensor,
        passing: Tensor,
        own: tuple[Tensor, Tensor, Tensor] | None,
        di: Tensor,
        df: Tensor,
    ) -> None:
        """Fills di and df. `own` are the gradients of i and f through m."""
        chunk = self.tiles.chunk_backward
        own_i, own_f = (None, None) if own is None else (own[0].contiguous(), own[1].contiguous())
        gate_gradients_kernel[(self.num_slots(chunk) * self.H,)](
            self.i, self.f, *sums[:3], q_part, sums[3], passing, own_i, own_f, self.cu, self.slots(chunk),
            di, df, self.S, self.H, self.num_tokens, sums[0].shape[0], q_part.shape[0],
            passing.shape[1], SIGMOID=self.sigmoid,
            HAS_OWN=own is not None, PACKED=self.packed, CHUNK=chunk, num_warps=1 if chunk <= 64 else 4,
        )  # fmt: skip

    def _num_tiles(self, tile: Tile) -> int:
        return -(-self.DK // tile.block_k) * -(-self.DV // tile.block_v)


def num_slots(B: int, S: int, num_packed: int | None, span: int) -> int:
    """Upper bound for the number of spans of `span` tokens, for any lengths of packed sequences."""
    return B * -(-S // span) if num_packed is None else S // span + num_packed


def num_kept(
    B: int, H: int, S: int, num_packed: int | None, group: int, d_qk: int, d_v: int, dtype: torch.dtype, gate: str
) -> int:
    """Number of elements of type `state_dtype` in the states saved for backward."""
    slots = num_slots(B, S, num_packed, group)
    num_n = 0 if gate == "sigmoid" else -(-slots * H * d_qk // 8) * 8  # aligns C to 16 bytes
    return slots * H * d_qk * d_v + num_n * (torch.float32.itemsize // state_dtype(dtype).itemsize)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of the states: bf16 for bf16; fp32 also for fp16, in which sums may overflow."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def rows(x: Tensor) -> Tensor:
    """x with its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides_of(*tensors: Tensor) -> tuple[int, list[int]]:
    """The tensors' strides over B, H and S in units of `align` elements: 8 where all are multiples of it, else 1.

    A kernel multiplies them by `align`. So the compiler knows that rows can be read 16 bytes at a time, and other
    strides need no recompilation.
    """
    strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    align = 1 if any(stride % 8 for stride in strides) else 8
    return align, [stride // align for stride in strides]
