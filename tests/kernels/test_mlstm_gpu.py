"""The mLSTM's Triton kernels on a GPU: right by the one tolerance rule, the same bits twice, nothing left unwritten."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.mlstm_on_gpu import assert_right, by, nan_wherever_nothing_is_written
from kernels.mlstm_runs import GATES, conditioned, draw, results
from torchstorm.kernels import mlstm

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SUMS = (torch.bfloat16, torch.float32)  # in float16 they are as in bfloat16: test_head_sizes and test_packed have it
SIZES = [(16, 16), (40, 40), (64, 64), (96, 192), (128, 256), (192, 96), (256, 512), (512, 256)]
SOME_SIZES = [(40, 40), (64, 64), (128, 256)]


_check = partial(assert_right, "triton-chunkwise")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    nan_wherever_nothing_is_written(monkeypatch)


@pytest.mark.parametrize(
    ("d", "gate", "dtype"),
    [(d, "exp", dtype) for d in SIZES for dtype in SUMS]
    + [(d, "sigmoid", dtype) for d in SOME_SIZES for dtype in SUMS]
    + [(d, "exp", torch.float16) for d in SOME_SIZES],
)
def test_head_sizes(d: tuple[int, int], gate: str, dtype: torch.dtype) -> None:
    _check(conditioned(draw(2, 2, 200, *d, dtype=dtype, device="cuda")), gate=gate)


@pytest.mark.parametrize("dtype", SUMS)
@pytest.mark.parametrize("S", [1, 2, 63, 64, 65, 1000])
def test_lengths(S: int, dtype: torch.dtype) -> None:
    # Many heads: the gates' and m_0's gradients are few numbers in which much cancels, so that those of a head or two
    # are as exact, or not, as luck has it, ours and the yardsticks'.
    _check(conditioned(draw(1, 32 if S <= 65 else 16, S, 64, 128, dtype=dtype, device="cuda")))


@pytest.mark.parametrize("S", [8192, 131072])
def test_long(S: int) -> None:
    _check(draw(1, 1, S, 64, 64, dtype=torch.bfloat16, device="cuda", state=False), through_state=False)


@pytest.mark.parametrize("dtype", SUMS)
@pytest.mark.parametrize("chunk", [16, 32, 64, 128, 256])
def test_chunks(chunk: int, dtype: torch.dtype) -> None:
    _check(draw(1, 2, 600, 128, 256, dtype=dtype, device="cuda"), chunk=chunk)


@pytest.mark.parametrize("dtype", SUMS)
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
    plain = results(by("triton-chunkwise"), inputs)
    strided = results(lambda *given: by("triton-chunkwise")(*map(change, given[:5]), *given[5:]), inputs)
    for name, x in strided.items():
        assert torch.equal(x, plain[name]), name


def test_gates_in_float32() -> None:
    inputs = draw(1, 2, 100, 64, 64, dtype=torch.bfloat16, device="cuda")
    wide = inputs._replace(i=inputs.i.float(), f=inputs.f.float())
    assert torch.equal(mlstm(*inputs[:5]), mlstm(*wide[:5]))
