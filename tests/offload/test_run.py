"""`storm.run`: the mean over the whole batch, however it had to be split to fit."""

from __future__ import annotations

import math
import re
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from torchstorm.errors import BudgetError, ConfigError, StorageError, UnsupportedError
from torchstorm.offload.run.split import choose_num_parts, part_sizes, rows_that_fit, what_differs
from torchstorm.offload.session import Session

WIDTH, CLASSES = 64, 16


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models this small only lose by more; the root conftest puts it back."""
    torch.set_num_threads(1)


def mlp(*, dropout: float = 0.0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def make_batch(rows: int, *, seed: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, WIDTH, generator=generator),
        "labels": torch.randint(CLASSES, (rows,), generator=generator),
    }


Batch = dict[str, torch.Tensor]
Fn = Callable[[Batch], tuple[torch.Tensor, float]]


def loss_fn(model: nn.Module) -> Fn:
    return lambda batch: (F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum"), len(batch["labels"]))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient.clone() for gradient in found if gradient is not None]


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def close(ones: list[torch.Tensor], others: list[torch.Tensor], *, rtol: float) -> bool:
    """By norm: an element where terms cancel is as uncertain as the terms."""
    return all((a - b).norm() <= rtol * b.norm() + 1e-30 for a, b in zip(ones, others, strict=True))


def plainly(model: nn.Module, fn: Callable[[Any], Any], batch: Any) -> torch.Tensor:
    total, weight = fn(batch)
    mean = total / weight
    mean.backward()
    return mean.detach()


def unlimited_bytes(rows: int) -> int:
    model = mlp()
    with Session(model, unlimited=True) as storm:
        storm.run(loss_fn(model), make_batch(rows))
    return storm.usage().ram_bytes


def needed_bytes(rows: int, directory: Path | None = None) -> int:
    """What a step with so many rows needs at the least, by the plan that needs least."""
    model = mlp()
    with (
        Session(model, ram="64KiB", disk=None if directory is None else str(directory)) as storm,
        pytest.raises(BudgetError) as caught,
    ):
        storm.run(loss_fn(model), make_batch(rows), micro_batches=1)
    return caught.value.needed_bytes


# ---------------------------------------------------------------------- the mean and its gradients


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_batch_that_fits_is_one_step_to_the_last_bit(dropout: float, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, batch = mlp(dropout=dropout), make_batch(256)
    expected_losses, expected = [], []
    torch.manual_seed(2)
    for _ in range(3):
        expected_losses.append(plainly(model, loss_fn(model), batch))
        expected.append(gradients(model))
        model.zero_grad()
    state = torch.get_rng_state()
    budget = unlimited_bytes(256) // 2
    torch.manual_seed(2)
    with Session(model, ram=budget, disk=str(tmp_path)) as storm:
        for loss, grads in zip(expected_losses, expected, strict=True):
            found = storm.run(loss_fn(model), batch)
            assert torch.equal(found, loss)
            assert not found.requires_grad
            assert found.shape == ()
            assert same(gradients(model), grads)
            model.zero_grad()
    assert torch.equal(torch.get_rng_state(), state)
    assert storm.report().num_steps == 3
    assert not any("run:" in note for note in storm.report().notes)


def test_gradients_from_before_are_added_to_as_autograd_would_and_stay_the_same_tensors() -> None:
    model, batch, other = mlp(), make_batch(64), make_batch(64, seed=6)
    plainly(model, loss_fn(model), other)
    plainly(model, loss_fn(model), batch)
    expected = gradients(model)
    model.zero_grad()
    plainly(model, loss_fn(model), other)
    tensors = [parameter.grad for parameter in model.parameters()]
    Session(model, unlimited=True).run(loss_fn(model), batch)
    assert same(gradients(model), expected)
    assert all(parameter.grad is tensor for parameter, tensor in zip(model.parameters(), tensors, strict=True))


@pytest.mark.parametrize("num_parts", [2, 4, 8])
def test_a_split_whose_weights_are_as_predicted_rounds_no_more_than_scaled_losses_do(num_parts: int) -> None:
    torch.manual_seed(1)
    model, batch = mlp(), make_batch(64)
    for x, labels in zip(batch["x"].chunk(num_parts), batch["labels"].chunk(num_parts), strict=True):
        (F.cross_entropy(model(x), labels, reduction="sum") / 64).backward()
    expected = gradients(model)
    model.zero_grad()
    loss = Session(model, unlimited=True).run(loss_fn(model), batch, micro_batches=num_parts)
    assert same(gradients(model), expected)
    assert torch.allclose(loss, F.cross_entropy(model(batch["x"]), batch["labels"]), rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any),
    num_parts=st.integers(1, 12),
    as_tensor=st.booleans(),
    with_gradients=st.booleans(),
)
def test_any_split_with_any_weights_gives_the_mean_over_the_whole_batch(
    weights: list[int], num_parts: int, as_tensor: bool, with_gradients: bool
) -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 3).double()
    batch = (torch.randn(len(weights), 4).double(), torch.tensor(weights))

    def fn(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, float | torch.Tensor]:
        x, each = batch
        total = (model(x).square().sum(1) * each).sum()
        return total, each.sum() if as_tensor else int(each.sum())

    if with_gradients:
        model(torch.randn(2, 4).double()).sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    expected_loss = plainly(model, fn, batch)
    expected = gradients(model)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient
    loss = Session(model, unlimited=True).run(fn, batch, micro_batches=min(num_parts, len(weights)))
    assert torch.allclose(loss, expected_loss, rtol=1e-12)
    assert close(gradients(model), expected, rtol=1e-12)


def test_a_part_in_which_nothing_counts_is_no_harm_wherever_it_is() -> None:
    model = nn.Linear(4, 1).double()
    x = torch.randn(4, 4).double()
    for mask in ([0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]):
        counts = torch.tensor(mask)
        fn = lambda batch: ((model(batch[0]).flatten() * batch[1]).sum(), batch[1].sum())  # noqa: E731
        expected = plainly(model, fn, (x, counts))
        grads = gradients(model)
        model.zero_grad()
        assert torch.allclose(Session(model, unlimited=True).run(fn, (x, counts), micro_batches=4), expected)
        assert close(gradients(model), grads, rtol=1e-12)
        model.zero_grad()


def test_what_is_not_finite_passes_through() -> None:
    model = nn.Linear(4, 1)
    storm = Session(model, unlimited=True)
    loss = storm.run(lambda x: (model(x).sum() * math.inf, 2), torch.randn(4, 4), micro_batches=2)
    assert not loss.isfinite()
    assert not any(gradient.isfinite().all() for gradient in gradients(model))


def test_tensors_as_long_as_the_first_are_split_and_all_else_is_passed_whole() -> None:
    model = nn.Linear(4, 4)
    seen: list[tuple[Any, ...]] = []

    def fn(batch: Any) -> tuple[torch.Tensor, int]:
        x, rest = batch
        seen.append((len(x), len(rest["labels"]), rest["mask"].shape, rest["names"], rest["scale"].shape))
        return model(x).sum(), len(x)

    rest = {"labels": torch.zeros(6), "mask": torch.ones(4, 4), "names": ["a", "b"], "scale": torch.tensor(2.0)}
    Session(model, unlimited=True).run(fn, [torch.randn(6, 4), rest], micro_batches=4)
    whole = (torch.Size([4, 4]), ["a", "b"], torch.Size([]))
    assert seen == [(size, size, *whole) for size in (2, 2, 1, 1)]


@pytest.mark.parametrize("made", ["sparse", "dense"])
@pytest.mark.parametrize("before", ["none", "sparse", "dense"])
def test_sparse_gradients_are_summed_up_like_others(before: str, made: str) -> None:
    model, ids = nn.Embedding(10, 4, sparse=made == "sparse"), torch.tensor([1, 2, 2, 7, 9, 1])
    fn = lambda ids: (model(ids).square().sum(), len(ids))  # noqa: E731
    had = torch.zeros(10, 4)
    if before != "none":
        had[3] = 2
        model.weight.grad = had.clone() if before == "dense" else had.to_sparse(1)
    Session(model, unlimited=True).run(fn, ids, micro_batches=3)
    found = model.weight.grad
    assert found is not None
    assert found.is_sparse == (made == "sparse" and before != "dense")
    model.weight.grad = None
    plainly(model, fn, ids)
    assert model.weight.grad is not None
    assert torch.allclose(found.to_dense(), model.weight.grad.to_dense() + had)


def test_parameters_that_only_the_optimizer_has_and_those_that_nothing_uses_keep_their_gradients() -> None:
    model, scale, idle = nn.Linear(4, 4), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    scale.grad, idle.grad = torch.full((1,), 3.0), torch.full((1,), 5.0)
    optimizer = torch.optim.SGD([*model.parameters(), scale, idle], lr=0.1)
    x = torch.randn(8, 4)
    fn = lambda x: ((model(x) * scale).sum(), len(x))  # noqa: E731
    storm = Session(model, unlimited=True, optimizer=optimizer)
    storm.run(fn, x, micro_batches=2)
    assert torch.allclose(scale.grad, 3 + model(x).sum() / 8)
    assert idle.grad.item() == 5


def test_a_batch_that_takes_gradients_gets_them() -> None:
    model, x = nn.Linear(4, 4), torch.randn(6, 4, requires_grad=True)
    fn = lambda x: (model(x).square().sum(), len(x))  # noqa: E731
    plainly(model, fn, x)
    expected, x.grad = x.grad, None
    Session(model, unlimited=True).run(fn, x, micro_batches=3)
    assert expected is not None
    assert x.grad is not None
    assert torch.allclose(x.grad, expected)


# ---------------------------------------------------------------------- splitting what does not fit


@pytest.mark.parametrize("with_disk", [True, False], ids=["ram and disk", "ram alone"])
@pytest.mark.parametrize("rows", [512, 509])
def test_a_batch_that_does_not_fit_is_split_within_the_budget_by_one_look_at_the_figures(
    rows: int, with_disk: bool, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model, batch = mlp(), make_batch(rows)
    expected_loss = plainly(model, loss_fn(model), batch)
    expected = gradients(model)
    model.zero_grad()
    budget = needed_bytes(512, tmp_path if with_disk else None) // 3
    calls: list[int] = []

    def fn(batch: Batch) -> tuple[torch.Tensor, float]:
        calls.append(len(batch["x"]))
        return loss_fn(model)(batch)

    with Session(model, ram=budget, disk=str(tmp_path) if with_disk else None) as storm:
        loss = storm.run(fn, batch)
        assert torch.allclose(loss, expected_loss, rtol=1e-6)
        assert close(gradients(model), expected, rtol=1e-5)
        first, calls[:] = list(calls), []
        for _ in range(4):
            model.zero_grad()
            storm.run(fn, batch)
        report = storm.report()
    assert first[0] == rows
    tries = 1 + sum(size > calls[0] for size in first)
    assert tries <= 3, f"{first}"
    assert sum(calls) == 4 * rows, "the choice was not remembered"
    assert max(calls) - min(calls) <= 1
    assert len(set(calls)) == 1 or 512 % rows
    assert report.measured is not None
    assert report.measured.ram_bytes <= budget
    assert report.num_planned > 0
    assert any("split into" in note for note in report.notes)
    assert not any("not the same" in note for note in report.notes)


def test_a_smaller_batch_of_the_same_kind_starts_from_what_fitted(tmp_path: Path) -> None:
    model = mlp()
    calls: list[int] = []

    def fn(batch: Batch) -> tuple[torch.Tensor, float]:
        calls.append(len(batch["x"]))
        return loss_fn(model)(batch)

    with Session(model, ram=needed_bytes(512) // 3) as storm:
        storm.run(fn, make_batch(512))
        fits = calls[-1]
        calls.clear()
        storm.run(fn, make_batch(fits))
        assert calls == [fits]
        calls.clear()
        storm.run(fn, make_batch(fits + 8))
        assert max(calls) <= fits
        assert sum(calls) == fits + 8


def test_a_step_that_is_not_the_one_that_was_planned_is_tried_again_before_it_is_split() -> None:
    """Decided as it goes it does not fit; with a plan of its own it does."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
            self.depth = 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[: self.depth]:
                x = x + torch.tanh(layer(x))
            return x

    torch.manual_seed(1)
    model, x = Branching(), torch.randn(512, WIDTH)
    calls: list[int] = []

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        calls.append(len(x))
        return model(x).square().sum(), len(x)

    model.depth = 8
    with Session(model, ram="64KiB") as storm, pytest.raises(BudgetError) as caught:
        storm.run(fn, x, micro_batches=1)
    model.depth = 2
    with Session(model, ram=caught.value.needed_bytes) as storm:
        for _ in range(3):
            storm.run(fn, x)
        calls.clear()
        model.depth = 8
        for _ in range(3):
            storm.run(fn, x)
        assert storm.usage().ram_bytes <= caught.value.needed_bytes
    assert calls == [512] * len(calls)
    assert len(calls) <= 4


def test_a_single_sample_that_does_not_fit_is_a_budget_error_with_what_was_tried() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 65536), nn.Tanh(), nn.Linear(65536, 1))
    before = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient
    state = torch.get_rng_state()
    with Session(model, ram="64KiB") as storm, pytest.raises(BudgetError, match="Not even one sample") as caught:
        storm.run(lambda x: (model(x).sum(), len(x)), torch.randn(8, WIDTH))
    assert caught.value.tier == "ram"
    assert caught.value.smallest_bytes is not None
    assert "1 x 8" in str(caught.value)
    assert "8 x 1" in str(caught.value)
    assert all(
        p.grad is gradient and bool((gradient == 1).all())
        for p, gradient in zip(model.parameters(), before, strict=True)
    )
    assert not torch.equal(torch.get_rng_state(), state), "the batch was drawn outside of run"


def test_a_batch_that_cannot_be_split_says_why() -> None:
    model = mlp()
    x = torch.randn(512, WIDTH)
    with Session(model, ram="64KiB") as storm:
        with pytest.raises(BudgetError, match=r"no tensor with a first dimension .* dict\(batch\)"):
            storm.run(lambda batch: (model(batch["x"]).sum(), 1), UserDict(x=x))
        with pytest.raises(BudgetError, match="cannot be split further: the batch has 1 samples"):
            storm.run(lambda batch: (model(batch[0]).sum(), 1), x[None])


def test_a_named_number_of_micro_batches_is_kept_to_and_the_error_names_one_that_might_do() -> None:
    model, batch = mlp(), make_batch(512)
    with Session(model, ram=needed_bytes(512) // 3) as storm:
        with pytest.raises(BudgetError, match=r"micro_batches=2 is too small: try about (\d+)"):
            storm.run(loss_fn(model), batch, micro_batches=2)
        storm.run(loss_fn(model), batch, micro_batches=16)
    assert storm.report().highest is not None


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "4"])
def test_a_number_of_micro_batches_that_is_none_is_a_config_error(number: Any) -> None:
    model = mlp()
    with pytest.raises(ConfigError, match=r"micro_batches=.* must be an integer"):
        Session(model, unlimited=True).run(loss_fn(model), make_batch(4), micro_batches=number)


def test_more_micro_batches_than_samples_are_a_config_error() -> None:
    model = mlp()
    with pytest.raises(ConfigError, match="micro_batches=5 was given, but the batch has 4 samples"):
        Session(model, unlimited=True).run(loss_fn(model), make_batch(4), micro_batches=5)
    with pytest.raises(ConfigError, match="no tensor with a first dimension"):
        Session(model, unlimited=True).run(lambda _: (model(torch.ones(2, WIDTH)).sum(), 1), "x", micro_batches=2)


# ---------------------------------------------------------------------- what a split changes


class WithFunctionalDropout(nn.Module):
    def __init__(self, attention_dropout: float) -> None:
        super().__init__()
        self.attention_dropout = attention_dropout
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * self.weight, self.attention_dropout, self.training)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Dropout(0.1), r"Dropout \(p=0.1\) in '1'"),
        (nn.BatchNorm1d(WIDTH), "BatchNorm1d .* in '1'"),
        (WithFunctionalDropout(0.2), r"attention_dropout=0.2\) in '1'"),
        (nn.RReLU(), "RReLU .* in '1'"),
        (nn.Dropout(0.0), ""),
        (nn.Dropout(0.1).eval(), ""),
        (nn.BatchNorm1d(WIDTH).eval(), ""),
        (nn.LayerNorm(WIDTH), ""),
        (WithFunctionalDropout(0.0), ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_split_says_what_makes_it_differ_from_the_whole_batch(module: nn.Module, words: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), module)
    storm = Session(model, unlimited=True)
    fn = lambda x: (model(x).sum(), len(x))  # noqa: E731
    storm.run(fn, torch.randn(8, WIDTH))
    assert not any("run:" in note for note in storm.report().notes)
    storm.run(fn, torch.randn(8, WIDTH), micro_batches=4)
    (note,) = [note for note in storm.report().notes if "not the same" in note] or [""]
    assert bool(words) == bool(note)
    if words:
        assert re.search(words, note)


def test_what_differs_names_one_module_of_each_kind() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(50)), nn.BatchNorm1d(4))
    assert what_differs(model) == "Dropout (p=0.1) in '0.1', BatchNorm1d (statistics over the batch) in '50'"
    attention = nn.MultiheadAttention(8, 2, dropout=0.25)
    assert what_differs(attention) == "MultiheadAttention (dropout=0.25)"


def test_a_hook_that_acts_on_gradients_is_not_split() -> None:
    model = nn.Linear(WIDTH, CLASSES)
    model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    storm = Session(model, unlimited=True)
    storm.run(loss_fn(model), make_batch(8))
    with pytest.raises(UnsupportedError, match=r"'weight' has a hook .* in each of 2 micro-batches"):
        storm.run(loss_fn(model), make_batch(8), micro_batches=2)


# ---------------------------------------------------------------------- what fn may return


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda loss: loss, r"fn returned a tensor of shape \(\) .* \(sum of losses, weight\)"),
        (lambda loss: (loss, 1, 2), "fn returned a tuple of 3"),
        (lambda loss: None, "fn returned NoneType"),
        (lambda loss: (3.0, 1), "fn returned float 3.0 as the sum of losses"),
        (lambda loss: (loss.expand(2), 1), r"shape \(2,\) .* as the sum of losses"),
        (lambda loss: (loss.detach(), 1), "detached"),
        (lambda loss: (loss, "many"), "str 'many' as the weight"),
        (lambda loss: (loss, True), "bool True as the weight"),
        (lambda loss: (loss, torch.ones(2)), r"shape \(2,\) .* as the weight"),
        (lambda loss: (loss, loss), "weight that requires a gradient"),
        (lambda loss: (loss, 0), "sum to 0 over 1 calls"),
        (lambda loss: (loss, torch.tensor(-2)), "sum to -2"),
    ],
)
def test_what_fn_returns_is_checked_and_an_error_leaves_everything_as_it_was(
    answer: Callable[[torch.Tensor], Any], words: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(8, 4)
    for parameter in model[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    kept = [parameter.grad for parameter in model.parameters()]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    storm = Session(model, unlimited=True)
    with pytest.raises(ConfigError, match=words):
        storm.run(lambda batch: answer(model(batch).sum()), x)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), kept, strict=True))
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    storm.run(lambda batch: (model(batch).sum(), 1), x)


def test_a_closed_session_and_a_step_around_are_errors_that_leave_the_gradients() -> None:
    model = nn.Linear(4, 4)
    model.weight.grad = torch.ones(4, 4)
    storm = Session(model, unlimited=True)
    fn = lambda x: (model(x).sum(), len(x))  # noqa: E731
    with storm.step(), pytest.raises(ConfigError, match="already in a step"):
        storm.run(fn, torch.randn(4, 4))
    storm.close()
    with pytest.raises(StorageError, match="closed"):
        storm.run(fn, torch.randn(4, 4))
    assert torch.equal(model.weight.grad, torch.ones(4, 4))


# ---------------------------------------------------------------------- the choice


@given(rows=st.integers(1, 10_000), data=st.data())
def test_parts_are_as_equal_as_can_be_and_equal_where_that_costs_less_than_twice_as_many(
    rows: int, data: st.DataObject
) -> None:
    at_least = data.draw(st.integers(1, rows))
    number = choose_num_parts(rows, at_least)
    sizes = part_sizes(rows, number)
    assert sum(sizes) == rows
    assert len(sizes) == number
    assert 1 <= sizes[-1] <= sizes[0] <= math.ceil(rows / at_least)
    assert sizes[0] - sizes[-1] <= 1
    assert at_least <= number < 2 * at_least
    divides = any(rows % other == 0 for other in range(at_least, 2 * at_least))
    assert divides == (sizes[0] == sizes[-1])


@given(
    fixed=st.integers(0, 10**6),
    per_row=st.integers(1, 10**4),
    rows=st.integers(2, 2000),
    spare=st.floats(1.0, 50.0),
    known=st.floats(0.0, 1.0),
)
def test_two_looks_at_what_does_not_fit_find_what_does_where_memory_is_a_line(
    fixed: int, per_row: int, rows: int, spare: float, known: float
) -> None:
    """Whatever part of what is fixed was known: the first look may err, the second one knows the line."""
    budget = fixed + int(per_row * spare)
    points: list[tuple[int, int]] = []
    size = rows
    while fixed + per_row * size > budget:
        assert len(points) < 3, points
        points.append((size, fixed + per_row * size))
        smaller = rows_that_fit(points, fixed_bytes=int(fixed * known), budget_bytes=budget)
        assert 1 <= smaller < size
        size = smaller
    if known == 1.0 and points:
        assert len(points) == 1
        assert fixed + per_row * (size + 1) > budget


def test_small_tensors_that_move_together_are_each_of_the_module_that_saved_them(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    with Session(model, ram="1MiB", disk=f"{tmp_path}:16MiB", recompute=False) as session:
        with session.step():
            model(torch.randn(64, 32)).sum().backward()
        plan = session.plan()
    assert plan is not None
    assert any(parcel.num_storages > 1 for parcel in plan.trace.parcels)
    saved_in = [storage.block for storage in plan.trace.storages if storage.parcel >= 0]
    assert {block.partition(".")[0] for block in saved_in} == {"0", "1", "2", "3"}
    assert saved_in == sorted(saved_in), "in the order of the forward"
