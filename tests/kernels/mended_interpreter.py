"""Triton's interpreter, for scripts that run kernels on a CPU: importing this chooses it, before Triton is imported.

Two faults of it are mended: a loop bound that is an array of one number is an error with numpy 2.4, and products of
bf16 are taken of its bits. And operators must make the GPU of their tensors the current one before they launch, which
is where Triton launches.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import quick_interpreter
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter


def _in_operator() -> bool:
    """Whether the call comes from an operator of PyTorch, rather than from a test."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "backend_impl":
            return True
        frame = frame.f_back
    return False


def mend() -> None:
    """Mends the interpreter, and fills with NaN what is allocated without a value."""
    patch_tensor, new_empty, empty_like = interpreter._patch_lang_tensor, Tensor.new_empty, torch.empty_like

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    def numbers(handle: Any) -> Any:
        is_bf16 = handle.dtype.scalar == tl.bfloat16
        return (handle.data.astype(np.uint32) << 16).view(np.float32) if is_bf16 else handle.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.matmul(numbers(a), numbers(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def filled(made: Tensor) -> Tensor:
        return made.fill_(float("nan")) if made.is_floating_point() else made

    def poisoned(self: Tensor, *size: Any, **options: Any) -> Tensor:
        return filled(new_empty(self, *size, **options))

    def poisoned_like(like: Tensor, **options: Any) -> Tensor:
        return filled(empty_like(like, **options))

    class Watched(torch.cuda.device_of):
        depth = 0

        def __enter__(self) -> None:
            Watched.depth += 1
            super().__enter__()

        def __exit__(self, *error: Any) -> None:
            Watched.depth -= 1
            super().__exit__(*error)

    run = interpreter.GridExecutor.__call__

    def within(self: Any, *args: Any, **options: Any) -> Any:
        assert Watched.depth or not _in_operator(), f"{self.fn.__name__} on whatever GPU is the current one"
        return run(self, *args, **options)

    torch.cuda.device_of = Watched  # type: ignore[misc]
    interpreter.GridExecutor.__call__ = within
    quick_interpreter.quicken()
    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = create_dot
    Tensor.new_empty = poisoned  # type: ignore[method-assign]
    torch.empty_like = poisoned_like  # type: ignore[assignment]
