"""CUDA C++ that runs a row of pointwise operations in one kernel, and gives the bits that PyTorch's kernels give one
after another: each result is rounded to its own dtype before the next operation reads it, and no product is contracted
with a sum of another operation.

The formulas are those of PyTorch's kernels (aten/src/ATen/native/cuda), which compute in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

C_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
"""The dtypes of operands and results."""
KERNEL = "torchstorm_pointwise"
THREADS = 256
NEGATIVE_PRODUCT = "negative_product"
"""The product of two operands taken from zero, rounded once. No operation of PyTorch's is called so."""

_EXPONENTS = {2.0: "square", 3.0: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
_OF_ONE = {
    "abs": "fabsf({0})",
    "cos": "cosf({0})",
    "convert": "{0}",
    "exp": "expf({0})",
    "gelu": "__fmul_rn(__fmul_rn({0}, 0.5f), __fadd_rn(1.0f, erff(__fmul_rn({0}, 0.70710678118654752f))))",
    "gelu_tanh": "gelu_tanh({0})",
    "neg": "-({0})",
    "reciprocal": "__fdiv_rn(1.0f, {0})",
    "rsqrt": "rsqrtf({0})",
    "sigmoid": "__fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-({0}))))",
    "silu": "__fdiv_rn({0}, __fadd_rn(1.0f, expf(-({0}))))",
    "sin": "sinf({0})",
    "sqrt": "__fsqrt_rn({0})",
    "square": "__fmul_rn({0}, {0})",
    "cube": "__fmul_rn(rounded<{T}>(__fmul_rn({0}, {0})), {0})",
    "tanh": "tanhf({0})",
}
_OF_TWO = {
    "add": "__fadd_rn({0}, {1})",
    "sub": "__fsub_rn({0}, {1})",
    "mul": "__fmul_rn({0}, {1})",
    "div": "__fdiv_rn({0}, {1})",
    NEGATIVE_PRODUCT: "fmaf(-({0}), {1}, 0.0f)",
}
_OTHER_NAMES = {
    **dict.fromkeys(("to", "float", "half", "bfloat16", "_to_copy"), "convert"),
    **{"multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "negative": "neg"},
}

_PRELUDE = """
typedef unsigned short u16;
typedef unsigned int u32;
struct bf16 { u16 bits; };

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
__device__ __forceinline__ void narrow(float &to, float x) { to = x; }
__device__ __forceinline__ void narrow(bf16 &to, float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
    const u32 bits = __float_as_uint(x);
    to.bits = x != x ? 0x7FFF : static_cast<u16>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
#endif
}
#ifdef __CUDACC__
struct f16 { u16 bits; };
__device__ __forceinline__ float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ void narrow(f16 &to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
#endif
template <typename T> __device__ __forceinline__ float rounded(float x) {
    T there;
    narrow(there, x);
    return widen(there);
}
__device__ __forceinline__ float gelu_tanh(float x) {
    const float cube = __fmul_rn(__fmul_rn(x, x), x);
    const float inner = __fmul_rn(0.79788456080286535588f, fmaf(0.044715f, cube, x));
    return __fmul_rn(__fmul_rn(0.5f, x), __fadd_rn(1.0f, tanhf(inner)));
}
template <typename T, int n> struct alignas(sizeof(T) * n) Row { T at[n]; };
"""


@dataclass(frozen=True)
class Operand:
    """What an operation reads: "input", "made" by an earlier one, or "number"; and which of them."""

    kind: str
    index: int


@dataclass(frozen=True)
class Operation:
    """One pointwise operation.

    Attributes:
        name: among those of `formula_of`.
        operands: what it reads.
        dtype: of its result.
    """

    name: str
    operands: tuple[Operand, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Input:
    """What a kernel reads.

    Attributes:
        dtype: of its elements.
        inner: their distance along the innermost dimension: 1, 0 where all are the same one, 2 for any other.
    """

    dtype: torch.dtype
    inner: int


def formula_of(name: str, numbers: tuple[float, ...], approximate: str = "none") -> tuple[str, int] | None:
    """What one of PyTorch's operations is here.

    Args:
        name: of its overloads, as "mul".
        numbers: those of its arguments that are numbers.
        approximate: `gelu`'s argument.

    Returns:
        The name of an operation, and how many operands it has; None for one that is not known here. The exponent of
        `pow` is part of the operation, so it is no operand.
    """
    name = _OTHER_NAMES.get(name, name)
    if name == "pow":
        exponent = _EXPONENTS.get(numbers[0]) if len(numbers) == 1 else None
        return None if exponent is None else (exponent, 1)
    if name == "div" and numbers:  # by a number, PyTorch multiplies by what is nearly its reciprocal
        return None
    if name == "gelu":
        return ("gelu_tanh" if approximate == "tanh" else "gelu"), 1
    if name in _OF_ONE:
        return name, 1
    return (name, 2) if name in _OF_TWO else None


def source_of(
    operations: tuple[Operation, ...],
    inputs: tuple[Input, ...],
    outputs: tuple[int, ...],
    *,
    num_numbers: int,
    num_dims: int,
    width: int,
) -> str:
    """The kernel: each thread computes `width` elements that lie one behind another in the results.

    A result may lie where an input lies, element by element.

    Its arguments, in order: the addresses of the inputs and of the outputs, the number of elements (u32), the
    dimensions' sizes (u32, the outermost first), each input's distances along them (u32), and the numbers (float).

    Args:
        operations: in order; each reads inputs, numbers and results of earlier ones.
        inputs: as above.
        outputs: of which operations the results are written.
        num_numbers: how many numbers they read.
        num_dims: dimensions that do not fall together for all of them.
        width: 1, or a number that divides the innermost size, along which no input has distance 2 then.
    """
    dims = range(num_dims)
    parameters = [f"const {C_TYPES[one.dtype]} *in{at}" for at, one in enumerate(inputs)]
    parameters += [f"{C_TYPES[operations[one].dtype]} *out{at}" for at, one in enumerate(outputs)]
    parameters += ["u32 num", *(f"u32 size{dim}" for dim in dims)]
    parameters += [f"u32 step{at}_{dim}" for at in range(len(inputs)) for dim in dims]
    parameters += [f"float number{at}" for at in range(num_numbers)]
    lines = [
        f'extern "C" __global__ void __launch_bounds__({THREADS}) {KERNEL}({", ".join(parameters)}) {{',
        f"const u32 first = (blockIdx.x * {THREADS}u + threadIdx.x) * {width}u;",
        "if (first >= num) return;",
        *(_coordinates(num_dims)),
    ]
    for at, one in enumerate(inputs):
        lines += _load(at, one, num_dims, width)
    for at, index in enumerate(outputs):
        lines.append(f"Row<{C_TYPES[operations[index].dtype]}, {width}> row{at};")
    lines += ["#pragma unroll", f"for (int e = 0; e < {width}; ++e) {{"]
    for at, operation in enumerate(operations):
        lines.append(f"const float made{at} = {_computed(operation, inputs)};")
    lines += [f"narrow(row{at}.at[e], made{index});" for at, index in enumerate(outputs)]
    lines.append("}")
    for at, index in enumerate(outputs):
        c_type = C_TYPES[operations[index].dtype]
        lines.append(f"*reinterpret_cast<Row<{c_type}, {width}> *>(out{at} + first) = row{at};")
    return _PRELUDE + "\n".join([*lines, "}", ""])


def _coordinates(num_dims: int) -> list[str]:
    lines = ["u32 rest = first;"]
    for dim in reversed(range(1, num_dims)):
        lines += [f"const u32 at{dim} = rest % size{dim};", f"rest /= size{dim};"]
    return [*lines, "const u32 at0 = rest;"]


def _load(at: int, one: Input, num_dims: int, width: int) -> list[str]:
    """Reads what a thread needs of an input into `row`."""
    terms = [f"at{dim} * step{at}_{dim}" for dim in range(num_dims - 1)]
    last = {0: [], 1: [f"at{num_dims - 1}"], 2: [f"at{num_dims - 1} * step{at}_{num_dims - 1}"]}[one.inner]
    num = width if one.inner == 1 else 1
    place = " + ".join([*terms, *last]) or "0u"
    return [
        f"const Row<{C_TYPES[one.dtype]}, {num}> given{at} = "
        f"*reinterpret_cast<const Row<{C_TYPES[one.dtype]}, {num}> *>(in{at} + ({place}));"
    ]


def _computed(operation: Operation, inputs: tuple[Input, ...]) -> str:
    read = []
    for one in operation.operands:
        if one.kind == "input":
            read.append(f"widen(given{one.index}.at[{'e' if inputs[one.index].inner == 1 else '0'}])")
        else:
            read.append(f"{one.kind}{one.index}")
    formula = _OF_ONE.get(operation.name) or _OF_TWO[operation.name]
    computed = formula.format(*read, T=C_TYPES[operation.dtype])
    return computed if operation.dtype is torch.float32 else f"rounded<{C_TYPES[operation.dtype]}>({computed})"
