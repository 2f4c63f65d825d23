"""Activations and their derivatives of fp32 tiles, as Triton functions; ACTIVATION "" is none."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gelu_tanh_share(z):
    # 0.5 (1 + tanh(u)) is sigmoid(2 u), which neither overflows nor cancels.
    return tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # NaN stays
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(0.7071067811865476 * z))
    elif ACTIVATION == "gelu_tanh":
        z = z * _gelu_tanh_share(z)
    elif ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    return z


@triton.jit
def activation_gradient(dy, kept, ACTIVATION: tl.constexpr):
    """dy act'(z); kept is z, or y for ReLU."""
    if ACTIVATION == "relu":
        dy = tl.where(kept <= 0, 0.0, dy)
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(0.7071067811865476 * kept))
        dy = dy * (share + kept * 0.3989422804014327 * tl.exp(-0.5 * kept * kept))
    elif ACTIVATION == "gelu_tanh":
        share = _gelu_tanh_share(kept)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * kept * kept)
        dy = dy * (share + kept * share * (1.0 - share) * slope)
    elif ACTIVATION == "silu":
        share = tl.sigmoid(kept)
        dy = dy * (share * (1.0 + kept * (1.0 - share)))
    return dy
