"""How long an operation takes on a GPU that is not here: the longer of computing and of moving its bytes.

Source of the model: Williams, Waterman, Patterson 2009, "Roofline: an insightful visual performance model".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from torchstorm.plan.machine import Machine

_HALF = (torch.float16, torch.bfloat16)
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")
# They read of their first argument no more than they give.
_PICKS = frozenset({"embedding", "gather", "index", "index_select", "nll_loss_forward", "nll_loss2d_forward", "take"})
# Of ours, with a kernel after the other for each token, and how many: every one of them waits for those before.
_KERNELS_A_TOKEN = {"slstm_fwd": 8, "slstm_bwd": 7}
# Of ours, with the place of the layer's input among their tensors; its weight comes next.
_HEADS = {"linear_cross_entropy_forward": 0, "linear_cross_entropy_backward": 1}
# They write, and read nothing.
_FILLS = frozenset({"fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_"})


def op_seconds(
    machine: Machine,
    func: Any,
    args: Sequence[Any],
    out: Any,
    *,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> float:
    """Seconds of one operation on the GPU.

    Args:
        machine: its rates.
        func: the operator, as it was dispatched.
        args: its arguments.
        out: what it gave.
        inputs: the tensors among its arguments.
        outputs: the tensors that it wrote.
    """
    name = base_name(func)
    if is_attention(name):
        compute_s = _attention_seconds(machine, name, args, inputs)
    else:
        compute_s = _matmul_seconds(machine, func, args, out, _factor_dtype(inputs))
    num_kernels = 1
    if name in _KERNELS_A_TOKEN:
        num_kernels = _KERNELS_A_TOKEN[name] * args[0].shape[1]
    return num_kernels * machine.kernel_s + max(
        compute_s, _bytes_moved(name, inputs, outputs) / machine.memory_bytes_per_s
    )


def scratch_bytes(func: Any, inputs: Sequence[torch.Tensor]) -> int:
    """Bytes that an operation allocates besides its outputs, as far as they count."""
    name = base_name(func)
    if is_attention(name) and name.endswith("_backward"):
        # The gradient of the queries is summed in float32, and so is a row sum for each query.
        query = inputs[1]
        return query.numel() * 4 + query.numel() // max(1, query.shape[-1]) * 4
    if name in _HEADS:
        return _head_bytes(*inputs[_HEADS[name] :][:2])
    return 0


def _head_bytes(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Of a last layer with its loss: the logits of some tokens, and what `kernels.linear_cross_entropy` puts beside."""
    (N, K), V, size = x.shape, weight.shape[0], x.element_size()
    rows = min(4096, max(1024, -(-N // 8 // 128) * 128))
    rows = max(1, min(N, max(rows, (64 << 20) // (V * size))))
    logits = rows * -(-V // 64) * 64 * size
    filled_up = 0 if V * size % 16 == 0 == K * size % 16 else weight.nbytes
    sums = 4 * rows * K if x.dtype in _HALF else 0
    is_wide = x.dtype in _HALF and (x.dtype == torch.float16 or V * K < 1 << 24 or 16 * rows < N)
    return logits + filled_up + sums + (4 * V * K if is_wide else 0)


def base_name(func: Any) -> str:
    """ "aten::addmm" -> "addmm"."""
    return str(func._schema.name.split("::")[1])


def is_attention(name: str) -> bool:
    """Whether an operator is a fused attention, forward or backward."""
    return name.startswith(_ATTENTION)


def _attention_seconds(machine: Machine, name: str, args: Sequence[Any], inputs: Sequence[torch.Tensor]) -> float:
    backward = name.endswith("_backward")
    query, key, value = inputs[1:4] if backward else inputs[:3]
    batch, heads, rows, width = query.shape
    columns = key.shape[-2]
    flops = 2.0 * batch * heads * rows * columns * (width + value.shape[-1])
    if rows == columns and _is_causal(name, args):
        flops /= 2
    rate = machine.attention_flops or machine.half_flops
    if backward:  # five products instead of two
        flops *= 2.5
        rate = machine.attention_backward_flops or rate
    if query.dtype not in _HALF and machine.tf32_flops:
        rate *= machine.tf32_flops / machine.half_flops
    return flops / rate


def _is_causal(name: str, args: Sequence[Any]) -> bool:
    schema = getattr(torch.ops.aten, name).default._schema
    place = next((index for index, arg in enumerate(schema.arguments) if arg.name == "is_causal"), None)
    return place is not None and place < len(args) and bool(args[place])


def _matmul_seconds(machine: Machine, func: Any, args: Sequence[Any], out: Any, dtype: torch.dtype) -> float:
    count = flop_registry.get(func.overloadpacket)
    if base_name(func) == "_grouped_mm":  # rows (M, K), each with the matrix (K, N) of its group
        flops = float(2 * args[0].numel() * args[1].shape[-1])
    elif count is not None:
        flops = float(count(*args, out_val=out))
    else:
        return 0.0
    rate = machine.fp32_flops
    is_convolution = "conv" in base_name(func)
    if dtype in _HALF:
        rate = machine.half_flops
    elif torch.backends.cudnn.allow_tf32 if is_convolution else torch.backends.cuda.matmul.allow_tf32:
        rate = machine.tf32_flops
    return flops / (rate or machine.half_flops)


def _factor_dtype(inputs: Sequence[torch.Tensor]) -> torch.dtype:
    """Of what is multiplied: the shortest one, as sums and gates may be in more digits."""
    dtypes = [tensor.dtype for tensor in inputs if tensor.dtype.is_floating_point]
    return min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _bytes_moved(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    written = sum(tensor.nbytes for tensor in outputs)
    if name in _FILLS:
        return written
    reads = [min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in inputs]
    if name in _PICKS and reads:
        reads[0] = min(reads[0], written)
    return written + sum(reads)
