"""The chunkwise mLSTM in Triton: the sequence of kernels in forward and backward, their grids and buffers.

Forward:  gates -> states at the start of each chunk -> outputs, all chunks at once.
Backward: gates -> recomputed states, from the saved ones -> 1 / N and the gradient of den -> gradients of the states
          -> dq, and dk with dv, all chunks at once -> di and df.
Lower bounds of the forward pass, for T tokens times heads in chunks of L, in bf16: 4 d_qk d_v + L (2 d_qk + d_v)
operations per token; reads of k and v for the states, reads of q, k, v and writes of h for the outputs, and writes and
reads of d_qk d_v / L state elements per token. On an H200 (4.3 TB/s, about 700 TFLOP/s), T = 2^20, d_qk 128, d_v 256,
L 128: 0.8 ms by memory, 0.3 ms by tensor cores. Backward moves about three times as many bytes: states again, their
gradients, and twice q, k, v, dh. Longer chunks need fewer bytes and more operations.
Saved for backward besides inputs and output: den, one number per token, and one state per group of chunks. The states
of single chunks exist within one pass only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchstorm.kernels.mlstm.boundary_states import (
    copy_state,
    empty_start_gradients,
    end_gradients,
    gradients_along_maximum,
    start_gradients,
)
from torchstorm.kernels.mlstm.launch_triton import Launch, num_kept, rows, state_dtype
from torchstorm.kernels.mlstm.tiles import Tiles, group_tokens, pick


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
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The outputs and the final state.

    Args:
        q, k: (B, H, S, d_qk). v: (B, H, S, d_v). i, f: (B, H, S). fp32, fp16 or bf16, all with the same dtype.
        C0, n0, m0: the initial state, one per sequence; None for an empty one.
        cu_seqlens: (N + 1) offsets of packed sequences, with B = 1; None for B sequences of S tokens.
        chunk: maximum tokens per chunk, a power of two from 16 to 256; None chooses by the head's size.
        gate: "exp" or "sigmoid".
        tiles: launch parameters instead of the default ones for this head and dtype.

    Returns:
        h (B, H, S, d_v) in v's dtype; C, n, m in fp32; and for backward den (B, H, S) in fp32, with 0 tokens for
        sigmoid gates; an empty tensor; and the saved states as a flat tensor.
    """
    launch = Launch(q, k, v, i, f, m0, cu_seqlens, gate, tiles or _pick(q, v, cu_seqlens, chunk))
    h = v.new_empty(v.shape)
    C, n, m = launch.new_state()
    den, nothing, states = _empty_saved(q, v, cu_seqlens, gate, launch.group)
    if not launch.num_heads or not launch.num_tokens:
        copy_state((C, n, m), (C0, n0, m0))
        return h, C, n, m, den, nothing, states
    with torch.cuda.device_of(q):
        launch.gates(m)
        chunks = launch.states(start=(C0, n0), end=(C, n))
        launch.outputs(chunks, h, den)
        launch.keep(chunks, states)
    if launch.sigmoid:
        n.zero_()
    return h, C, n, m, den, nothing, states


def empty_saved(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int | None, gate: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized tensors like den, the empty tensor and the states from `forward`."""
    return _empty_saved(q, v, cu_seqlens, gate, group_tokens(q.shape[-1], v.shape[-1]))


def _empty_saved(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, gate: str, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    B, H, S, d_qk = q.shape
    den, nothing = (q.new_empty(size, dtype=torch.float32) for size in ((B, H, 0 if gate == "sigmoid" else S), (0,)))
    num_packed = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    num = num_kept(B, H, S, num_packed, group, d_qk, v.shape[-1], q.dtype, gate)
    return den, nothing, q.new_empty(num, dtype=state_dtype(q.dtype))


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
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, i, f and the initial state (None if there was none).

    Args:
        dh, dC, dn, dm: gradients of h and of the final state; None for zeros.
        the others: the arguments and results of `forward`.
    """
    launch = Launch(q, k, v, i, f, m0, cu_seqlens, gate, tiles or _pick(q, v, cu_seqlens, chunk))
    dh, h = rows(dh), rows(h)
    dq, dk, dv, di, df = (x.new_empty(x.shape) for x in (q, k, v, i, f))
    end = end_gradients(dC, dn, C, n)
    own = None if launch.sigmoid else gradients_along_maximum(end, dm, (C, n, m), i, f, m0, cu_seqlens)
    start = empty_start_gradients(C0, C, n)
    if not launch.num_heads or not launch.num_tokens:
        if start is not None:
            copy_state(start, end or (None, None))
    else:
        with torch.cuda.device_of(q):
            launch.gates(None)
            launch.denominator(h, dh, den)
            before = launch.states_again(states)
            after, passing = launch.state_gradients(dh, before, end, start)
            q_part = launch.q_gradients(dh, before, dq)
            del before
            sums = launch.k_v_gradients(dh, after, dk, dv)
            launch.gate_gradients(sums, q_part, passing, own, di, df)
    return dq, dk, dv, di, df, *start_gradients(start, (C0, n0, m0), own, sigmoid=launch.sigmoid)


def _pick(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int | None) -> Tiles:
    num_sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return pick(q.shape[-1], v.shape[-1], q.dtype, chunk, num_sequences * q.shape[1])
