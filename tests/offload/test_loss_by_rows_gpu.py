"""On a GPU: cross entropy some rows at a time has the bits of the whole at once, and takes little more memory than the
gradient of the logits."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from torchstorm.offload.loss.gradient import Gradient
from torchstorm.offload.loss.rows import MEAN, CrossEntropyByRows, How, has_same_bits, rows_at_a_time

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def logits_and_labels(num_rows: int, num_words: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator(DEVICE).manual_seed(0)
    logits = (4 * torch.randn(num_rows, num_words, device=DEVICE, generator=draw)).to(dtype).requires_grad_()
    labels = torch.randint(num_words, (num_rows,), device=DEVICE, generator=draw)
    return logits, labels.masked_fill(labels % 5 == 0, -100)


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [
        pytest.param(torch.bfloat16, torch.float32, id="cast"),
        pytest.param(torch.bfloat16, torch.bfloat16, id="as they are"),
        pytest.param(torch.float16, torch.float32, id="half"),
        pytest.param(torch.float32, torch.float32, id="float32"),
    ],
)
@pytest.mark.parametrize("num_words", [1000, 1024, 30_522, 32_000, 50_257, 128_256, 151_936])
@pytest.mark.parametrize("num_rows", [4096, 1003])
def test_some_rows_at_a_time_have_the_bits_of_the_whole_at_once(
    num_rows: int, num_words: int, dtype: torch.dtype, computed: torch.dtype
) -> None:
    logits, labels = logits_and_labels(num_rows, num_words, dtype)
    whole = nn.functional.cross_entropy(logits.to(computed), labels)
    (expected,) = torch.autograd.grad(whole, logits)
    assert has_same_bits(logits, labels, How(computed, MEAN, -100, rows_at_a_time(logits, computed)))
    for each in (8, 40, rows_at_a_time(logits, computed)):
        loss = CrossEntropyByRows.apply(logits, labels, How(computed, MEAN, -100, each))
        (found,) = torch.autograd.grad(loss, logits)
        assert torch.equal(loss, whole)
        assert torch.equal(found, expected)


def test_it_takes_little_more_memory_than_the_gradient_of_the_logits() -> None:
    logits, labels = logits_and_labels(8192, 128_256, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    each = rows_at_a_time(logits, torch.float32)
    loss = CrossEntropyByRows.apply(logits, labels, How(torch.float32, MEAN, -100, each))
    (found,) = torch.autograd.grad(loss, logits)
    part_bytes = each * logits.shape[1] * 4
    assert torch.cuda.max_memory_allocated() - before <= found.nbytes + 3 * part_bytes + 2**21


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_words", [1000, 30_522, 32_000, 50_257, 128_256, 151_936])
def test_one_kernel_has_the_bits_of_the_whole_at_once(num_words: int, dtype: torch.dtype) -> None:
    logits, labels = logits_and_labels(1003, num_words, dtype)
    gradient = Gradient.of(logits)
    assert gradient is not None
    while not gradient.is_compiled:
        time.sleep(0.01)
    assert gradient.is_exact()
    how = How(torch.float32, MEAN, -100, 40, keeps_numbers=True, gradient=gradient)
    assert has_same_bits(logits, labels, how)
    whole = nn.functional.cross_entropy(logits.float(), labels)
    (expected,) = torch.autograd.grad(whole, logits)
    torch.cuda.synchronize()
    loss = CrossEntropyByRows.apply(logits, labels, how)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (found,) = torch.autograd.grad(loss, logits)
    assert torch.cuda.max_memory_allocated() - before <= found.nbytes + 2**21
    assert torch.equal(loss, whole)
    assert torch.equal(found, expected)


def test_one_kernel_takes_more_elements_than_32_bits_count() -> None:
    logits, labels = logits_and_labels(16_400, 151_936, torch.bfloat16)
    gradient = Gradient.of(logits)
    assert gradient is not None
    while not gradient.is_compiled:
        time.sleep(0.01)
    assert gradient.is_exact()
    each = rows_at_a_time(logits, torch.float32)
    grads = []
    for one in (gradient, None):
        how = How(torch.float32, MEAN, -100, each, keeps_numbers=True, gradient=one)
        grads += torch.autograd.grad(CrossEntropyByRows.apply(logits, labels, how), logits)
    assert torch.equal(*grads)
