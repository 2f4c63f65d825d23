"""Triton's interpreter made quicker, with the same values, for the scripts that run it (see interpreting.py)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter


def quicken() -> None:
    """Leaves out what the interpreter does again and again, and what it does for nothing.

    For a process that only interprets: the language stays as the interpreter has changed it.
    """
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)  # else at every call of a device function
    # Every sum and product of integers again in 64 bits, for an assertion that is left out unless debugging.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter.ScanOps.generic_scan = _scan
    tl.tensor.__init__ = _tensor
    tl.block_type.__init__ = _block_type
    tl.dtype.__eq__ = _equal
    core._unwrap_if_constexpr = _unwrap
    semantic.TritonSemantic.broadcast_impl_value = _broadcast
    semantic.TritonSemantic.cast = _cast
    interpreter._patch_attr = _patch_attr


def _by_name(numpy_type: Any) -> Any:
    """The same function, which makes its table of types only once for each."""
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_type(dtype)
        return known[name]

    return look_up


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape(tuple(type.shape.values) if type.is_block() else ())


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    numel = tl.constexpr(int(np.prod(sizes)))
    return tl.tuple([tl.constexpr(size) for size in sizes]), numel


_make_block_type = tl.block_type.__init__


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Types of as many numbers in as many dimensions share what was made, and checked, for the first of them."""
    sizes = shape.values if type(shape) is tl.tuple else shape
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _block(str(element_ty), *map(core._unwrap_if_constexpr, sizes))


@functools.lru_cache(maxsize=None, typed=True)  # 16.0 is no size
def _block(element: str, *sizes: int) -> tuple[Any, int, str]:
    made: Any = tl.block_type.__new__(tl.block_type)
    _make_block_type(made, element, list(sizes))
    return made.shape, made.numel, made.name


def _equal(self: Any, other: Any) -> bool:
    """Of types, most of which are compared with themselves."""
    if self is other:
        return True
    other = core._unwrap_if_constexpr(other)
    return isinstance(other, tl.dtype) and self.name == other.name


_unwrap_any = core._unwrap_if_constexpr


def _unwrap(value: Any) -> Any:
    """What a constant holds; most values are none, and neither lists of them."""
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    if kind is int or kind is tl.tensor or kind is tl.dtype:
        return value
    return _unwrap_any(value)


_broadcast_any = semantic.TritonSemantic.broadcast_impl_value


def _broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Most tensors that meet have the same shape."""
    types = left.type, right.type
    if types[0].is_block() and types[1].is_block() and types[0].shape is types[1].shape:
        return left, right
    found: tuple[Any, Any] = _broadcast_any(self, left, right)
    return found


_cast_any = semantic.TritonSemantic.cast


def _cast(self: Any, value: Any, dtype: Any, *rounding: Any, **options: Any) -> Any:
    """Most operands have the type of their result."""
    if value.type.scalar is dtype.scalar:
        return value
    return _cast_any(self, value, dtype, *rounding, **options)


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """The function itself, with the meaning of the interpreter, in place of two that call it."""
    function = getattr(member, "__wrapped__", member)
    meaning = interpreter.TritonSemantic(builder)
    scope.set_attr(owner, name, lambda *args, _semantic=None, **options: function(*args, _semantic=meaning, **options))


def _scan(self: Any, tensors: tuple[Any, ...]) -> list[Any]:
    """Each number combined with that one `step` before it, then with what that one holds by now: log2(length) times."""
    values = [tensor.handle.data for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors]
    length = values[0].shape[self.axis]
    at = np.arange(length).reshape([-1 if axis == self.axis else 1 for axis in range(values[0].ndim)])
    step = 1
    while step < length:
        before = [np.roll(value, step, self.axis) for value in values]
        both = [self.to_tensor(value, dtype) for value, dtype in zip(before + values, dtypes * 2, strict=True)]
        combined = self.combine_fn.fn(*both)
        combined = combined if isinstance(combined, tuple) else (combined,)
        values = [np.where(at < step, old, new.handle.data) for old, new in zip(values, combined, strict=True)]
        step *= 2
    return [self.to_tensor(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]
