"""Backward passes that are to give the same bits twice: attention's gradients where cuDNN's kernel would run."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from torchstorm.offload.compiled.repeatable import Repeatable, allow_products, deterministically, is_strict

PRODUCT = """
import os, torch
from torchstorm.offload.compiled.repeatable import allow_products, deterministically
allow_products(torch.device("cuda"))
assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
x = torch.randn(512, 512, device="cuda")
with deterministically():
    assert torch.equal(x @ x, x @ x)
"""
BACKWARD: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 3),
    shared_heads=st.integers(1, 2),
    per_shared=st.integers(1, 3),
    queries=st.integers(1, 7),
    keys=st.integers(1, 7),
    width=st.sampled_from([1, 4, 5]),
    value_width=st.sampled_from([1, 4]),
    mask=st.sampled_from(["none", "causal", "bias", "bias of one head"]),
    scale=st.sampled_from([None, 0.3]),
)
def test_cudnn_attentions_backward_gives_the_gradients_of_its_definition(
    samples: int,
    shared_heads: int,
    per_shared: int,
    queries: int,
    keys: int,
    width: int,
    value_width: int,
    mask: str,
    scale: float | None,
) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = shared_heads * per_shared

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.float64, generator=generator)

    query = random(samples, heads, queries, width)
    key, value = (random(samples, shared_heads, keys, one) for one in (width, value_width))
    bias = {"bias": random(samples, heads, queries, keys), "bias of one head": random(samples, 1, queries, keys)}.get(
        mask
    )
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    is_causal = mask == "causal"
    out = scaled_dot_product_attention(query, key, value, bias, is_causal=is_causal, scale=scale, enable_gqa=True)
    grad_out = random(*out.shape)
    expected = torch.autograd.grad(out, leaves, grad_out)
    with torch.no_grad(), Repeatable():
        nothing = torch.empty(0)
        arguments = (grad_out, query, key, value, out, nothing, nothing, nothing, bias, nothing, nothing)
        found = BACKWARD(*arguments, queries, keys, 0.0, is_causal, scale=scale)
    for one, other in zip(found, expected, strict=True):
        # The scores are rounded to float32, as by the kernels.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_gradients_of_attention_have_the_inputs_strides_and_dtype() -> None:
    query, key, value = (torch.randn(2, 5, 3, 4).bfloat16().transpose(1, 2) for _ in range(3))
    nothing = torch.empty(0)
    with Repeatable():
        found = BACKWARD(query, query, key, value, query, *[nothing] * 3, None, nothing, nothing, 5, 5, 0.0, True)
    for one, other in zip(found, (query, key, value), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert math.isfinite(one.float().sum().item())


@torch.library.custom_op("torchstorm_test::notes_algorithms", mutates_args=())
def notes_algorithms(x: torch.Tensor) -> torch.Tensor:
    seen.append((torch.are_deterministic_algorithms_enabled(), is_strict()))
    return x.clone()


seen: list[tuple[bool, bool]] = []


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_deterministic_algorithms_are_on_within_an_operation_and_put_back(before: tuple[bool, bool]) -> None:
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    seen.clear()
    try:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        with Repeatable():
            notes_algorithms(torch.ones(1))
        assert seen == [(True, False)], "products would raise in strict ones"
        with pytest.raises(ZeroDivisionError), deterministically(warn_only=False):
            raise ZeroDivisionError if is_strict() else AssertionError
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        assert now == before
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])


def test_a_setting_of_the_users_own_for_products_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    allow_products(torch.device("cuda"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.gpu
def test_products_run_under_deterministic_algorithms_with_no_setting_left_that_slows_them() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
