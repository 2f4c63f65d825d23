"""The elementwise operations on fp32 values in Triton. Kernels take one of these functions as OP.

Forward functions take x, or a and b. Gradient functions take dy and x. `mul_gradients` takes dy, a, b and returns both
gradients. All propagate NaN.

A GPU that reads and writes bf16 at full speed has time for about 27 instructions per element. erf of Triton's library
alone takes as many. For results in fp16 and bf16 a polynomial is accurate enough: functions named `_half`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def exp(x):
    """e^x by one multiplication and one instruction, which takes subnormal numbers as 0; Triton's own takes five."""
    if _INTERPRETED:
        return tl.exp(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def reciprocal(x):
    """1 / x by one instruction, to the last bit but one; 0 above 2^126. Triton's division takes seven."""
    if _INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def mul(a, b):
    return a * b


@triton.jit
def mul_gradients(dy, a, b):
    return dy * b, dy * a


@triton.jit
def identity(x):
    return x


@triton.jit
def relu(x):
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def relu_gradient(dy, x):
    return tl.where(x <= 0.0, 0.0, dy)


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + exp(-x))


@triton.jit
def sigmoid_gradient(dy, x):
    s = sigmoid(x)
    return dy * s * (1.0 - s)


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def silu_gradient(dy, x):
    s = sigmoid(x)
    return dy * s * (1.0 + x * (1.0 - s))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def gelu_gradient(dy, x):
    share = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
    return dy * (share + x * 0.3989422804014327 * exp(-0.5 * x * x))


@triton.jit
def _share(x):
    """(1 + erf(x / sqrt 2)) / 2 and e^(-x^2 / 2): off by 8e-8 at most (Abramowitz and Stegun, 7.1.26)."""
    t = reciprocal(1.0 + 0.231641888 * tl.abs(x))  # 0.3275911 / sqrt 2
    bell = exp(-0.5 * x * x)
    tail = 0.5307027145 * t - 0.7265760135
    tail = tail * t + 0.7107068705
    tail = tail * t - 0.142248368
    tail = (tail * t + 0.127414796) * t * bell
    return tl.where(x < 0.0, tail, 1.0 - tail), bell


@triton.jit
def gelu_half(x):
    share, _ = _share(x)
    return x * share


@triton.jit
def gelu_gradient_half(dy, x):
    share, bell = _share(x)
    return dy * (share + x * 0.3989422804014327 * bell)


@triton.jit
def gelu_tanh(x):
    return x * sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))  # of 2 u; see operations.py


@triton.jit
def gelu_tanh_gradient(dy, x):
    near = tl.minimum(tl.maximum(x, -100.0), 100.0)  # where x^2 is far from overflow
    square = near * near
    # s (1 - s) from e^-|2 u|: 1 - s of an s near 1 is all rounding, and is multiplied by up to x^3.
    small = exp(-tl.abs(1.5957691216057308 * near * (1.0 + 0.044715 * square)))
    large = reciprocal(1.0 + small)
    less = small * large
    first = 1.5957691216057308 + 0.2140644488 * square  # 3 * 0.044715 * 1.595...
    return dy * (tl.where(x < 0.0, less, large) + x * (less * large) * first)


FORWARD = {"relu": relu, "sigmoid": sigmoid, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}
"""Functions by name of the operation: for fp32, and in HALF_... those for fp16 and bf16 if they differ."""
BACKWARD = {
    "relu": relu_gradient,
    "sigmoid": sigmoid_gradient,
    "gelu": gelu_gradient,
    "gelu_tanh": gelu_tanh_gradient,
    "silu": silu_gradient,
}
HALF_FORWARD = FORWARD | {"gelu": gelu_half}
HALF_BACKWARD = BACKWARD | {"gelu": gelu_gradient_half}
