"""Triton's interpreter, with its faults mended. Imported first, in a process of its own: the import chooses it.

Two faults: a loop bound that is an array of one number is an error with numpy 2.4, and products of bf16 are taken of its
bits. Besides, memory that kernels are given to fill holds NaN.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter


def mend() -> None:
    patch_tensor, new_empty = interpreter._patch_lang_tensor, Tensor.new_empty

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    def numbers(handle: Any) -> Any:
        is_bf16 = handle.dtype.scalar == tl.bfloat16
        return (handle.data.astype(np.uint32) << 16).view(np.float32) if is_bf16 else handle.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.matmul(numbers(a), numbers(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def poisoned(self: Tensor, *size: Any, **options: Any) -> Tensor:
        made = new_empty(self, *size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = create_dot
    Tensor.new_empty = poisoned  # type: ignore[method-assign]
