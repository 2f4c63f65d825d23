"""Autocast reaches what is given to an operation, and nothing that runs inside of it: sums stay in fp32."""

from __future__ import annotations

import pytest
import torch

from kernels.operator_checks import assert_same_bits_under_autocast
from torchstorm.kernels import mlstm, mlstm_step, variants
from torchstorm.kernels.slstm import slstm

Tensors = tuple[torch.Tensor, ...]


def normal(*shapes: tuple[int, ...]) -> Tensors:
    return tuple(torch.randn(shape).requires_grad_() for shape in shapes)


@pytest.mark.parametrize("variant", [name for name in variants("mlstm") if not name.startswith("triton")])
def test_mlstm(variant: str) -> None:
    q, k, v, i, f = normal(*[(2, 3, 70, 16)] * 3, *[(2, 3, 70)] * 2)
    assert_same_bits_under_autocast(lambda: mlstm(q, k, v, i, f, variant=variant), (q, k, v, i, f))


def test_mlstm_step() -> None:
    q, k, v, i, f = normal(*[(2, 3, 16)] * 3, *[(2, 3)] * 2)
    assert_same_bits_under_autocast(lambda: mlstm_step(q, k, v, i, f)[0], (q, k, v, i, f))


def test_slstm() -> None:
    x, r = normal((2, 20, 3, 4, 5), (3, 5, 20))
    assert_same_bits_under_autocast(lambda: slstm(x, r)[0], (x, r))
