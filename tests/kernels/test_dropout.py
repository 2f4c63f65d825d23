"""dropout: a mask that follows from the seed and the place alone, the same wherever it is made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kernels import elementwise_results
from kernels.elementwise_runs import check_dropout
from torchstorm.errors import ConfigError, DeviceError, ShapeError
from torchstorm.kernels import dropout, variants
from torchstorm.kernels.dropout import philox
from torchstorm.kernels.dropout.op import dropout_op


@pytest.mark.parametrize("name", elementwise_results.names(elementwise_results.DROPOUT))
def test_interpreted(name: str) -> None:
    pytest.importorskip("triton")
    failure = elementwise_results.results()[name]["failure"]
    assert not failure, failure


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_plain(dtype: torch.dtype) -> None:
    check_dropout("torch", dtype)


def test_parallel() -> None:
    pytest.importorskip("numba")
    check_dropout("parallel", torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(5000).to(dtype)
        assert torch.equal(dropout(x, 0.3, seed=4), dropout(x, 0.3, seed=4, variant="torch"))


def test_philox_gives_the_words_that_its_authors_publish() -> None:
    """Known answers of Random123 for a counter of 0; with upper words of 0 there is no other."""
    words = philox.philox(torch.zeros(2, dtype=torch.int64), torch.tensor(0))
    assert [hex(int(word[1])) for word in words] == ["0x5f6fb709", "0xd893f64", "0x4f121f81", "0x4f730a48"]


@settings(max_examples=30, deadline=None)
@given(counter=st.integers(-(2**63), 2**63 - 1), seed=st.integers(-(2**63), 2**63 - 1))
def test_philox_is_what_numbers_without_a_limit_say(counter: int, seed: int) -> None:
    x, key = [counter & 0xFFFFFFFF, counter >> 32 & 0xFFFFFFFF, 0, 0], [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(7):
        one, two = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [(two >> 32) ^ x[1] ^ key[0], two & 0xFFFFFFFF, (one >> 32) ^ x[3] ^ key[1], one & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    found = philox.philox(torch.tensor([counter]), torch.tensor(seed))
    assert [int(word) for word in found] == x


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.3, 0.5, 0.9, 1.0 - 1e-4])
def test_the_share_that_is_dropped_and_its_independence(p: float) -> None:
    """Of other seeds, of numbers that share a word (a shift of 1) or a call (up to 7), and of further ones."""
    num = 1 << 21
    one, other = (philox.keep(torch.tensor(seed), num, p) for seed in (1, 2))
    sigma = (p * (1 - p) / num) ** 0.5
    both = ((1 - p) ** 2 * (1 - (1 - p) ** 2) / num) ** 0.5
    assert abs(float(one.double().mean()) - (1 - p)) < 4 * sigma
    assert abs(float((one & other).double().mean()) - (1 - p) ** 2) < 4 * both
    for shift in (1, 2, 3, 4, 5, 6, 7, 8, 16, 1024, 4096):
        assert abs(float((one & one.roll(shift)).double().mean()) - (1 - p) ** 2) < 5 * both
    for place in range(philox.NUMBERS):
        assert abs(float(one[place :: philox.NUMBERS].double().mean()) - (1 - p)) < 4 * 8**0.5 * sigma


def test_probabilities_to_32_bits() -> None:
    """Both uses of a word are uniform to its last bit, and what is kept is scaled by what was rounded to."""
    assert [philox.threshold_of(p) for p in (0.0, 2.0**-32, 0.5, 1.0 - 2.0**-33, 1.0)] == [
        0,
        1,
        1 << 31,
        *[2**32 - 1] * 2,
    ]
    assert [philox.scale_of(p) for p in (0.0, 0.5, 1.0 - 2.0**-33, 1.0)] == [1.0, 2.0, 2.0**32, 0.0]
    for p in (1e-9, 0.1, 0.7, 1.0 - 1e-9):
        assert abs(philox.threshold_of(p) / 2**32 - p) <= 2.0**-33
        assert philox.scale_of(p) * (1.0 - philox.threshold_of(p) / 2**32) == pytest.approx(1.0, rel=1e-15)
    words = torch.stack(philox.philox(torch.arange(4), torch.tensor(5)), -1).view(-1).tolist()
    for word, place in ((words[3], 6), (words[3] >> 16 | (words[3] & 0xFFFF) << 16, 7)):
        for p, kept in ((word / 2**32, True), ((word + 1) / 2**32, False)):
            assert bool(philox.keep(torch.tensor(5), 32, p)[place]) is kept


@pytest.mark.parametrize("p", [0.0, 1e-9, 1.0 - 1e-9, 1.0])
def test_at_the_ends(p: float) -> None:
    x = torch.randn(1000)
    assert torch.equal(dropout(x, p, seed=2), torch.zeros(1000) if p > 0.5 else x)


def test_the_mask_follows_places_not_memory() -> None:
    x = torch.ones(60, 100)
    wanted = dropout(x, 0.5, seed=3)
    assert torch.equal(dropout(x.t().contiguous().t(), 0.5, seed=3), wanted)
    assert torch.equal(dropout(x.double(), 0.5, seed=3).float(), wanted)
    assert torch.equal(dropout(x.view(-1)[:5000], 0.5, seed=3), wanted.view(-1)[:5000])
    assert torch.equal(dropout(x, 0.5, seed=torch.tensor(3)), wanted)


def test_a_seed_of_torchs_generator() -> None:
    x = torch.ones(1000)
    torch.manual_seed(5)
    one, two = dropout(x), dropout(x)
    torch.manual_seed(5)
    assert torch.equal(dropout(x), one)
    assert not torch.equal(one, two)


def test_backward_keeps_the_seed_alone() -> None:
    kept: list[Tensor] = []
    x = torch.randn(100, 10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        dropout(x, 0.1)
    assert [(each.dtype, each.numel()) for each in kept] == [(torch.int64, 1)]


def test_not_in_training_and_without_a_chance() -> None:
    x = torch.randn(5)
    assert dropout(x, 0.5, training=False) is x
    assert torch.equal(dropout(x, 0.0), x)
    assert dropout(torch.empty(0, 3), 0.5).shape == (0, 3)
    assert dropout(torch.ones(()), 0.5, seed=1).shape == ()


def test_without_numba_pytorch_does_it(uninstall: Callable[[str], None]) -> None:
    x = torch.randn(50)
    wanted = dropout(x, 0.5, seed=9, variant="torch")
    uninstall("numba")
    assert torch.equal(dropout(x, 0.5, seed=9), wanted)


def test_rules() -> None:
    x = torch.randn(6, 4).t().requires_grad_()
    torch.library.opcheck(dropout_op, (x, torch.tensor(3), 0.5, "torch"))
    wide = torch.randn(20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.5, seed=1), wide)
    assert torch.autograd.gradgradcheck(lambda x: dropout(x, 0.5, seed=1), wide)


def test_compiled_without_a_break_and_not_again_for_more_rows() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: dropout(dropout(x, 0.5), 0.3, seed=4), backend=counter, fullgraph=True)
    for rows in (4, 7, 33):
        x = torch.ones(rows, 6, requires_grad=True)
        y = compiled(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(dx, y)  # of ones, the mask both
    assert counter.frame_count <= 2
    torch.compiler.reset()


def test_errors() -> None:
    x = torch.randn(3)
    assert variants("dropout") == ("torch", "parallel", "naive", "vectorised")
    with pytest.raises(ConfigError, match=r"p=1\.5"):
        dropout(x, 1.5)
    with pytest.raises(ConfigError, match=f"seed={2**63}, but a seed has 64 bits"):
        dropout(x, seed=2**63)
    with pytest.raises(ShapeError, match=r"torch\.int32 \(\) on cpu"):
        dropout(x, seed=torch.tensor(1, dtype=torch.int32))
    with pytest.raises(ShapeError, match=r"x of dropout is torch\.int64"):
        dropout(torch.ones(2, dtype=torch.int64))
    with pytest.raises(DeviceError, match="'vectorised' of dropout: it runs on cuda, not on cpu"):
        dropout(x, variant="vectorised")
