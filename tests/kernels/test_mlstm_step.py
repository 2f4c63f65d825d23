"""Token by token, the mLSTM goes on where a prefill ended."""

from __future__ import annotations

import pytest
import torch

from close import assert_all_close, assert_close
from kernels.mlstm_runs import GATES, by_row, draw
from torchstorm.errors import ConfigError, ShapeError
from torchstorm.kernels import MLSTMState, mlstm, mlstm_step
from torchstorm.kernels.mlstm.reference import Gate, mlstm_recurrent


@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("prefill", [0, 1, 17])
def test_steps_after_a_prefill_are_the_whole_sequence(gate: Gate, dtype: torch.dtype, prefill: int) -> None:
    x = draw(len(GATES), 2, 30, 8, 12, dtype=dtype, gates=GATES)[:5]
    state = None
    h = []
    if prefill:
        first, state = mlstm(*(y[:, :, :prefill] for y in x), gate=gate, return_state=True)
        h = [first]
    for t in range(prefill, 30):
        out, state = mlstm_step(*(y[:, :, t] for y in x), state, gate=gate)
        h.append(out[:, :, None])
    exact, end = mlstm_recurrent(*(y.double() for y in x), gate=gate)
    plain, plain_end = mlstm_recurrent(*x, gate=gate)
    assert state is not None
    found = {"h": torch.cat(h, 2), **state._asdict()}
    floor = 1e-13 if dtype == torch.float64 else torch.finfo(dtype).eps
    assert_all_close(
        by_row(found), by_row({"h": exact, **end._asdict()}), by_row({"h": plain, **plain_end._asdict()}), floor=floor
    )
    assert found["h"].dtype == dtype
    assert {y.dtype for y in state} == {torch.float64 if dtype == torch.float64 else torch.float32}


def test_a_step_has_the_gradients_of_a_sequence_of_one() -> None:
    inputs = draw(2, 2, 1, 4, 6, dtype=torch.float64)
    tensors = [x.clone().requires_grad_() for x in (*inputs[:5], *inputs.state)]  # type: ignore[union-attr,misc]
    step, after = mlstm_step(*(x[:, :, 0] for x in tensors[:5]), MLSTMState(*tensors[5:]))
    whole, end = mlstm(*tensors[:5], initial_state=MLSTMState(*tensors[5:]), return_state=True)
    by_step = torch.autograd.grad([step.sum(), *(x.sum() for x in after)], tensors)
    by_whole = torch.autograd.grad([whole.sum(), *(x.sum() for x in end)], tensors)
    torch.testing.assert_close(by_step, by_whole)


def test_a_step_leaves_its_inputs_alone() -> None:
    inputs = draw(1, 1, 1, 4, 4)
    state = inputs.state
    assert state is not None
    before = [x.clone() for x in state]
    _, after = mlstm_step(*(x[:, :, 0] for x in inputs[:5]), state)  # type: ignore[union-attr]
    assert all(torch.equal(x, y) for x, y in zip(state, before, strict=True))
    assert all(x.data_ptr() != y.data_ptr() for x, y in zip(state, after, strict=True))


def test_a_query_of_zeros_gives_zeros_however_open_the_gate() -> None:
    zero, one = torch.zeros(1, 1, 4), torch.ones(1, 1, 4)
    h, _ = mlstm_step(zero, one, one, torch.full((1, 1), 1000.0), torch.zeros(1, 1))
    assert_close(h, zero.double())


def test_what_does_not_fit_is_told_with_its_sizes() -> None:
    q, v, gate = torch.zeros(2, 3, 4), torch.zeros(2, 3, 6), torch.zeros(2, 3)
    with pytest.raises(ShapeError, match=r"q \(2, 3, 1, 4\).*call mlstm"):
        mlstm_step(q[:, :, None], q[:, :, None], v[:, :, None], gate, gate)
    with pytest.raises(ShapeError, match=r"k \(2, 3, 5\)"):
        mlstm_step(q, torch.zeros(2, 3, 5), v, gate, gate)
    with pytest.raises(ShapeError, match=r"i \(3, 2\).*both gates must be \(2, 3\)"):
        mlstm_step(q, q, v, gate.t(), gate)
    with pytest.raises(ShapeError, match=r"C \(2, 3, 4, 5\).*need C \(2, 3, 4, 6\)"):
        mlstm_step(q, q, v, gate, gate, MLSTMState(torch.zeros(2, 3, 4, 5), q, gate))
    with pytest.raises(ConfigError, match=r"gate='relu'.*'exp', 'sigmoid'"):
        mlstm_step(q, q, v, gate, gate, gate="relu")  # type: ignore[arg-type]
