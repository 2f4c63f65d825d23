"""The mLSTM's Triton kernels on a GPU: right by the one tolerance rule, the same bits twice, nothing left unwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from close import assert_all_close
from kernels.mlstm_runs import GATES, Inputs, draw, results, truth, yardsticks
from torchstorm.kernels import mlstm

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _nan_wherever_nothing_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, *size: Any, **options: Any) -> Tensor:
        made = new_empty(self, *size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


def _by(variant: str, chunk: int | None = None) -> Callable[..., Any]:
    return lambda q, k, v, i, f, state, cu_seqlens, gate: mlstm(
        q, k, v, i, f, initial_state=state, return_state=True, cu_seqlens=cu_seqlens, chunk=chunk, gate=gate,
        variant=variant,
    )  # fmt: skip


def _check(inputs: Inputs, *, gate: str = "exp", chunk: int | None = None, through_state: bool = True) -> None:
    """Against float64, with both forms in PyTorch in the same dtype as yardsticks; and the same bits twice."""
    options = {"gate": gate, "through_state": through_state}
    found = results(_by("triton-chunkwise", chunk), inputs, **options)
    again = results(_by("triton-chunkwise", chunk), inputs, **options)
    for name, x in found.items():
        assert torch.equal(x, again[name]), f"{name} differs from run to run"
    if inputs.q.shape[2] <= 1024:
        right, forms = truth(inputs, **options), ("recurrent", "quadratic")
    else:
        right, forms = results(_by("chunkwise"), inputs.to(torch.float64), **options), ("quadratic",)
    theirs = [] if inputs.q.shape[2] > 8192 else yardsticks(inputs, **options, forms=forms)
    # fp32 weights pass exp2 with an error of two units in the last place, where PyTorch's may happen to be exact.
    eps = torch.finfo(inputs.q.dtype).eps
    floor = max(eps, 8 * torch.finfo(torch.float32).eps) if theirs else 8 * eps
    assert_all_close(found, right, *theirs, floor=floor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("d", [(16, 16), (40, 40), (64, 64), (96, 192), (128, 256), (192, 96), (256, 512), (512, 256)])
def test_head_sizes(d: tuple[int, int], gate: str, dtype: torch.dtype) -> None:
    # q.n is far from 0 everywhere, so that no single row, whose 1 / |q.n| is huge, makes up the error of all.
    inputs = draw(2, 2, 200, *d, dtype=dtype, device="cuda")
    _check(inputs._replace(q=inputs.q.abs(), k=inputs.k.abs()), gate=gate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [1, 2, 63, 64, 65, 1000])
def test_lengths(S: int, dtype: torch.dtype) -> None:
    _check(draw(1, 3, S, 64, 128, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("S", [8192, 131072])
def test_long(S: int) -> None:
    _check(draw(1, 1, S, 64, 64, dtype=torch.bfloat16, device="cuda", state=False), through_state=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [16, 32, 64, 128, 256])
def test_chunks(chunk: int, dtype: torch.dtype) -> None:
    _check(draw(1, 2, 600, 128, 256, dtype=dtype, device="cuda"), chunk=chunk)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates", GATES)
def test_gates(gates: str, dtype: torch.dtype) -> None:
    _check(draw(1, 4, 300, 64, 64, dtype=dtype, gates=gates, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_packed(gate: str, dtype: torch.dtype) -> None:
    _check(draw(1, 2, 500, 64, 64, dtype=dtype, lengths=[1, 0, 129, 370], device="cuda"), gate=gate)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_as_separate(dtype: torch.dtype) -> None:
    lengths = [1, 64, 129, 370]
    inputs = draw(1, 2, sum(lengths), 64, 128, dtype=dtype, state=False, lengths=lengths, device="cuda")
    together = mlstm(*inputs[:5], cu_seqlens=inputs.cu_seqlens)
    parts = zip(*(x.split(lengths, dim=2) for x in inputs[:5]), strict=True)
    assert torch.equal(together, torch.cat([mlstm(*part) for part in parts], dim=2))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
        lambda x: x.mT.contiguous().mT,
    ],
    ids=["rows of (B, S, H, d)", "slices of wider rows", "no row contiguous"],
)
def test_any_strides(change: Callable[[Tensor], Tensor]) -> None:
    inputs = draw(2, 3, 130, 64, 72, dtype=torch.bfloat16, state=False, device="cuda")
    plain = results(_by("triton-chunkwise"), inputs)
    strided = results(lambda *given: _by("triton-chunkwise")(*map(change, given[:5]), *given[5:]), inputs)
    for name, x in strided.items():
        assert torch.equal(x, plain[name]), name


def test_gates_in_float32() -> None:
    inputs = draw(1, 2, 100, 64, 64, dtype=torch.bfloat16, device="cuda")
    wide = inputs._replace(i=inputs.i.float(), f=inputs.f.float())
    assert torch.equal(mlstm(*inputs[:5]), mlstm(*wide[:5]))
