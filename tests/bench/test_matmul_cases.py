"""What the bench of matmul is given: the same inputs every time, ways that agree, and the work that there is."""

from __future__ import annotations

import torch

from torchstorm.bench.matmul_cases import matmul_cases

CPU = torch.device("cpu")


def test_small_cases_run_every_way_and_agree() -> None:
    for case in matmul_cases("small", CPU, torch.float32):
        inputs, again = case.make(CPU, 3), case.make(CPU, 3)
        assert all(torch.equal(inputs[name], again[name]) for name in inputs)
        assert set(inputs) == {*case.differentiable, "d_c"}
        c = case.reference(inputs)["c"]
        assert c.shape == inputs["d_c"].shape
        for variant in case.variants:
            torch.testing.assert_close(case.ours(inputs, variant)["c"], c, rtol=1e-4, atol=1e-4)
        M, N, K = (int(size) for size in case.shape.split("x")[-3:])
        assert case.work["forward"] == 2 * c.numel() * K
        assert case.work["backward"] == 2 * case.work["forward"]
        assert c.shape[-2:] == (M, N)


def test_the_variants_are_those_that_run_here() -> None:
    (case, *_) = matmul_cases("target", CPU, torch.bfloat16)
    assert "torch" in case.variants
    assert case.variants[-1] == "auto"
    assert "wgmma" not in case.variants
    assert case.shape == "1000x1000x1000"
    assert "8192x8192x8192" in [case.shape for case in matmul_cases("target", torch.device("meta"), torch.bfloat16)]
