"""The gradient of cross entropy by one kernel, as a C++ compiler makes it: what two numbers a row give."""

from __future__ import annotations

import copy
import math
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import host_kernels
from offload.test_loss_by_rows import Head, grads_of, ids_of, same_bits
from torchstorm.offload.loss import cross_entropy, rows
from torchstorm.offload.loss import gradient as module
from torchstorm.offload.loss.gradient import Gradient, numbers_of
from torchstorm.offload.loss.rows import MEAN, SUM, How
from torchstorm.offload.recompute import compared
from torchstorm.offload.session import Session

DTYPES = torch.float32, torch.bfloat16


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host_kernels.use(monkeypatch)


@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(2, 40),
    num_words=st.integers(2, 300),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_two_numbers_a_row_give_the_bits_of_log_softmax(
    num_rows: int, num_words: int, scale: float, dtype: torch.dtype, seed: int
) -> None:
    logits = (scale * torch.randn(num_rows, num_words, generator=torch.Generator().manual_seed(seed))).to(dtype)
    log_p = torch.log_softmax(logits.float(), 1)
    numbers = torch.empty(2, num_rows)
    numbers_of(logits, log_p, numbers)
    found = (logits.float() - numbers[0, :, None]) - numbers[1, :, None]
    assert torch.equal(found.view(torch.int32), log_p.view(torch.int32))


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_words"), [(33, 64), (16, 257), (50, 1000)])
@pytest.mark.parametrize("reduction", [MEAN, SUM])
def test_the_kernel_computes_what_parts_compute(
    dtype: torch.dtype, num_rows: int, num_words: int, reduction: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_ELEMENTS", 10_000)
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(num_rows, num_words, generator=generator)).to(dtype)
    target = torch.randint(num_words, (num_rows,), generator=generator)
    target[::5] = -100
    gradient = Gradient.of(logits)
    assert gradient is not None
    how = How(torch.float32, reduction, -100, 8, keeps_numbers=True, gradient=gradient)
    loss, weight, numbers = rows.forward(logits, target, how)
    grad = torch.full_like(loss, -0.37)
    found = rows.backward(grad, logits, target, weight, how, numbers)
    expected = rows.backward(grad, logits, target, weight, How(torch.float32, reduction, -100, 8))
    assert found.dtype == dtype
    # A C++ compiler's exponentials are others than PyTorch's in the last bit.
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype is torch.float32 else 2**-8, atol=1e-12)
    at = torch.arange(num_rows)[target >= 0], target[target >= 0]
    assert torch.equal(found[at], expected[at])
    assert not found[::5].any()


def test_where_nothing_is_known_of_a_row_nothing_is_of_its_gradient() -> None:
    logits = torch.tensor([[math.nan, 1.0, 2.0], [math.inf, 0.0, 0.0], [-math.inf, 0.0, 1.0]])
    log_p = torch.log_softmax(logits, 1)
    numbers = torch.empty(2, 3)
    numbers_of(logits, log_p, numbers)
    found = (logits - numbers[0, :, None]) - numbers[1, :, None]
    torch.testing.assert_close(found, log_p, rtol=0, atol=0, equal_nan=True)


def as_pytorch(
    self: Gradient, logits: torch.Tensor, target: torch.Tensor, numbers: torch.Tensor, of_label: torch.Tensor
) -> torch.Tensor:
    """What the kernel computes, with PyTorch's own exponentials, where it does not compute the label's own."""
    log_p = (logits.float() - numbers[0, :, None]) - numbers[1, :, None]
    of_log_p = torch.zeros_like(log_p).scatter_(1, target[:, None], of_label[:, None])
    return torch.ops.aten._log_softmax_backward_data(of_log_p, log_p, 1, torch.float32).to(logits.dtype)


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad", [1.0, -0.3, 0.0, -0.0, 1e30])
@pytest.mark.parametrize("num_ignored", [0, 5, 20])
def test_the_label_s_own_gradient_has_the_operator_s_bits(grad: float, dtype: torch.dtype, num_ignored: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 40, generator=generator).to(dtype)
    target = torch.randint(40, (20,), generator=generator)
    target[:num_ignored] = -100
    how = How(torch.float32, MEAN, -100, 8, keeps_numbers=True, gradient=Gradient.of(logits))
    loss, weight, numbers = rows.forward(logits, target, how)
    given = torch.full_like(loss, grad), logits, target, weight
    found = rows.backward(*given, how, numbers)
    expected = rows.backward(*given, How(torch.float32, MEAN, -100, 8))
    at = torch.arange(num_ignored, 20), target[num_ignored:]
    assert same_bits([found[at]], [expected[at]])


@pytest.mark.usefixtures("on_the_host")
def test_a_product_that_is_nothing_in_float32_keeps_its_sign() -> None:
    logits = torch.full((16, 40), -97.0)
    logits[:, 0] = 0.0
    target = torch.zeros(16, dtype=torch.int64)
    how = How(torch.float32, MEAN, -100, 8, keeps_numbers=True, gradient=Gradient.of(logits))
    loss, weight, numbers = rows.forward(logits, target, how)
    found = rows.backward(torch.full_like(loss, -1e-4), logits, target, weight, how, numbers)
    assert not found[:, 1:].any()
    assert torch.signbit(found[:, 1:]).all()


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("num_words", [1000, 50_257, 128_256, 151_936, 250_002, 262_144])
@pytest.mark.parametrize("num_rows", [16, 16_400])
def test_a_table_of_any_size_has_a_kernel_that_is_compared(
    num_rows: int, num_words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = torch.empty(1, 1, dtype=torch.bfloat16).expand(num_rows, num_words)
    gradient = Gradient.of(table)
    assert gradient is not None
    bound: list[int] = []
    monkeypatch.setattr(compared, "Bound", lambda kernel, geometry, *_: bound.append(geometry.width))
    with suppress(AttributeError):  # of what stands for a kernel's arguments
        compared.is_exact(gradient.kernel)
    assert bound == [8 if num_words % 8 == 0 else 1]


@pytest.mark.usefixtures("on_the_host")
def test_what_lies_otherwise_than_in_the_forward_is_computed_in_parts() -> None:
    logits = torch.randn(16, 64)
    gradient = Gradient.of(logits)
    assert gradient is not None
    numbers = torch.zeros(2, 16)
    assert gradient.takes(logits, numbers)
    assert not gradient.takes(logits, None)
    assert not gradient.takes(logits.T.contiguous().T, numbers)
    assert not gradient.takes(logits.double(), numbers)
    assert not gradient.takes(logits, numbers.double())
    assert not gradient.takes(torch.randn(16 * 64 + 1)[1:].view(16, 64), numbers)


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("has", ["the same bits", "other bits", "no memory"])
def test_a_step_has_the_bits_of_the_model_alone_whatever_the_kernel_has(
    has: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[torch.Tensor] = []
    monkeypatch.setattr(cross_entropy, "WORTH_BYTES", 0)
    monkeypatch.setattr(rows, "_LEAST_BYTES", 1)
    monkeypatch.setattr(cross_entropy, "_keeps_numbers", lambda logits, dtype: True)
    monkeypatch.setattr(Gradient, "is_exact", lambda self: True)

    def gradient_of(self: Gradient, logits: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        ran.append(logits)
        if has == "no memory":
            raise torch.OutOfMemoryError("none left")
        found = as_pytorch(self, logits, *rest)
        return found * (1 + 1e-6) if has == "other bits" else found

    monkeypatch.setattr(Gradient, "__call__", gradient_of)
    model, labels = Head(), ids_of(0, 25).view(-1)
    plain = copy.deepcopy(model)
    with Session(model, unlimited=True) as session:
        for seed in range(3):
            given = torch.randn(50, 16, generator=torch.Generator().manual_seed(seed))
            with session.step():
                model(given, labels).backward()
            plain(given, labels).backward()
            assert same_bits(grads_of(model), grads_of(plain))
    whole = [logits for logits in ran if len(logits) == 50]
    assert len(whole) == (3 if has == "the same bits" else 0)
    assert ran  # at least to be compared
