"""Steps of sizes that were never seen: they follow a plan from the first one on, and one that no plan fits raises
before the model runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import nn

from offload import families
from offload.rehearsed import Fast, Rehearsal
from torchstorm.errors import BudgetError
from torchstorm.offload.replan import foresight
from torchstorm.offload.replan.planned import Planned
from torchstorm.offload.session import Session
from torchstorm.offload.step import step as step_module
from torchstorm.offload.step.pace import Pace
from torchstorm.offload.step.saving import buffers_of
from torchstorm.offload.step.shared import Retiming
from torchstorm.offload.step.tracing import Recorder
from torchstorm.plan.forecast import forecast_s
from torchstorm.plan.scaled import Known, scaled
from torchstorm.plan.trace import Trace, taking

SHORT, LONGER, LONG, TOO_LONG = 64, 96, 160, 512


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def gradients(model: nn.Module, length: int, session: Session | None, *, batch: int = 4) -> list[torch.Tensor]:
    ids = torch.randint(0, 128, (batch, length), generator=torch.Generator().manual_seed(length))
    if session is None:
        model(input_ids=ids, labels=ids).loss.backward()
    else:
        with session.step():
            model(input_ids=ids, labels=ids).loss.backward()
    found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    return found


def unlimited_bytes(length: int) -> int:
    session = Session(model := llama(), unlimited=True)
    gradients(model, length, session)
    return session.usage().ram_bytes


@pytest.fixture
def foreseen(monkeypatch: pytest.MonkeyPatch) -> list[Planned | None]:
    """What was foreseen since."""
    found: list[Planned | None] = []

    def noted(*args: Any, **kwargs: Any) -> Planned | None:
        found.append(foresight.foresee(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(step_module, "foresee", noted)
    return found


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Trace]:
    """All steps that were traced."""
    found: list[Trace] = []
    trace = Recorder.trace

    def noted(self: Recorder) -> Trace:
        found.append(trace(self))
        return found[-1]

    monkeypatch.setattr(Recorder, "trace", noted)
    return found


def _bytes(trace: Trace) -> tuple[object, ...]:
    """All that another trace of the same step has, too. The modules of small storages are those of their buffers."""
    return (
        [one.signature for one in trace.moments],
        [replace(one, block="") for one in trace.storages],
        [replace(one, block="") for one in trace.parcels],
        trace.values,
        [(one.name, one.inputs, one.outputs, one.number) for one in trace.ops],
    )


@pytest.mark.no_cover
def test_on_a_gpu_two_sizes_that_are_nearly_the_same_tell_of_a_much_larger_one_only_that_it_does_not_fit(
    foreseen: list[Planned | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, nearly = Rehearsal(monkeypatch, link_bytes_per_s=1e12), SHORT + 1
    with gpu.meter, gpu.session(model := llama(), vram := 2**24) as session:
        for length in (SHORT, SHORT, nearly, nearly, nearly + 2):
            gradients(model, length, session)
        told = foreseen[-1]
        gradients(model, LONG, session)
        untold = foreseen[-1]
        highest = session.report().highest
        gradients(model, 2 * LONG, session)  # of which such a step tells
        told_by_more = foreseen[-1]
        forwards: list[object] = []
        begins = model.get_submodule("model.layers.0").register_forward_pre_hook(lambda *_: forwards.append(None))
        with begins, pytest.raises(BudgetError):
            gradients(model, 32 * LONG, session)
    assert told is not None
    assert untold is None
    assert highest is not None
    assert highest.vram_bytes <= vram
    assert told_by_more is not None
    assert not forwards


@pytest.mark.no_cover
def test_better_plans_keep_free_what_may_be_missing_from_a_forecast_until_such_a_step_has_shown_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a step that was never seen, a forecast knows nothing of what an allocator rounds up."""
    gpu, rounded_bytes, peak_bytes = Rehearsal(monkeypatch, link_bytes_per_s=1e12), 2**12, Fast.peak_bytes
    with gpu.meter, gpu.session(model := llama(), 2**30) as session:
        planner = session._shared.planner

        def kept_free(planned: Planned) -> int:
            assert planned.plan is not None
            planner._search_beside(asked := Mock(), planned, planned.plan, planned.trace, limit_s=1.0)
            (problem,) = asked.ask.call_args.args
            return int(problem.spare.vram)

        for _ in range(4):
            gradients(model, LONGER, session)
        seen = session._shared.plans.in_force
        assert seen is not None
        unseen = planner.plan(seen.trace, base_bytes=seen.base_bytes, num_measured=1)
        assert kept_free(unseen) == planner.unseen_bytes > rounded_bytes
        unseen.took_bytes(unseen.forecast.vram_bytes - 1, is_exact=False)  # a shorter one shows nothing of it
        assert kept_free(unseen) == planner.unseen_bytes

        monkeypatch.setattr(Fast, "peak_bytes", lambda self: peak_bytes(self) + rounded_bytes)
        gradients(model, LONGER, session)
        last = session._shared.measured.last
        assert last is not None
        assert session._shared.plans.in_force is seen
        assert kept_free(seen) == last.vram_bytes - seen.forecast.vram_bytes > 0


@pytest.mark.parametrize("disk", [True, False], ids=["RAM and disk", "RAM alone"])
@pytest.mark.parametrize("family", ["Llama", "GPT-2", "BERT", "T5", "ViT", "Whisper", "Qwen2 MoE"])
def test_traces_of_other_sizes_are_foreseen_to_the_byte(
    family: str, disk: bool, traces: list[Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = families.FAMILIES[family].make(dropout=False)
    sizes = [(2, 24), (3, 24), (2, 32), (5, 48)] if family not in ("ViT", "Whisper") else [(2, 24), (3, 24), (7, 24)]
    seen: list[Known] = []
    for batch, length in sizes:
        monkeypatch.setattr(families, "BATCH", batch)
        monkeypatch.setattr(families, "LENGTH", length)
        inputs = families.FAMILIES[family].batch()
        with Session(model, ram="1GiB", disk=str(tmp_path) if disk else None) as session, session.step():
            model(**inputs).loss.backward()
        seen.append(Known(tuple(size for one in inputs.values() for size in one.shape), traces[-1]))
    foretold = scaled(seen[:-1], seen[-1].sizes, buffers_of(2**30, can_move=disk))
    assert foretold is not None
    for one, other in zip(_bytes(foretold), _bytes(traces[-1]), strict=True):
        assert one == other


@pytest.mark.no_cover
def test_on_a_gpu_a_plan_for_a_step_that_was_never_seen_keeps_more_free_where_it_can(
    foreseen: list[Planned | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=1e12)
    with gpu.meter:
        with gpu.session(model := llama(), 2**40) as session:
            for _ in range(3):
                gradients(model, LONG, session)
            kept_bytes = session.usage().vram_bytes
        base_bytes = sum(one.nbytes for one in model.parameters())
        vram = base_bytes + (kept_bytes - base_bytes) * 6 // 10
        del model, session
        with gpu.session(model := llama(), vram) as session:
            for length in (SHORT, SHORT, LONGER, LONGER, LONG):
                gradients(model, length, session)
            unseen = foreseen[-1]
            gradients(model, LONG, session)
            plan = session.plan()
    assert unseen is not None
    assert plan is not None
    assert unseen.forecast.vram_bytes <= vram - vram // 100
    assert plan.forecast.vram_bytes <= vram - vram // 100, "the step has shown how little it takes by one plan alone"


@pytest.mark.no_cover
def test_on_a_gpu_a_foreseen_step_is_timed_and_its_memory_is_not_measured_anew(
    foreseen: list[Planned | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, began = Rehearsal(monkeypatch, link_bytes_per_s=1e12), list[type]()
    for kind in (Recorder, Pace):

        def begins(self: Any, *args: Any, made: Any = kind.__init__, kind: type = kind, **kwargs: Any) -> None:
            began.append(kind)
            made(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", begins)
    with gpu.meter, gpu.session(model := llama(), 2**40) as session:
        for length in (SHORT, SHORT, LONGER, LONGER):
            gradients(model, length, session)
        began.clear()
        gradients(model, LONG, session)
        assert foreseen[-1] is not None
        assert began == [Pace]
        gradients(model, LONG, session)
        assert began == [Pace]
        gradients(model, LONG, session)
        assert began == [Pace, Pace], "now that libraries have chosen their kernels"
        # One that comes while the device has not come to the end of a timed step is timed the next time.
        pending = session._shared.retiming = Retiming(Mock(is_reached=False), Mock(), 1.0)
        gradients(model, 2 * LONG, session)
        assert foreseen[-1] is not None
        assert began == [Pace, Pace]
        assert session._shared.retiming is pending
        session._shared.retiming = None
        gradients(model, 2 * LONG, session)
    assert began == [Pace] * 3


@pytest.mark.no_cover
def test_on_a_gpu_a_foreseen_step_that_exceeds_the_budget_is_planned_anew_at_once(
    foreseen: list[Planned | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, least_bytes, peak_bytes = Rehearsal(monkeypatch, link_bytes_per_s=1e12), [0], Fast.peak_bytes
    monkeypatch.setattr(Fast, "peak_bytes", lambda self: max(peak_bytes(self), least_bytes[0]))
    with gpu.meter, gpu.session(model := llama(), vram := 2**25) as session:
        for length in (SHORT, SHORT, LONGER, LONGER):
            gradients(model, length, session)
        least_bytes[0] = vram + 1000
        gradients(model, LONG, session)
        told, now = foreseen[-1], session._shared.plans.in_force
        least_bytes[0] = 0
        gradients(model, LONG, session)
        then = session._shared.plans.in_force
    assert told is not None
    assert told.plan is not None
    for planned in now, then:
        assert planned is not None
        assert planned.plan is not None
        assert planned.kind is told.kind
        assert planned.is_over
        assert planned.plan.forecast.vram_bytes < told.plan.forecast.vram_bytes


@pytest.mark.no_cover
@pytest.mark.parametrize("disk", [True, False], ids=["RAM and disk", "RAM alone"])
def test_a_longer_step_than_all_before_follows_a_plan_at_once(
    disk: bool, tmp_path: Path, foreseen: list[Planned | None], traces: list[Trace]
) -> None:
    budget = unlimited_bytes(LONG) * 6 // 10
    plain, model = llama(), llama()
    traces.clear()
    with Session(model, ram=budget, disk=str(tmp_path) if disk else None) as session:
        for length in (SHORT, LONGER, LONG, LONG - 1, LONG, LONG):
            assert all(map(torch.equal, gradients(plain, length, None), gradients(model, length, session))), length
            assert session.usage().ram_bytes <= budget
    assert [one is not None for one in foreseen] == [False, False, True, False, False, False]
    assert len(traces) == 2  # of the first two


@pytest.mark.parametrize(("share", "num_plans"), [(1e9, 1), (-1.0, 2)], ids=["as forecast", "otherwise"])
@pytest.mark.no_cover
def test_a_longer_step_is_planned_once_if_it_takes_what_was_forecast(
    share: float, num_plans: int, foreseen: list[Planned | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foresight, "MISS", share)
    plain, model = llama(), llama()
    with Session(model, ram=unlimited_bytes(LONG) * 6 // 10) as session:
        for length in (SHORT, SHORT, LONGER, LONGER):
            gradients(model, length, session)
        planner, made = session._shared.planner, list[Planned]()
        plan = planner.plan

        def noted(*args: Any, **kwargs: Any) -> Planned:
            made.append(plan(*args, **kwargs))
            return made[-1]

        monkeypatch.setattr(planner, "plan", noted)
        for length in (LONG, LONG, LONG):
            assert all(map(torch.equal, gradients(plain, length, None), gradients(model, length, session))), length
        in_force = session._shared.plans.in_force
    assert foreseen[-3] is made[0]
    assert len(made) == num_plans
    assert in_force is not None
    assert in_force.num_measured == 2, "it has been timed"


def test_a_foreseen_plan_goes_on_with_the_times_of_its_first_step_unless_these_are_others() -> None:
    model = llama()
    with Session(model, ram=unlimited_bytes(SHORT) * 6 // 10) as session:
        for _ in range(3):
            gradients(model, SHORT, session)
        planned, machine = session._shared.plans.in_force, session._shared.planner.machine()
    assert planned is not None
    assert planned.plan is not None
    expected_ms = forecast_s(planned.trace, planned.plan.placements, machine) * 1e3
    planned.forecast = replace(planned.forecast, step_ms=expected_ms)

    def slower(factor: float) -> Planned | None:
        moments = taking(planned.trace.moments, (one.compute_s * factor for one in planned.trace.moments))
        ops = taking(planned.trace.ops, (one.compute_s * factor for one in planned.trace.ops))
        return foresight.came_true(planned, replace(planned.trace, moments=moments, ops=ops), machine)

    kept = slower(1.05)
    assert kept is not None
    assert kept.plan is not None
    assert kept.plan.placements is planned.plan.placements
    assert kept.forecast.step_ms == pytest.approx(1.05 * expected_ms)
    assert kept.plan.forecast == kept.forecast
    assert kept.num_measured == planned.num_measured + 1
    assert slower(1.1) is None
    assert slower(0.9) is None
    assert foresight.came_true(None, planned.trace, machine) is None


@pytest.mark.no_cover
def test_a_step_that_no_plan_fits_raises_before_the_model_runs_and_the_session_goes_on(tmp_path: Path) -> None:
    budget = unlimited_bytes(LONG) * 6 // 10
    plain, model = llama(), llama()
    ran: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: ran.append(1))  # type: ignore[union-attr, index, operator]
    with Session(model, ram=budget) as session:
        for length in (SHORT, LONGER, LONG):
            gradients(model, length, session)
        ran.clear()
        with pytest.raises(BudgetError) as told:
            gradients(model, TOO_LONG, session)
        assert not ran
        assert "micro-batch" in str(told.value)
        assert all(one.grad is None for one in model.parameters())
        for length in (LONG, SHORT):
            assert all(map(torch.equal, gradients(plain, length, None), gradients(model, length, session))), length
    # What it names as enough is enough, and as little as a Session that sees the length first names.
    with Session(llama(), ram=told.value.smallest_bytes) as session:
        gradients(session._shared.model, TOO_LONG, session)
    with Session(llama(), ram=budget) as session, pytest.raises(BudgetError) as anew:
        gradients(session._shared.model, TOO_LONG, session)
    assert anew.value.smallest_bytes == told.value.smallest_bytes


def test_a_first_call_without_gradients_tells_nothing_of_the_step(tmp_path: Path) -> None:
    plain, model = llama(), llama()
    with Session(model, ram=unlimited_bytes(LONG) * 6 // 10) as session:
        for length in (SHORT, LONGER, LONG):
            gradients(model, length, session)
        ids = torch.zeros(4, TOO_LONG, dtype=torch.int64)
        with session.step():
            with torch.no_grad():
                model(input_ids=ids)
            model(input_ids=ids[:, :SHORT], labels=ids[:, :SHORT]).loss.backward()
    plain(input_ids=ids[:, :SHORT], labels=ids[:, :SHORT]).loss.backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_batch_that_no_plan_fits_is_split_before_it_runs(foreseen: list[Planned | None]) -> None:
    budget = unlimited_bytes(LONG) * 6 // 10
    plain, model = llama(), llama()
    with Session(model, ram=budget) as session:
        for length in (SHORT, LONGER):
            gradients(model, length, session)
        ids = torch.randint(0, 128, (4, TOO_LONG), generator=torch.Generator().manual_seed(0))

        def loss(part: torch.Tensor) -> tuple[torch.Tensor, int]:
            out = model(input_ids=part).logits
            return nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum"), len(
                part
            ) * (part.shape[1] - 1)

        session.run(loss, ids)
    plain(input_ids=ids, labels=ids).loss.backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)


class Routed(nn.Module):
    """Gives each expert as many rows as its router says: sizes that the input's do not tell."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out.index_add(0, (rows := (chosen == number).nonzero()[:, 0]), expert(x[rows]).tanh())
        return out


class Twice(nn.Module):
    """Called twice in a step, with other lengths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Routed, Twice])
def test_what_the_input_of_the_first_call_does_not_tell_is_not_foreseen(
    make: Callable[[], nn.Module], foreseen: list[Planned | None], tmp_path: Path
) -> None:
    plain, model = make(), make()
    rng = random.Random(0)
    with Session(model, ram="1MiB", disk=str(tmp_path)) as session:
        for rows in (128, 192, 256, 320, 384):
            torch.manual_seed(rows)
            parts = [torch.randn(rows, 32)] + ([torch.randn(rng.randrange(50, 900), 32)] if make is Twice else [])
            sum(plain(part).square().mean() for part in parts).backward()  # type: ignore[union-attr]
            with session.step():
                sum(model(part).square().mean() for part in parts).backward()  # type: ignore[union-attr]
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                assert (one.grad is None) is (other.grad is None)
                assert one.grad is None or torch.equal(one.grad, other.grad)
            plain.zero_grad()
            model.zero_grad()
    assert not any(foreseen)
