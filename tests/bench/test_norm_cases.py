"""The bench's cases of softmax and the norms: inputs that repeat, ways that agree, and sizes for what is there."""

from __future__ import annotations

import torch

from torchstorm.bench.norm_cases import norm_cases

CPU = torch.device("cpu")


def test_every_way_agrees_with_the_definition() -> None:
    cases = norm_cases("small", CPU, torch.float32)
    assert {case.op for case in cases} == {"softmax", "log_softmax", "layer_norm", "rms_norm"}
    for case in cases[::2]:
        inputs, again = case.make(CPU, 7), case.make(CPU, 7)
        assert all(torch.equal(x, again[name]) for name, x in inputs.items())
        assert case.shape == "x".join(map(str, inputs["x"].shape))
        assert case.work == {"forward": 2 * inputs["x"].nbytes, "backward": 3 * inputs["x"].nbytes}
        right = case.reference(inputs)["y"]
        assert inputs["d_y"].shape == right.shape
        assert set(case.differentiable) == inputs.keys() - {"d_y"}
        for variant in case.variants:
            torch.testing.assert_close(case.ours(inputs, variant)["y"], right)
    assert cases[0].variants == ("torch", "parallel", "auto")
    assert set(cases[0].peers) == {"torch.compile"}


def test_the_targets_are_512_mib_in_rows_of_1k_to_64k() -> None:
    cases = norm_cases("target", torch.device("meta"), torch.bfloat16)
    assert [case.shape for case in cases[:7]] == [f"{(1 << 28) // N}x{N}" for N in (1024 << i for i in range(7))]
    assert all(case.work["forward"] == 2 * (512 << 20) for case in cases)
