"""Steps that are compared: which gradients pass, and what a check leaves behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchstorm.bench.measure import Context, Meter, Training
from torchstorm.bench.sessions import CHECKED_STEPS, PLANNED_STEPS
from torchstorm.bench.ways import keep_everything
from torchstorm.errors import OutOfVRAMError
from torchstorm.offload import session as offload_session
from torchstorm.offload.replan.plans import Plans
from torchstorm.offload.session import Session


def make_training(*, optimizer: bool = False) -> Training:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))

    def data(seed: int) -> torch.Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))

    def loss(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(x).square().mean()
        return found

    adam = torch.optim.AdamW(model.parameters()) if optimizer else None
    return Training(model=model, device=torch.device("cpu"), data=data, loss=loss, optimizer=adam)


def after(change: Any, *, turn: int = 1) -> Context:
    """A context that does something after forward and backward, in one of its turns."""
    calls = 0

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        nonlocal calls
        calls += 1
        yield
        if calls == turn:
            change()

    return context


@pytest.mark.parametrize("optimizer", [False, True])
def test_the_same_training_passes(optimizer: bool) -> None:
    meter = Meter(make_training(optimizer=optimizer))
    reference = meter.reference(keep_everything, steps=3)
    assert reference.bits
    assert reference.note == ""
    assert reference.steps[0] != reference.steps[1], "every step has data of its own"
    meter.time(keep_everything, warm=1, steps=2)
    assert meter.compare(keep_everything, reference, enough=lambda steps: steps == 3) == ""


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_one_bit_of_one_gradient_in_one_step_is_named(turn: int) -> None:
    training = make_training()
    meter = Meter(training)
    reference = meter.reference(keep_everything, steps=3)

    def flip() -> None:
        gradient = training.model[0].bias.grad  # type: ignore[index]
        assert isinstance(gradient, torch.Tensor)
        gradient.view(torch.int32)[0] ^= 1

    found = meter.compare(after(flip, turn=turn), reference, enough=lambda steps: steps == 3)
    assert found == f"in step {turn} the bits of 0.bias differ"


def test_a_buffer_a_missing_gradient_and_all_of_them_missing_are_seen() -> None:
    training = make_training()
    meter = Meter(training)
    reference = meter.reference(keep_everything, steps=2)
    norm: Any = training.model[1]  # type: ignore[index]
    assert "1.running_mean" in meter.compare(after(lambda: norm.running_mean.add_(1)), reference)
    assert "1.weight" in meter.compare(after(lambda: setattr(norm.weight, "grad", None)), reference)
    assert "3 more" in meter.compare(after(lambda: training.model.zero_grad(set_to_none=True)), reference)
    assert meter.compare(keep_everything, reference) == "", "buffers are what they were again"


def test_too_few_steps_do_not_pass() -> None:
    meter = Meter(make_training())
    reference = meter.reference(keep_everything, steps=2)
    found = meter.compare(keep_everything, reference, enough=lambda steps: False)
    assert found == "2 steps agree, but that is too few to tell"


def test_gradients_are_compared_by_size_where_bits_cannot_be_asked_for() -> None:
    training = make_training()
    meter = Meter(training)
    reference = replace(meter.reference(keep_everything, steps=2, keep_gradients=True), bits=False)
    assert reference.gradients.keys() == dict(training.model.named_parameters()).keys()

    def scale(factor: float) -> None:
        for parameter in training.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)

    error, wrong = meter.compare_size(after(lambda: scale(1.01)), reference)
    assert error == pytest.approx(0.01, rel=1e-3)
    assert wrong == ""
    assert meter.compare_size(after(lambda: scale(1.1)), reference)[1] == "they are off by 10.0%, more than 5%"
    assert meter.compare(keep_everything, reference) == ""


@pytest.mark.parametrize("same_random", [False, True])
def test_where_random_numbers_matter_gradients_are_compared_under_the_references_algorithms(same_random: bool) -> None:
    meter = Meter(make_training())
    reference = meter.reference(keep_everything, steps=1, keep_gradients=True)
    seen: list[bool] = []
    look = after(lambda: seen.append(torch.are_deterministic_algorithms_enabled()))
    assert meter.compare_size(look, reference, same_random=same_random) == (0.0, "")
    assert seen == [same_random]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("same", [True, False])
def test_an_operation_without_a_deterministic_form_is_told(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training()
    calls = 0

    def loss(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError("some_op_cuda does not have a deterministic implementation, but you set ...")
        found: torch.Tensor = training.model(x).square().mean()
        return found if same else found * (1 + calls * 1e-3)

    reference = Meter(replace(training, loss=loss)).reference(keep_everything, steps=2)
    assert reference.bits == same
    assert reference.note.startswith("some_op_cuda cannot run deterministically, ")
    assert reference.note.endswith("agree to the last bit" if same else "compared by size")
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_other_errors_are_not_taken_for_that() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        Meter(replace(make_training(), loss=loss)).reference(keep_everything, steps=1)


def test_a_step_that_ran_out_of_memory_is_repeated_with_the_same_numbers() -> None:
    meter = Meter(make_training())
    reference = meter.reference(keep_everything, steps=2)
    failures = 0

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        nonlocal failures
        yield
        if failures < 2:
            failures += 1
            meter.training.model.zero_grad(set_to_none=True)
            meter.training.model.load_state_dict(start)
            raise OutOfVRAMError("repeat the step")

    meter._reset()
    start = {name: value.clone() for name, value in meter.training.model.state_dict().items()}
    assert meter.compare(context, reference) == ""
    assert meter.num_repeated == 2


def test_a_step_that_runs_out_of_memory_again_and_again_fails() -> None:
    @contextlib.contextmanager
    def context() -> Iterator[None]:
        yield
        raise OutOfVRAMError("repeat the step")

    meter = Meter(make_training())
    with pytest.raises(OutOfVRAMError):
        meter.step(context)
    assert meter.num_repeated == 2


def test_a_step_leaves_no_gradients_and_an_optimizer_changes_the_weights() -> None:
    for optimizer in (False, True):
        training = make_training(optimizer=optimizer)
        before = [parameter.detach().clone() for parameter in training.model.parameters()]
        timing = Meter(training).time(keep_everything, warm=0, steps=3)
        assert len(timing.seconds) == 3
        assert min(timing.seconds) <= timing.median_s <= max(timing.seconds)
        assert len(timing.host_seconds) == 3
        assert all(0 < host <= step for host, step in zip(timing.host_seconds, timing.seconds, strict=True))
        assert timing.host_s in timing.host_seconds
        assert all(parameter.grad is None for parameter in training.model.parameters())
        changed = [not torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True)]
        assert any(changed) == optimizer


@pytest.mark.no_cover
def test_a_session_that_measures_as_on_a_gpu_follows_a_plan_often_enough_to_be_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(offload_session, "Plans", lambda given, _: Plans(given, 4))
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    planned = []
    with Session(model, ram="800KiB", disk=str(tmp_path)) as session:
        for _ in range(CHECKED_STEPS):
            with session.step():
                model(torch.randn(512, 64)).sum().backward()
            planned.append(session.report().num_planned)
    assert planned[-1] >= PLANNED_STEPS
    assert planned[4] < PLANNED_STEPS, "two must follow a plan after the last one that is measured"


def test_where_batches_differ_in_size_a_step_is_timed_for_as_much_as_the_largest_and_all_ways_have_the_same() -> None:
    seen: list[int] = []

    def share(seed: int) -> float:
        seen.append(seed)
        return 0.25

    whole, training = make_training(), replace(make_training(), share=share)
    meter = Meter(training)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", iter(range(100)).__next__)
        step, timing = Meter(whole).step(contextlib.nullcontext), meter.time(contextlib.nullcontext, warm=1, steps=2)
    assert timing.seconds == tuple(4 * second for second in step.seconds * 2)
    assert timing.host_seconds == tuple(4 * second for second in step.host_seconds * 2)
    first, *sizes, one, other = seen
    assert sizes == [one, other], "libraries have chosen their kernels when they are timed"
    meter.time(contextlib.nullcontext, warm=1, steps=2)
    assert seen[5] != first, "which warms up"
    assert seen[6:] == [one, other] * 2
