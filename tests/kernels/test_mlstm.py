"""The mLSTM is as exact as the recurrence and the quadratic form in the same dtype, outputs and all gradients."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from close import assert_all_close, assert_close
from kernels.mlstm_runs import GATES, Inputs, by_row, draw, results, truth, yardsticks
from torchstorm.kernels import MLSTMState, mlstm, variants

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def by_op(**options: Any) -> Any:
    """A `compute` for `results`."""
    return lambda q, k, v, i, f, state, cu_seqlens, gate: mlstm(
        q, k, v, i, f, initial_state=state, return_state=True, cu_seqlens=cu_seqlens, gate=gate, **options
    )


def assert_as_exact(inputs: Inputs, *, gate: str = "exp", through_state: bool = True, **options: Any) -> None:
    """Every row by itself, since gates make some rows far larger than others."""
    found = results(by_op(**options), inputs, gate=gate, through_state=through_state)
    assert_all_close(
        by_row(found),
        by_row(truth(inputs, gate=gate, through_state=through_state)),
        *(by_row(theirs) for theirs in yardsticks(inputs, gate=gate, through_state=through_state)),
        floor=torch.finfo(inputs.q.dtype).eps,
    )


@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("state", [True, False], ids=["state", "no state"])
def test_outputs_and_gradients_with_gates_of_every_kind(dtype: torch.dtype, gate: str, state: bool) -> None:
    assert_as_exact(draw(len(GATES), 2, 65, 16, 24, dtype=dtype, gates=GATES, state=state), gate=gate, chunk=16)


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("chunk", [None, 1, 7, 100])
def test_any_length_in_any_chunks(num_tokens: int, chunk: int | None) -> None:
    assert_as_exact(draw(len(GATES), 1, num_tokens, 8, 12, gates=GATES, state=num_tokens % 2 == 0), chunk=chunk)


@pytest.mark.no_cover
def test_a_thousand_tokens() -> None:
    assert_as_exact(draw(len(GATES), 1, 1000, 16, 16, gates=GATES))


@pytest.mark.parametrize(
    ("d_qk", "d_v"), [(16, 512), (40, 96), (64, 64), (96, 40), (128, 256), (192, 16), (256, 128), (512, 192)]
)
def test_any_width_of_a_head(d_qk: int, d_v: int) -> None:
    assert_as_exact(draw(1, 1, 20, d_qk, d_v), chunk=8)
    assert_as_exact(draw(1, 1, 20, d_qk, d_v, dtype=torch.bfloat16), chunk=8)


def test_the_gradients_of_outputs_alone() -> None:
    assert_as_exact(draw(len(GATES), 1, 40, 8, 12, gates=GATES), through_state=False)


@pytest.mark.no_cover
def test_many_tokens_against_the_recurrence() -> None:
    # Without yardsticks: float32 is computed in float64, so rounding the results is all that is allowed.
    inputs = draw(2, 1, 2048, 16, 16, gates=("remember", "wild"), state=False)
    assert_all_close(by_row(results(by_op(), inputs)), by_row(truth(inputs)))


@pytest.mark.no_cover
def test_very_many_tokens() -> None:
    inputs = draw(1, 1, 2**16 + 64, 16, 16, state=False)
    found = results(by_op(), inputs)
    assert_close(found["h"][0, 0], torch.from_numpy(outputs_in_numpy(inputs)))
    # Gradients against another chunk size in float64, which the tests above hold to the recurrence.
    assert_all_close(found, results(by_op(chunk=256), inputs.to(torch.float64)))


def outputs_in_numpy(inputs: Inputs) -> np.ndarray[Any, Any]:
    """The recurrence of one head, written a second time, since a loop over so many tokens takes torch too long."""
    q, k, v, i, f = (x[0, 0].double().numpy() for x in inputs[:5])
    q = q * q.shape[1] ** -0.5
    log_f = -np.logaddexp(0.0, -f)
    C, n, m = np.zeros((q.shape[1], v.shape[1])), np.zeros(q.shape[1]), 0.0
    h = np.empty_like(v)
    for t in range(len(q)):
        past, m = log_f[t] + m, max(log_f[t] + m, i[t])
        keep, write = np.exp(past - m), np.exp(i[t] - m) * k[t]
        C *= keep
        C += np.multiply.outer(write, v[t])
        n = keep * n + write
        h[t] = q[t] @ C / max(abs(q[t] @ n), np.exp(-m))
    return h


@pytest.mark.no_cover
@settings(deadline=None, max_examples=50, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_the_shape(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    lengths = data.draw(st.none() | st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(sum))
    inputs = draw(
        1 if lengths else data.draw(st.integers(1, 2)),
        data.draw(st.integers(1, 2)),
        sum(lengths) if lengths else data.draw(st.integers(1, 40)),
        data.draw(st.integers(1, 20)),
        data.draw(st.integers(1, 20)),
        dtype=data.draw(st.sampled_from(DTYPES)),
        gates=data.draw(st.sampled_from(GATES)),
        state=data.draw(st.booleans()),
        lengths=lengths,
    )
    gate = data.draw(st.sampled_from(["exp", "sigmoid"]))
    found = results(by_op(chunk=data.draw(st.none() | st.integers(1, 50))), inputs, gate=gate)
    floor = torch.finfo(inputs.q.dtype).eps
    assert_all_close(found, truth(inputs, gate=gate), *yardsticks(inputs, gate=gate), floor=floor)


@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
def test_packed_sequences_give_the_bits_that_each_gives_alone(gate: str, offsets_dtype: torch.dtype) -> None:
    lengths = [3, 0, 70, 1, 27]
    packed = draw(1, 2, sum(lengths), 8, 12, lengths=lengths)
    packed = packed._replace(cu_seqlens=packed.cu_seqlens.to(offsets_dtype))  # type: ignore[union-attr]
    together = results(by_op(chunk=4), packed, gate=gate)
    first = 0
    for n, length in enumerate(lengths):
        here, row = slice(first, first + length), slice(n, n + 1)
        first += length
        q, k, v, i, f = (x[:, :, here] for x in packed[:5])
        state = MLSTMState(*(x[row] for x in packed.state))  # type: ignore[union-attr]
        h, *rest = packed.loss
        alone = Inputs(q, k, v, i, f, state, None, (h[:, :, here], *(x[row] for x in rest)))  # type: ignore[arg-type]
        for name, x in results(by_op(chunk=4), alone, gate=gate).items():
            per_sequence = name in ("C", "n", "m", "dC0", "dn0", "dm0")
            assert torch.equal(together[name][row] if per_sequence else together[name][:, :, here], x), name


def test_two_halves_continue_each_other() -> None:
    inputs = draw(2, 2, 50, 8, 12, dtype=torch.float64)
    q, k, v, i, f = inputs[:5]
    whole, end = mlstm(q, k, v, i, f, return_state=True)
    first, middle = mlstm(*(x[:, :, :20] for x in inputs[:5]), return_state=True)
    second, last = mlstm(*(x[:, :, 20:] for x in inputs[:5]), initial_state=middle, return_state=True)
    torch.testing.assert_close(torch.cat([first, second], 2), whole)
    torch.testing.assert_close(tuple(last), tuple(end))


@pytest.mark.parametrize("variant", ["recurrent", "quadratic", "chunkwise"])
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_every_variant_computes_the_mlstm(variant: str, gate: str) -> None:
    assert variant in variants("mlstm")
    for lengths in (None, [7, 0, 13]):
        inputs = draw(1, 2, 20, 8, 12, lengths=lengths, dtype=torch.float64)
        found = results(by_op(variant=variant), inputs, gate=gate)
        assert_all_close(found, truth(inputs, gate=gate), floor=1e-12)
    half = draw(1, 2, 20, 8, 12, dtype=torch.bfloat16)
    h, state = by_op(variant=variant)(*half[:6], None, gate)
    assert (h.dtype, {x.dtype for x in state}) == (torch.bfloat16, {torch.float32})


def test_gates_may_be_more_exact_than_the_rest() -> None:
    inputs = draw(2, 2, 30, 8, 12, dtype=torch.bfloat16)
    wide = inputs._replace(i=inputs.i.float(), f=inputs.f.float())
    same, found = results(by_op(), inputs), results(by_op(), wide)
    assert found["di"].dtype == found["df"].dtype == torch.float32
    assert all(torch.equal(found[name].to(same[name].dtype), same[name]) for name in same)


def test_the_same_bits_twice_and_from_any_strides() -> None:
    inputs = draw(2, 3, 70, 8, 12)
    found = results(by_op(), inputs)

    def strided(x: Tensor) -> Tensor:
        wide = torch.full((*x.shape[:2], 2 * x.shape[2], *x.shape[3:]), torch.nan)
        wide[:, :, ::2] = x
        return wide[:, :, ::2].transpose(0, 1).contiguous().transpose(0, 1) if x.dim() == 3 else wide[:, :, ::2]

    again = inputs._replace(
        **{name: strided(getattr(inputs, name)) for name in "qvif"},
        k=inputs.k.transpose(1, 2).contiguous().transpose(1, 2),
        loss=(inputs.loss[0].mT.contiguous().mT, *inputs.loss[1:]),
    )
    assert not again.k.is_contiguous()
    for other in (inputs, again):
        assert all(torch.equal(x, found[name]) for name, x in results(by_op(), other).items())


@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_memory_that_holds_nans_changes_no_bit(gate: str) -> None:
    inputs = draw(1, 2, 40, 8, 12, lengths=[25, 0, 15])
    found = results(by_op(chunk=2), inputs, gate=gate)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty makes with NaN
    assert torch.empty(3).isnan().all()
    again = results(by_op(chunk=2), inputs, gate=gate)
    assert all(torch.equal(x, again[name]) for name, x in found.items())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_zeros_and_shut_gates_give_no_nan(dtype: torch.dtype, gate: str) -> None:
    for fill in (0.0, 1000.0, -1000.0):
        inputs = draw(2, 1, 20, 8, 8, dtype=dtype, state=False)
        inputs = inputs._replace(q=inputs.q * 0, i=torch.full_like(inputs.i, fill))
        h = mlstm(*inputs[:5], gate=gate)  # type: ignore[arg-type]
        assert torch.equal(h, torch.zeros_like(h))
    shut = torch.full_like(inputs.i, -torch.inf)
    found, state = mlstm(inputs.k, inputs.k, inputs.v, shut, inputs.f, gate=gate, return_state=True, chunk=4)
    assert not found.any()
    assert not state.C.any()


def test_a_state_scaled_by_nothing_is_no_state() -> None:
    inputs = draw(2, 2, 20, 8, 12)
    state = inputs.state._replace(m=torch.full((2, 2), -torch.inf))  # type: ignore[union-attr]
    h = mlstm(*inputs[:5], initial_state=state, chunk=8)  # type: ignore[arg-type]
    assert torch.equal(h, mlstm(*inputs[:5], chunk=8))  # type: ignore[arg-type]


@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
@pytest.mark.parametrize(("B", "S"), [(0, 5), (2, 0), (0, 0)])
def test_nothing_at_all_gives_nothing(gate: str, B: int, S: int) -> None:
    for state in (True, False):
        inputs = draw(B, 2, S, 4, 6, state=state)
        found = results(by_op(), inputs, gate=gate)
        assert_all_close(found, truth(inputs, gate=gate), floor=1e-6)


def test_it_costs_in_proportion_to_the_tokens() -> None:
    def saved_bytes(num_tokens: int) -> int:
        kept: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        inputs = [x.requires_grad_() for x in draw(1, 1, num_tokens, 16, 16, state=False)[:5]]  # type: ignore[union-attr]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            mlstm(*inputs)
        return sum(kept.values())

    assert saved_bytes(4096) < 2.1 * saved_bytes(2048)
    # q, k, v, h, the gates, and one state of 16 x 17 numbers in float64 a group of 512 tokens.
    assert saved_bytes(4096) < 4096 * (4 * 16 + 2 + 2 * 16 * 17 / 512 + 1) * 4
