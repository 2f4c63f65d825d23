"""The small cases of linear and linear_cross_entropy: every variant is the same function as the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torchstorm.bench.linear_cases import linear_cases, linear_cross_entropy_cases
from torchstorm.bench.op_cases import OpCase

CPU = torch.device("cpu")


@pytest.mark.parametrize("cases", [linear_cases, linear_cross_entropy_cases])
def test_small_cases(cases: Callable[..., tuple[OpCase, ...]]) -> None:
    for case in cases("small", CPU, torch.float32):
        inputs = case.make(CPU, 0)
        assert all(torch.equal(t, again) for t, again in zip(inputs.values(), case.make(CPU, 0).values(), strict=True))
        assert case.variants[-1] == "auto"
        assert "torch.compile" in case.peers
        leaves = {name: t.requires_grad_(name in case.differentiable) for name, t in inputs.items()}
        wanted = [leaves[name] for name in case.differentiable]
        expected = case.reference(leaves)
        (name,) = expected
        assert inputs[f"d_{name}"].shape == expected[name].shape
        truth = [expected[name], *torch.autograd.grad(expected[name], wanted, inputs[f"d_{name}"])]
        for variant in case.variants:
            found = case.ours(leaves, variant)[name]
            grads = torch.autograd.grad(found, wanted, inputs[f"d_{name}"])
            torch.testing.assert_close([found, *grads], truth)


def test_mixed_is_timed_in_bfloat16() -> None:
    case = linear_cases("small", CPU, torch.bfloat16)[0]
    assert "mixed" in case.variants
    inputs = case.make(CPU, 0)
    torch.testing.assert_close(case.ours(inputs, "mixed"), case.reference(inputs))


def test_target_cases_are_the_issue_s() -> None:
    linear = linear_cases("target", CPU, torch.bfloat16)[0]
    loss, _, whole = linear_cross_entropy_cases("target", CPU, torch.bfloat16)
    assert (linear.shape, loss.shape) == ("16384x4096x16384 gelu", "32768x4096x131072")
    assert linear.work["forward"] == 2 * 16384 * 4096 * 16384
    assert loss.work["both"] == 3 * loss.work["forward"] == 6 * (32768 - 32768 // 8) * 4096 * 131072
    assert (whole.shape, whole.work["forward"]) == ("32768x4096x131072 all count", 2 * 32768 * 4096 * 131072)


def test_the_truth_of_the_loss_is_its_definition_some_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchstorm.bench.linear_cases._TRUE_ROWS", 100)
    (case,) = linear_cross_entropy_cases("small", CPU, torch.float64)
    inputs = case.make(CPU, 0)
    leaves = {name: inputs[name].requires_grad_() for name in ("x", "weight")}
    assert case.truth is not None
    ours, plain = case.truth(inputs)["loss"], case.reference(inputs)["loss"]
    assert torch.allclose(ours, plain, rtol=1e-12)
    grads = zip(*(torch.autograd.grad(loss, list(leaves.values())) for loss in (ours, plain)), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-10, atol=1e-14) for one, other in grads)
