"""kernels/slstm.py: against its definition, over extremes, from state to state, as an operator."""

from __future__ import annotations

import math

import pytest
import torch

from torchstorm.errors import ShapeError
from torchstorm.kernels.slstm import SLSTMState, slstm, slstm_reference


def inputs(
    S: int, *, B: int = 2, H: int = 3, D: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    x, r = 3 * torch.randn(B, S, H, 4, D, dtype=torch.float64), 0.4 * torch.randn(H, D, 4 * D, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), r.to(dtype).requires_grad_()


@pytest.mark.parametrize("S", [1, 2, 63, 64, 65])
def test_outputs_and_gradients_are_the_definitions(S: int) -> None:
    x, r = inputs(S)
    weight = torch.randn(2, S, 3, 5, dtype=torch.float64)
    expected, (found, _) = slstm_reference(x, r), slstm(x, r)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad((expected * weight).sum(), (x, r))
    for one, other in zip(torch.autograd.grad((found * weight).sum(), (x, r)), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_errs_no_more_than_twice_the_definition_in_it(dtype: torch.dtype) -> None:
    x, r = inputs(65, dtype=dtype)
    weight = torch.randn(2, 65, 3, 5).to(dtype)
    x64, r64 = x.detach().double().requires_grad_(), r.detach().double().requires_grad_()
    exact = slstm_reference(x64, r64)
    exact_grads = torch.autograd.grad((exact * weight.double()).sum(), (x64, r64))

    def errors(h: torch.Tensor) -> list[float]:
        grads = torch.autograd.grad((h * weight).sum(), (x, r))
        pairs = zip((h, *grads), (exact, *exact_grads), strict=True)
        return [(one.double() - other).norm().item() for one, other in pairs]

    for found, yardstick in zip(errors(slstm(x, r)[0]), errors(slstm_reference(x, r)), strict=True):
        assert found <= 2 * yardstick + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("gate", "value"), [(0, -30.0), (0, 30.0), (1, -30.0), (1, 30.0)])
def test_extreme_gates_give_finite_values(gate: int, value: float, dtype: torch.dtype) -> None:
    x, r = inputs(200, dtype=dtype)
    with torch.no_grad():
        x[:, :, :, gate] = value
    h, state = slstm(x, r)
    grads = torch.autograd.grad(h.float().sum(), (x, r))
    for tensor in (h, *state, *grads):
        assert tensor.isfinite().all()


def test_a_sequence_cut_anywhere_goes_on_exactly() -> None:
    x, r = inputs(13)
    whole, last = slstm(x, r)
    state, parts = None, []
    for part in x.split([1, 1, 7, 4], dim=1):
        h, state = slstm(part, r, initial_state=state)
        parts.append(h)
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert state is not None
    assert all(torch.equal(one, other) for one, other in zip(state, last, strict=True))


def test_the_same_bits_twice_and_from_strided_inputs() -> None:
    x, r = inputs(20, dtype=torch.float32)
    strided = x.detach().transpose(0, 3).contiguous().transpose(0, 3).requires_grad_()
    assert not strided.is_contiguous()
    first, again, other = (slstm(given, r)[0] for given in (x, x, strided))
    assert torch.equal(first, again)
    assert torch.equal(first, other)
    (one,), (two,) = torch.autograd.grad(first.sum(), x), torch.autograd.grad(other.sum(), strided)
    assert torch.equal(one, two)


def test_the_operator_is_what_it_says() -> None:
    x, r = inputs(5)
    zeros = torch.zeros(2, 3, 5, dtype=torch.float64)
    start = zeros, zeros, zeros, torch.full_like(zeros, -math.inf)
    forward, backward = torch.ops.torchstorm.slstm_fwd.default, torch.ops.torchstorm.slstm_bwd.default
    torch.library.opcheck(forward, (x, r, *start))
    x, r = x.detach(), r.detach()
    made = forward(x, r, *start)
    torch.library.opcheck(backward, (torch.randn_like(made[0]), x, r, *made, *start))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_compiles_without_a_break() -> None:
    torch.compiler.reset()
    x, r = inputs(9)
    compiled = torch.compile(lambda x, r: slstm(x * 1.0, r)[0].sum(), fullgraph=True, backend="aot_eager")
    expected = slstm(x * 1.0, r)[0].sum()
    found = compiled(x, r)
    assert torch.equal(found, expected)
    for one, other in zip(torch.autograd.grad(found, (x, r)), torch.autograd.grad(expected, (x, r)), strict=True):
        assert torch.equal(one, other)


def test_what_does_not_fit_is_refused_with_its_sizes() -> None:
    x, r = inputs(4)
    with pytest.raises(ShapeError, match=r"x has shape \(2, 4, 3, 20\)"):
        slstm(x.flatten(3), r)
    with pytest.raises(ShapeError, match=r"r has shape \(3, 5, 10\), but x of .* needs \(H, D, 4 D\) = \(3, 5, 20\)"):
        slstm(x, r[:, :, :10])
    with pytest.raises(ShapeError, match=r"x is torch.float64 on cpu and r torch.float32"):
        slstm(x, r.float())
    state = SLSTMState(*(torch.zeros(2, 3, 4, dtype=torch.float64) for _ in range(4)))
    with pytest.raises(ShapeError, match=r"state's h has shape \(2, 3, 4\), but x of .* needs .* \(2, 3, 5\)"):
        slstm(x, r, initial_state=state)


def test_the_fused_steps_are_the_plain_ones_in_the_interpreter() -> None:
    """In another process, since Triton decides when it is imported whether it interprets."""
    import os
    import subprocess
    import sys

    pytest.importorskip("triton")
    code = """
import torch
from torchstorm.kernels import slstm, slstm_triton
torch.manual_seed(0)
raw = 3 * torch.randn(3, 2, 4, 20)
c, n, m = torch.randn(3, 2, 20), torch.rand(3, 2, 20) + 0.1, torch.randn(3, 2, 20)
m[0], c[0], n[0] = -torch.inf, 0, 0
kept = torch.randn(3, 7, 2, 20)  # a step's states lie between those of others
kept[:, 2] = c
plain, fused = slstm._step_fwd(raw, c, n, m), slstm_triton.launch_step_fwd(raw, kept[:, 2], n, m)
for one, other in zip(plain, fused, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
dh, dc, dn = (torch.randn(3, 2, 20) for _ in range(3))
given = raw, dh, dc, dn, plain[1:], (c, n, m)
for one, other in zip(slstm._step_bwd(*given), slstm_triton.launch_step_bwd(*given), strict=True):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gives_what_the_cpu_gives(dtype: torch.dtype) -> None:
    x, r = inputs(65, D=40, dtype=dtype)
    r = (r.detach() * 0.3).requires_grad_()
    weight = torch.randn(2, 65, 3, 40).to(dtype)
    expected, _ = slstm(x, r)
    wanted = (expected, *torch.autograd.grad((expected * weight).sum(), (x, r)))
    x_gpu, r_gpu = (tensor.detach().cuda().requires_grad_() for tensor in (x, r))
    found, _ = slstm(x_gpu, r_gpu)
    again, _ = slstm(x_gpu, r_gpu)
    assert torch.equal(found, again)
    given = (found, *torch.autograd.grad((found * weight.cuda()).sum(), (x_gpu, r_gpu)))
    for one, other in zip(given, wanted, strict=True):
        error = (one.cpu().double() - other.double()).norm() / other.double().norm()
        assert error < (1e-5 if dtype == torch.float32 else 3e-2)
