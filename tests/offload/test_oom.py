"""Out of memory within a step: the step is as if it had not been, and its repeat equals the run that never failed."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import torchstorm
from torchstorm.errors import BudgetError, OutOfVRAMError, TorchstormError, UnsupportedError
from torchstorm.offload.fast import Cpu
from torchstorm.offload.run.shortage import Shortage, is_out_of_memory
from torchstorm.offload.session import Session

WIDTH, ROWS = 32, 512
MIB = 2**20


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models this small only lose by more; the root conftest puts it back."""
    torch.set_num_threads(1)


class Faults:
    """Raises out-of-memory at chosen calls, counted over all modules that share it."""

    def __init__(self) -> None:
        self.calls = {"forward": 0, "backward": 0, "allocation": 0}
        self.at: dict[str, set[int]] = {"forward": set(), "backward": set(), "allocation": set()}

    def count(self, kind: str) -> None:
        self.calls[kind] += 1
        if self.calls[kind] in self.at[kind]:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 KiB. GPU 0 has a total capacity of 1.00 MiB.\nMore."
            )


class _Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, faults: Faults) -> torch.Tensor:
        faults.count("forward")
        ctx.faults = faults
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.faults.count("backward")
        return grad, None


class Block(nn.Module):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Fault.apply(x + self.drop(torch.tanh(self.linear(self.norm(x)))), self.faults)


NUM_BLOCKS = 6


def network(faults: Faults) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Block(faults) for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 8))


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(8, (ROWS,), generator=generator)


def loss_fn(model: nn.Module) -> Callable[[Any], tuple[torch.Tensor, float]]:
    """Draws from every global generator."""

    def fn(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, float]:
        x, labels = batch
        x = x * (1 + random.random()) + float(np.random.rand())
        return F.cross_entropy(model(x), labels, reduction="sum"), len(labels)

    return fn


@dataclass
class Left:
    """What a training left behind."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[list[torch.Tensor]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    random: tuple[Any, ...] = ()


def train(
    directory: Path,
    faults: Faults,
    *,
    ram: int | None,
    num_runs: int = 4,
    micro_batches: int | None = None,
    keep_gradients: bool = False,
) -> tuple[Left, Session]:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    model = network(faults)
    torch.manual_seed(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if ram is None:
        storm = Session(model, unlimited=True)
    else:
        storm = Session(model, ram=ram, disk=str(directory), optimizer=optimizer)
        empty = storm._shared.residency._empty

        def allocate(nbytes: int, phase: int) -> torch.Tensor:
            faults.count("allocation")
            return empty(nbytes, phase)

        storm._shared.residency._empty = allocate
    left = Left()
    for _ in range(num_runs):
        left.losses.append(storm.run(loss_fn(model), make_batch(), micro_batches=micro_batches))
        left.gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        if not keep_gradients:
            optimizer.zero_grad()
    left.state = {name: value.clone() for name, value in model.state_dict().items()}
    left.random = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    storm.close()
    return left, storm


@functools.cache
def without_a_failure(
    *, ram: int | None, num_runs: int = 4, micro_batches: int | None, keep_gradients: bool = False
) -> Left:
    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, Any] = {"micro_batches": micro_batches, "keep_gradients": keep_gradients}
        return train(Path(directory), Faults(), ram=ram, num_runs=num_runs, **options)[0]


def assert_equal(expected: Left, found: Left) -> None:
    assert all(torch.equal(one, other) for one, other in zip(expected.losses, found.losses, strict=True))
    for ones, others in zip(expected.gradients, found.gradients, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))
    for name, value in expected.state.items():
        assert torch.equal(value, found.state[name]), name
    assert expected.random == found.random


BUDGET = 360 * 1024  # about half of what the network saves


# ---------------------------------------------------------------------- run repeats


FAILURES = [
    ("forward", [1]),
    ("forward", [9]),
    ("forward", [NUM_BLOCKS, 3 * NUM_BLOCKS + 2]),
    ("backward", [1]),
    ("backward", [10]),
    ("backward", [NUM_BLOCKS, 2 * NUM_BLOCKS + 3]),
    ("allocation", [1]),
    ("allocation", [4]),
    ("allocation", [3, 60]),
]


@pytest.mark.parametrize(
    ("kind", "calls", "keep_gradients", "micro_batches"),
    [(*failure, False, None) for failure in FAILURES]
    + [(*failure, True, 4) for failure in FAILURES[2::3]]
    + [(*FAILURES[2], False, 4), (*FAILURES[5], True, None)],
    ids=str,
)
def test_after_a_repeat_all_is_as_if_nothing_had_failed(
    kind: str, calls: list[int], keep_gradients: bool, micro_batches: int | None, tmp_path: Path
) -> None:
    expected = without_a_failure(ram=BUDGET, micro_batches=micro_batches, keep_gradients=keep_gradients)
    faults = Faults()
    faults.at[kind] = set(calls)
    found, storm = train(tmp_path, faults, ram=BUDGET, micro_batches=micro_batches, keep_gradients=keep_gradients)
    assert_equal(expected, found)
    assert faults.calls[kind] > max(calls), "nothing failed"
    report = storm.report()
    assert f"run: repeated {len(calls)} times after running out of memory" in report.notes
    assert report.highest is not None
    assert report.highest.ram_bytes <= BUDGET
    assert list(tmp_path.iterdir()) == []


@pytest.mark.no_cover
@settings(max_examples=12, deadline=None)
@given(
    forward=st.sets(st.integers(1, 60), max_size=2),
    backward=st.sets(st.integers(1, 60), max_size=2),
    micro_batches=st.sampled_from([None, 1, 2, 3]),
)
def test_wherever_it_fails_the_result_is_that_of_the_same_split_without_a_failure(
    tmp_path_factory: pytest.TempPathFactory, forward: set[int], backward: set[int], micro_batches: int | None
) -> None:
    directory = tmp_path_factory.mktemp("spill")
    faults = Faults()
    faults.at["forward"], faults.at["backward"] = set(forward), set(backward)
    try:
        found, storm = train(directory, faults, ram=None, num_runs=2, micro_batches=micro_batches)
    except OutOfVRAMError:
        assert len(forward) + len(backward) >= 3
        return
    split = [note for note in storm.report().notes if "split into" in note]
    if micro_batches is None and split:
        return  # two failures in a row: the batch was split, which dropout notices
    expected = without_a_failure(ram=None, num_runs=2, micro_batches=micro_batches)
    assert_equal(expected, found)


@pytest.mark.no_cover
def test_what_fails_again_is_split_and_the_choice_remembered() -> None:
    """As if micro-batches of more than 100 samples never fitted."""
    model, sizes = nn.Linear(WIDTH, 8).double(), []

    def fn(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, float]:
        sizes.append(len(batch[0]))
        if len(batch[0]) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return F.cross_entropy(model(batch[0].double()), batch[1], reduction="sum"), len(batch[0])

    x, labels = make_batch()
    F.cross_entropy(model(x.double()), labels).backward()
    expected = model.weight.grad
    assert expected is not None
    model.zero_grad()
    storm = Session(model, unlimited=True)
    storm.run(fn, (x, labels))
    assert sizes == [512, 512, 256, 256, 128, 128, *[64] * 8]
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, expected, rtol=1e-12)
    sizes.clear()
    storm.run(fn, (x, labels))
    assert sizes == [64] * 8


def test_what_never_fits_is_given_up_with_what_was_tried_and_all_as_it_was() -> None:
    faults = Faults()
    model = network(faults)
    faults.at["backward"] = set(range(1, 10_000))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    kept = [parameter.grad for parameter in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x, labels = make_batch()
    fn, batch = loss_fn(model), (x[:8], labels[:8])
    drawn = torch.get_rng_state()
    storm = Session(model, unlimited=True)
    with pytest.raises(OutOfVRAMError, match="Tried") as caught:
        storm.run(fn, batch, micro_batches=4)
    for words in ("4 x 2: out of memory at", "3 tries", "20.00 KiB more were requested", "Free memory"):
        assert words in str(caught.value)
    assert "zero_grad" not in str(caught.value)
    assert caught.value.asked_bytes == 20 * 1024
    assert all(
        p.grad is gradient and bool((gradient == 1).all()) for p, gradient in zip(model.parameters(), kept, strict=True)
    )
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_step_that_changes_weights_is_not_repeated() -> None:
    model = nn.Linear(4, 4)
    failing = [True]

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        with torch.no_grad():
            model.weight.mul_(2)
        if failing.pop():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(x).sum(), len(x)

    with pytest.raises(UnsupportedError, match="'weight' and 0 more weights, large buffers or tensors"):
        Session(model, unlimited=True).run(fn, torch.randn(4, 4))


def test_a_batch_that_fn_changes_in_place_is_not_repeated_and_is_copied_where_it_is_split() -> None:
    model, x = nn.Linear(4, 4), torch.ones(4, 4)
    failing = [False, False, True]

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        x.mul_(2)
        if failing.pop():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(x).sum(), len(x)

    storm = Session(model, unlimited=True)
    with pytest.raises(UnsupportedError, match="'a tensor of the batch' and 0 more"):
        storm.run(fn, x)
    assert bool((x == 2).all())
    storm.run(fn, x, micro_batches=2)
    assert bool((x == 2).all())


def test_a_step_with_an_optimizer_in_its_hooks_is_not_repeated() -> None:
    faults = Faults()
    model = network(faults)
    model[0].linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    faults.at["forward"] = {3}
    with pytest.raises(OutOfVRAMError, match=r"'0.linear.weight' has a hook .* nothing repeats"):
        Session(model, unlimited=True).run(loss_fn(model), make_batch())


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_buffers_of_any_size_are_put_back_or_the_repeat_refused(how: str) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(2**19))
            self.weight = nn.Parameter(torch.ones(1))
            self.fails = self.changes = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.changes and how == "in place":
                self.table.add_(1)
            elif self.changes:
                self.table = self.table + 1
            if self.fails:
                self.fails = False
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return x * self.weight + self.table[0]

    model = Table()
    storm = Session(model, unlimited=True)
    fn = lambda x: (model(x).sum(), len(x))  # noqa: E731
    model.changes = model.fails = True
    storm.run(fn, torch.ones(4))
    assert model.table[0] == 1
    model.changes = False
    storm.run(fn, torch.ones(4))
    model.changes = model.fails = True
    storm.run(fn, torch.ones(4))
    assert model.table[0] == 2
    model = Table()  # one that is known not to change, and then does
    storm = Session(model, unlimited=True)
    storm.run(fn, torch.ones(4))
    model.changes = model.fails = True
    if how == "in place":
        with pytest.raises(UnsupportedError, match="'table' and 0 more"):
            storm.run(fn, torch.ones(4))
    else:
        storm.run(fn, torch.ones(4))
        assert model.table[0] == 1


# ---------------------------------------------------------------------- a step of the user's own


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[tuple[Faults, nn.Module, Session]]:
    faults = Faults()
    model = network(faults)
    with Session(model, ram=BUDGET, disk=str(tmp_path)) as storm:
        yield faults, model, storm


def step(model: nn.Module, storm: Session) -> torch.Tensor:
    with storm.step():
        x, labels = make_batch()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
    return loss


def test_the_error_is_a_runtime_error_with_the_figures_and_says_what_to_do(
    faulty: tuple[Faults, nn.Module, Session],
) -> None:
    faults, model, storm = faulty
    faults.at["backward"] = {3}
    with pytest.raises(OutOfVRAMError, match="Repeat the step") as caught:
        step(model, storm)
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert isinstance(error, TorchstormError)
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert torchstorm.OutOfVRAMError is OutOfVRAMError
    assert error.budget_bytes == BUDGET
    assert 0 < error.allocated_bytes <= BUDGET
    assert error.asked_bytes == 20 * 1024
    assert error.lost_gradients == ()
    assert not error.planned_anew
    for words in ("were allocated", "reserved", "free", "20.00 KiB more were requested", "the budget is 360.00 KiB"):
        assert words in str(error)


def test_gradients_that_were_not_there_before_the_step_are_dropped_and_a_repeat_is_exact(
    faulty: tuple[Faults, nn.Module, Session],
) -> None:
    faults, model, storm = faulty
    for index in range(4):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        torch.manual_seed(index)
        step(model, storm)
        expected = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        model.load_state_dict(state)
        faults.at["backward"] = {faults.calls["backward"] + 4}
        torch.manual_seed(index)
        with pytest.raises(OutOfVRAMError):
            step(model, storm)
        assert all(parameter.grad is None for parameter in model.parameters())
        model.load_state_dict(state)  # BatchNorm has counted; of that only run takes care
        torch.manual_seed(index)
        step(model, storm)
        assert all(torch.equal(p.grad, one) for p, one in zip(model.parameters(), expected, strict=True))
        model.zero_grad()


def test_gradients_that_hold_a_part_of_the_step_are_named(faulty: tuple[Faults, nn.Module, Session]) -> None:
    faults, model, storm = faulty
    step(model, storm)
    before = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None}
    faults.at["backward"] = {NUM_BLOCKS + 3}  # the last two blocks' are in, and that of the head
    with pytest.raises(OutOfVRAMError, match="zero_grad") as caught:
        step(model, storm)
    lost = caught.value.lost_gradients
    assert set(lost) == {name for name in before if name.split(".")[0] in ("4", "5", "6")}
    for name, parameter in model.named_parameters():
        gradient, copy = before[name]
        assert parameter.grad is gradient
        assert torch.equal(gradient, copy) == (name not in lost)
    assert f"{len(lost)} gradients" in str(caught.value)


@pytest.mark.parametrize("how", ["sparse", "replaced"])
def test_gradients_of_which_nothing_can_be_said_are_dropped_and_named(how: str) -> None:
    model = nn.Embedding(10, 4, sparse=how == "sparse")
    ids = torch.tensor([1, 2])
    model(ids).sum().backward()
    storm = Session(model, unlimited=True)

    def fail() -> None:
        with storm.step():
            if how == "replaced":
                model.weight.grad = None
            model(ids).sum().backward()
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(OutOfVRAMError) as caught:
        fail()
    assert caught.value.lost_gradients == ("weight",)
    assert model.weight.grad is None


def test_a_step_that_zeroes_its_gradients_first_loses_none() -> None:
    model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    storm = Session(model, unlimited=True)

    def fail() -> None:
        with storm.step():
            model.zero_grad()
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(OutOfVRAMError) as caught:
        fail()
    assert caught.value.lost_gradients == ()


def test_a_plan_is_made_anew_with_more_slack_and_kept_to(faulty: tuple[Faults, nn.Module, Session]) -> None:
    faults, model, storm = faulty
    for _ in range(3):
        step(model, storm)
    old = storm.report().forecast
    faults.at["backward"] = {faults.calls["backward"] + 2}
    with pytest.raises(OutOfVRAMError, match="a new plan keeps more of the budget free") as caught:
        step(model, storm)
    assert caught.value.planned_anew
    step(model, storm)
    new = storm.report().forecast
    assert old is not None
    assert new is not None
    assert new.ram_bytes <= old.ram_bytes - BUDGET // 50
    assert storm.usage().ram_bytes <= new.ram_bytes
    assert storm.report().num_in_force == 1


@pytest.mark.no_cover
def test_slack_that_nothing_fits_with_gives_way(faulty: tuple[Faults, nn.Module, Session]) -> None:
    """However often it fails, and whatever shape comes next: a step that the budget allows is not refused."""
    faults, model, storm = faulty
    for _ in range(8):
        faults.at["backward"] = {faults.calls["backward"] + 1}
        with pytest.raises(OutOfVRAMError):
            step(model, storm)
        step(model, storm)
    for rows in (500, 511):
        for _ in range(3):
            with storm.step():
                model(make_batch()[0][:rows]).sum().backward()
    highest = storm.report().highest
    assert highest is not None
    assert highest.ram_bytes <= BUDGET


def test_a_shape_that_leaves_no_room_for_slack_is_planned_without() -> None:
    faults = Faults()
    model = network(faults)
    x = make_batch()[0]

    def small_step() -> None:
        with storm.step():
            model(x[: ROWS // 2]).sum().backward()

    def whole_step() -> None:
        with storm.step():
            model(x).sum().backward()

    with Session(model, ram="64KiB") as storm, pytest.raises(BudgetError) as too_little:
        whole_step()
    budget = too_little.value.needed_bytes

    with Session(model, ram=budget) as storm:
        for _ in range(2):
            small_step()
        faults.at["backward"] = {faults.calls["backward"] + 2}
        with pytest.raises(OutOfVRAMError) as caught:
            small_step()
        assert caught.value.planned_anew
        for _ in range(3):
            whole_step()
        assert storm.usage().ram_bytes == budget


@pytest.mark.parametrize("kind", ["forward", "backward", "allocation"])
def test_a_failed_step_holds_no_memory_and_no_disk_though_its_loss_is_held(
    kind: str, faulty: tuple[Faults, nn.Module, Session]
) -> None:
    faults, model, storm = faulty
    residency = storm._shared.residency
    empty = residency._empty

    def allocate(nbytes: int, phase: int) -> torch.Tensor:
        faults.count("allocation")
        return empty(nbytes, phase)

    residency._empty = allocate
    x, labels = make_batch()
    held = []
    for call in (2, 5):
        faults.at[kind] = {faults.calls[kind] + call}
        try:
            with storm.step():
                loss = F.cross_entropy(model(x), labels)
                held.append(loss)
                loss.backward()
        except OutOfVRAMError:
            pass
        assert residency.resident_bytes == residency.staging_bytes
        assert not residency.resident
        assert not residency.away
        assert storm._shared.tiers.slow["disk"].used_bytes == 0
    for _ in range(2):  # the same tensors are saved again, and are not taken for those that were let go
        with storm.step():
            F.cross_entropy(model(x), labels).backward()
    for loss in held:
        with pytest.raises(RuntimeError, match=r"ran out of memory and was dropped|through the graph a second time"):
            loss.backward()
    held.clear()
    with storm.step():
        F.cross_entropy(model(x), labels).backward()


def test_other_errors_are_not_taken_for_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("out of cheese"))
    assert not is_out_of_memory(BudgetError("CUDA out of memory, almost"))


# ---------------------------------------------------------------------- the figures


@pytest.mark.parametrize(
    ("words", "nbytes"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB", 2 * 2**30),
        ("CUDA out of memory. Tried to allocate 512 bytes.", 512),
        ("CUDA out of memory. Tried to allocate 1.50 MiB.", 3 * 2**19),
        ("no figures at all", 0),
        ("", 0),
    ],
)
def test_what_was_asked_is_read_from_the_message(words: str, nbytes: int) -> None:
    error = torch.OutOfMemoryError(words)
    shortage = Shortage.read(error, Cpu(has_budget=False), held_bytes=10, budget_bytes=100)
    assert shortage.asked_bytes == nbytes
    assert (shortage.allocated_bytes, shortage.free_bytes) == (10, 90)


@given(
    budget=st.integers(1, 2**40),
    allocated=st.integers(0, 2**40),
    asked=st.integers(0, 2**38),
    slack=st.integers(0, 2**40),
)
def test_the_next_plan_stays_below_what_could_not_be_had_and_below_the_last_one(
    budget: int, allocated: int, asked: int, slack: int
) -> None:
    shortage = Shortage(
        reason="", allocated_bytes=allocated, reserved_bytes=0, free_bytes=0, asked_bytes=asked, budget_bytes=budget
    )
    more = shortage.slack_bytes(slack)
    assert more >= slack + budget // 50
    assert budget - more <= allocated + asked
    missed = allocated + asked - (budget - slack)
    assert more >= slack + missed
