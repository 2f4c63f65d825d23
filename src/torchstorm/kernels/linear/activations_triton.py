"""Activations and their derivatives for fp32 tiles, by name. ACTIVATION is "" for none. HALF: results are fp16 or
bf16."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from torchstorm.kernels.elementwise import operations_triton as operations


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, HALF: tl.constexpr):
    if ACTIVATION == "relu":
        z = operations.relu(z)
    elif ACTIVATION == "gelu" and HALF:
        z = operations.gelu_half(z)
    elif ACTIVATION == "gelu":
        z = operations.gelu(z)
    elif ACTIVATION == "gelu_tanh":
        z = operations.gelu_tanh(z)
    elif ACTIVATION == "silu":
        z = operations.silu(z)
    return z


@triton.jit
def activation_gradient(dy, kept, ACTIVATION: tl.constexpr, HALF: tl.constexpr):
    """dy act'(z); kept is z, or y for ReLU."""
    if ACTIVATION == "relu":
        dy = operations.relu_gradient(dy, kept)
    elif ACTIVATION == "gelu" and HALF:
        dy = operations.gelu_gradient_half(dy, kept)
    elif ACTIVATION == "gelu":
        dy = operations.gelu_gradient(dy, kept)
    elif ACTIVATION == "gelu_tanh":
        dy = operations.gelu_tanh_gradient(dy, kept)
    elif ACTIVATION == "silu":
        dy = operations.silu_gradient(dy, kept)
    return dy
