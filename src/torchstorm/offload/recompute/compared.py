"""Kernels for rows of pointwise operations: compiled beside training, and compared with PyTorch's own, bit for bit."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchstorm import nvrtc
from torchstorm.errors import KernelError
from torchstorm.offload.recompute import pointwise
from torchstorm.offload.recompute.geometry import WIDTH, Geometry, Look
from torchstorm.offload.recompute.pointwise import Input, Operand

_COMPARED_ELEMENTS, _MOST_COMPARED = 1 << 18, 1 << 22
_INEXACT = (0.1, -1 / 3, 1.7, 0.044715, -2.3, 1e-3, 7.7, 123.4)  # in float32, and in what is shorter
_EDGES = (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-30, 3e38, 65504.0, 6e-8, 88.7, -104.0)
_SPREAD = 8.0  # of the values' exponents
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Example:
    """A group's operations as they were called, each tensor replaced by what it stands for.

    Attributes:
        calls: the functions with their arguments; an `Operand` stands for a tensor, and for a number that is one.
        results: how all results look.
        looks: how the inputs look, by the dimensions of the results: dtype and strides, 0 where they are repeated.
        outputs: which results are written.
        numbers: the kernel's.
        inputs, num_dims, width: as the kernel has them.
    """

    calls: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]
    results: tuple[Look, ...]
    looks: tuple[Look, ...]
    outputs: tuple[int, ...]
    numbers: tuple[float, ...]
    inputs: tuple[Input, ...]
    num_dims: int
    width: int


@dataclass
class Kernel:
    """One kernel on one device.

    Attributes:
        source: what it is compiled from.
        device: a GPU.
        example: a group that it runs, without tensors, to be compared on.
        is_compiled: whether its cubin is there, or cannot be.
        is_exact: whether its bits are PyTorch's; None before the comparison.
        layouts: what groups that it runs have made ready, by the sizes.
    """

    source: nvrtc.Source
    device: torch.device
    example: Example
    is_compiled: bool = False
    is_exact: bool | None = None
    layouts: dict[Any, Any] = field(default_factory=dict)


_launching = threading.Lock()


class Bound:
    """A kernel's arguments for tensors of given sizes; the addresses are set for each run."""

    __slots__ = ("_keep", "addresses", "blocks", "launch")

    def __init__(self, kernel: Kernel, geometry: Geometry, num_pointers: int, numbers: Sequence[float]) -> None:
        self.addresses = (ctypes.c_void_p * num_pointers)()
        whole = [geometry.num, *geometry.sizes, *(step for steps in geometry.steps for step in steps)]
        others: list[Any] = [*map(ctypes.c_uint, whole), *map(ctypes.c_float, numbers)]
        at, size = ctypes.addressof(self.addresses), ctypes.sizeof(ctypes.c_void_p)
        places = [at + index * size for index in range(num_pointers)] + [ctypes.addressof(one) for one in others]
        given = (ctypes.c_void_p * len(places))(*places)
        self._keep = others, given
        self.launch = prepare(kernel.source, kernel.device, given)
        self.blocks = -(-geometry.num // (pointwise.THREADS * geometry.width))

    def run(self, addresses: list[ctypes.c_void_p | int | None]) -> None:
        """Runs the kernel on the tensors that lie there, the inputs before the outputs."""
        with _launching:
            self.addresses[:] = addresses
            self.launch(self.blocks, pointwise.THREADS)


def prepare(source: nvrtc.Source, device: torch.device, places: Any) -> Callable[[int, int], None]:  # pragma: gpu
    """As `nvrtc.launcher`; what a test without a GPU replaces."""
    return nvrtc.launcher(source, device, places)


_kernels: dict[tuple[str, tuple[str, ...], torch.device], Kernel] = {}


def kernel_for(code: str, names: tuple[str, ...], example: Example, device: torch.device) -> Kernel:
    """The kernel of this source for operations of these names, which is compiled beside training if it is new."""
    found = _kernels.get((code, names, device))
    if found is None:
        source = nvrtc.Source(kernel=pointwise.KERNEL, code=code)
        found = _kernels[code, names, device] = Kernel(source, device, example)
        threading.Thread(target=compile_one, args=(found,), name="torchstorm-pointwise", daemon=True).start()
    return found


def compile_one(kernel: Kernel) -> None:  # pragma: gpu
    """Has a kernel's cubin ready."""
    try:
        nvrtc.cubin_of(kernel.source, nvrtc.arch_of(torch.cuda.get_device_capability(kernel.device)))
    except Exception:  # as of a compiler that is too old for the GPU: PyTorch's own kernels stay
        kernel.is_exact = False
    kernel.is_compiled = True


def is_exact(kernel: Kernel) -> bool:
    """Whether a kernel gives the bits that its operations give one after another, on random values and on edges, with
    the numbers that they were found with and with others."""
    device = kernel.device
    numbers = kernel.example.numbers, _INEXACT[: len(kernel.example.numbers)]
    is_gpu = device.type == "cuda"
    try:
        with torch.cuda.device(device) if is_gpu else contextlib.nullcontext():
            return all(_gives_equal_bits(kernel, one) for one in numbers)
    except (KernelError, torch.OutOfMemoryError):
        return False


def _gives_equal_bits(kernel: Kernel, numbers: tuple[float, ...]) -> bool:
    example, device = kernel.example, kernel.device
    if len(numbers) < len(example.numbers):
        return False
    size = _small(example.results[0])
    results = [_like(look, size) for look in example.results]
    looks = [_like(look, size) for look in example.looks]
    geometry = Geometry.of(results[0], looks, [0] * len(looks))
    if geometry is None or (len(geometry.sizes), geometry.width) != (example.num_dims, example.width):
        return False
    if max(map(_span, looks), default=0) > _MOST_COMPARED:
        return False
    generator = torch.Generator(device).manual_seed(0)
    inputs = [_values(look, device, generator) for look in looks]
    outputs = [_empty(results[at], device).fill_(math.nan) for at in example.outputs]
    bound = Bound(kernel, geometry, len(inputs) + len(outputs), numbers)
    bound.run([one.data_ptr() for one in (*inputs, *outputs)])
    made: list[torch.Tensor] = []
    there: dict[str, Sequence[Any]] = {"input": inputs, "made": made, "number": numbers}
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for func, args, kwargs in example.calls:
            given = [there[one.kind][one.index] if isinstance(one, Operand) else one for one in args]
            made.append(func(*given, **kwargs))
    for at, output in zip(example.outputs, outputs, strict=True):
        if made[at].dtype is not output.dtype or _steps(made[at]) != _steps(output):
            return False
        bits = _BITS[output.element_size()]
        if not torch.equal(made[at].view(bits), output.view(bits)):
            return False
    return True


def _span(look: Look) -> int:
    return sum((size - 1) * step for size, step in zip(look.size, look.stride, strict=True)) + 1


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    return [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _empty(look: Look, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(look.size, look.stride, dtype=look.dtype, device=device)


def _small(look: Look) -> tuple[int, ...]:
    """A size with all dimensions of a larger one, the innermost as it is as far as that goes; shorter ones leave the
    same remainder by the number of elements that are read at once."""
    size = list(look.size)
    for dim in sorted(range(len(size)), key=lambda d: -look.stride[d]):
        most = max(2 + WIDTH, _COMPARED_ELEMENTS * size[dim] // math.prod(size))
        size[dim] = min(size[dim], most - (most - size[dim]) % WIDTH)
    return tuple(size)


def _like(look: Look, size: tuple[int, ...]) -> Look:
    """The same look for another size: its dimensions in the same order, repeated or with gaps as they are."""
    stride, step, dense = [0] * len(size), 1, 1
    for dim in sorted(range(len(size)), key=lambda d: look.stride[d]):
        if look.size[dim] > 1 and look.stride[dim]:
            if look.stride[dim] != dense:  # a gap, of the same kind for the kernel
                step = 2 if step == 1 else (step // 8 + 1) * 8
            stride[dim] = step
            step, dense = step * size[dim], look.stride[dim] * look.size[dim]
    return Look(look.dtype, size, tuple(stride))


def _values(look: Look, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Values of every magnitude, with edges among them, in a tensor that repeats where the look does."""
    num = _span(look)
    row = torch.randn(num, device=device, generator=generator)
    half = num // 2
    row[:half] *= torch.exp(_SPREAD * torch.randn(half, device=device, generator=generator))
    edges = torch.tensor(_EDGES, device=device)[: num // 3]
    row[: len(edges)] = edges
    row = row[torch.randperm(num, device=device, generator=generator)].to(look.dtype)
    return row.as_strided(look.size, look.stride)
