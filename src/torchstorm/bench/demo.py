"""`torchstorm demo`: a short demonstration of the device, with numbers measured in this run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from torch import Tensor

from torchstorm.bench.accuracy import error_of
from torchstorm.bench.cases import bench_device
from torchstorm.bench.ceilings import Ceilings
from torchstorm.bench.matmul_cases import matmul_case
from torchstorm.bench.op import run_case
from torchstorm.bench.op_rows import HEADER, OpRow, format_row
from torchstorm.bench.record import Record
from torchstorm.bench.timing import median_ms
from torchstorm.kernels import matmul
from torchstorm.sizes import format_size
from torchstorm.train.result import device_name

Say = Callable[[str], None]

_COPY_BYTES = 64 * 2**20
_SIZE = 1024


def demo(device: str | None, *, console: Console) -> bool:
    """Copies memory to the device and back, shows a small product, times all product variants, and checks their error.

    Args:
        device: "cpu", "cuda" or "cuda:N"; None for CUDA if available.
        console: where to print.

    Returns:
        Whether all checks passed.

    Raises:
        DeviceError: the device does not exist.
    """
    target = bench_device(device)
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    say(f"This is {device_name(target)}, with PyTorch {torch.__version__}.")
    came_back = _there_and_back(target, say)
    _small_product(target, say)
    rows = _ladder(target, say)
    _accuracy(target, say)
    return _verdict(rows, came_back, say)


def _there_and_back(device: torch.device, say: Say) -> bool:
    host = torch.randint(0, 256, (_COPY_BYTES,), dtype=torch.uint8)
    if device.type == "cuda":  # pragma: gpu
        host = host.pin_memory()
    there, back = torch.empty_like(host, device=device), torch.empty_like(host)
    there.copy_(host)
    out_ms = median_ms(partial(there.copy_, non_blocking=True), [host], device)
    back.copy_(there)
    in_ms = median_ms(partial(back.copy_, non_blocking=True), [there], device)
    is_same = torch.equal(host, back)
    out, back_again = (_COPY_BYTES / ms / 1e6 for ms in (out_ms, in_ms))
    where = "to the GPU" if device.type == "cuda" else "to another place in RAM"
    same = "the same bytes came back" if is_same else "OTHER BYTES CAME BACK"
    size = format_size(_COPY_BYTES)
    say(f"\nMemory: {size} went {where} at {out:.1f} GB/s and back at {back_again:.1f} GB/s; {same}.")
    return is_same


def _small_product(device: torch.device, say: Say) -> None:
    a = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], device=device)
    b = torch.tensor([[7.0, 8.0], [9.0, 10.0], [11.0, 12.0]], device=device)
    say("\nA product, each number of it a row of the first times a column of the second:")
    c = matmul(a, b)
    for index in range(a.shape[1]):
        left = _row(a, index) if index < len(a) else " " * len(_row(a, 0))
        right = _row(c, index) if index < len(c) else ""
        say(f"  {left}  {'x' if index == 1 else ' '}  {_row(b, index)}  {'=' if index == 1 else ' '}  {right}".rstrip())


def _row(matrix: Tensor, index: int) -> str:
    return " ".join(f"{x:4.0f}" for x in matrix[index].tolist())


def _ladder(device: torch.device, say: Say) -> list[OpRow]:
    say(f"\nThe ladder of products at {_SIZE} x {_SIZE}, float32, from naive to the library:")
    say(HEADER)
    record = Record("matmul", device, OpRow, format_row, path=None, say=say)
    case = matmul_case(1, _SIZE, _SIZE, _SIZE, device, torch.float32)
    forward_alone = replace(case, differentiable=(), work={"forward": case.work["forward"]})
    run_case(forward_alone, device, None, Ceilings(device), record)
    return record.rows


def _accuracy(device: torch.device, say: Say) -> None:
    a, b = (torch.randn(_SIZE, _SIZE, dtype=torch.float64, device=device) for _ in range(2))
    right = a @ b
    told = []
    for dtype in (torch.float32, torch.bfloat16):
        error = error_of(matmul(a.to(dtype), b.to(dtype)), right)
        told.append(f"{error:.1e} in {str(dtype).removeprefix('torch.')}")
    say(f"\nAccuracy: such products are off by {' and '.join(told)}, beside float64.")


def _verdict(rows: list[OpRow], came_back: bool, say: Say) -> bool:
    ours = [row for row in rows if row.over_first is not None]
    wrong = [row.variant for row in rows if row.error is not None and not row.checked]
    if ours:
        best = max(ours, key=lambda row: row.over_first or 0)
        say(
            f"\nVerdict: {best.variant} is {best.over_first:.3g} times as fast as {ours[0].variant}, and does "
            f"{best.share_of_ceiling:.0%} of what this device was just measured to do at most."
        )
    if wrong or not came_back:
        say(f"NOT RIGHT: {', '.join(wrong) or 'memory'}.")
        return False
    say("Everything that was timed was checked against float64 and is right.")
    return True
