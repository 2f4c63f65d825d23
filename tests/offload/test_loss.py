"""A model's own loss function, compiled with its blocks: what it gives, and when it is left alone."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from close import assert_close
from offload.small_llama import llama
from torchstorm.offload.compiled import loss as loss_module
from torchstorm.offload.compiled.call import Captured
from torchstorm.offload.compiled.loss import CompiledLoss, compiled_losses
from torchstorm.offload.session import Session
from torchstorm.plan.variants import CHEAP

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler", "told_once"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def all_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of small logits is compiled, too."""
    monkeypatch.setattr(loss_module, "WORTH_BYTES", 0)


def compile_losses_by(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Has another compiler than Inductor for loss functions."""
    compile = torch.compile

    def compiled(function: Callable[..., Any], **options: Any) -> Any:
        is_loss = function.__name__.startswith("loss_")
        return compile(function, backend=backend) if is_loss else compile(function, **options)

    monkeypatch.setattr(torch, "compile", compiled)


@pytest.fixture
def as_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled loss runs operation by operation."""
    compile_losses_by(monkeypatch, "aot_eager")


def logits_and_labels(index: int = 0, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(index)
    return torch.randn(2, length, 100, generator=draw).requires_grad_(), torch.randint(100, (2, length), generator=draw)


def loss_of(model: Any, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss, and the gradient of its logits."""
    logits, labels = logits_and_labels(length=length)
    loss = model.loss_function(logits, labels, vocab_size=100)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def steps(model: Any, session: Session, lengths: tuple[int, ...], *, num_steps: int) -> list[list[torch.Tensor]]:
    """Loss and gradients of each step."""
    found = []
    for index in range(num_steps):
        _, ids = logits_and_labels(index, lengths[index % len(lengths)])
        model.zero_grad()
        with session.step():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        found.append([loss.detach(), *(one.grad.clone() for one in model.parameters())])
    return found


@pytest.mark.no_cover
@pytest.mark.usefixtures("all_are_worth_it", "as_captured", "quickly")
def test_within_a_budget_it_has_the_same_bits_as_with_everything_kept_at_lengths_that_change(tmp_path: Path) -> None:
    lengths = (64, 48)
    model = llama()
    with Session(model, unlimited=True) as session:
        blocks = session.compile(variant=CHEAP)
        expected = steps(model, session, lengths, num_steps=5)
        report = session.report()
        assert report.highest is not None
        most_bytes = report.highest.ram_bytes * 3 // 4
    assert isinstance(model.loss_function, CompiledLoss)
    assert not blocks.notes
    model = llama()
    with Session(model, ram=most_bytes, disk=f"{tmp_path}:1GiB") as session:
        session.compile(variant=CHEAP)
        found = steps(model, session, lengths, num_steps=5)
        report = session.report()
        assert report.num_planned >= 1
        assert report.measured is not None
        assert report.measured.ram_bytes <= most_bytes
        assert not session._shared.runs_compiled  # what the loss compiles does not count as the user's own
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.no_cover
@pytest.mark.usefixtures("all_are_worth_it")
def test_compiled_by_inductor_it_is_near_the_eager_one_at_every_length_and_compiles_twice() -> None:
    model, captured = llama(), Captured()
    expected = [loss_of(model, length) for length in (12, 9, 15, 7)]
    compiled_losses(model, captured)
    found = [loss_of(model, length) for length in (12, 9, 15, 7)]
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other, other.double())
    assert captured.num_graphs == 2, "once for a length, once for all"


@pytest.mark.usefixtures("as_captured")
def test_of_small_logits_and_without_gradients_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, captured = llama(), Captured()
    compiled_losses(model, captured)
    logits, labels = logits_and_labels()
    monkeypatch.setattr(loss_module, "WORTH_BYTES", logits.nbytes + 1)
    loss_of(model)
    monkeypatch.setattr(loss_module, "WORTH_BYTES", logits.nbytes)
    with torch.no_grad():
        model.loss_function(logits, labels, vocab_size=100)
    assert captured.num_graphs == 0
    loss_of(model)
    assert captured.num_graphs == 1


@pytest.mark.usefixtures("all_are_worth_it", "as_captured")
def test_undone_the_model_has_its_own_again_and_one_that_was_set_meanwhile_stays() -> None:
    model = llama()
    own = model.loss_function
    for _ in range(2):  # a second compilation takes the first one's place
        losses = compiled_losses(model, Captured())
        assert model.loss_function is losses[0]
    losses[0].undo()
    assert model.loss_function is own
    assert "_loss_function" not in vars(model)

    def mine(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return logits.square().mean()

    model.loss_function = mine
    losses = compiled_losses(model, Captured())
    assert torch.equal(loss_of(model)[0], logits_and_labels()[0].detach().square().mean())
    losses[0].undo()
    assert model.loss_function is mine
    losses = compiled_losses(model, Captured())
    model.loss_function = own
    losses[0].undo()
    assert model.loss_function is own


def test_copies_of_the_model_have_the_loss_function_itself() -> None:
    model = llama()
    own = model.loss_function
    compiled_losses(model, Captured())
    assert copy.deepcopy(model).loss_function is own
    pickled = pickle.dumps(model)
    assert pickle.loads(pickled).loss_function is own
    assert b"torchstorm" not in pickled, "it can be read where there is no torchstorm"
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    assert torch.load(written, weights_only=False).loss_function is own


def test_only_models_that_compute_a_loss_are_changed_and_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(transformers.modeling_utils.logger, "warning_once", said.append)
    assert len(compiled_losses(llama(), Captured())) == 1
    assert not compiled_losses(nn.Sequential(nn.Linear(2, 2)), Captured())
    assert not compiled_losses(transformers.LlamaModel(llama().config), Captured())
    assert not said


@pytest.mark.usefixtures("all_are_worth_it")
def test_where_the_compiler_fails_it_runs_uncompiled_and_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(graph: object, inputs: object) -> Callable[..., Any]:
        raise RuntimeError("this compiler takes nothing")

    model = llama()
    expected = loss_of(model)
    compile_losses_by(monkeypatch, fails)
    (loss,) = compiled_losses(model, Captured())
    for _ in range(2):
        assert all(torch.equal(*both) for both in zip(loss_of(model), expected, strict=True))
    assert loss.failure == "RuntimeError: this compiler takes nothing"


@pytest.mark.usefixtures("all_are_worth_it", "as_captured")
@pytest.mark.no_cover
def test_labels_that_do_not_fit_raise_what_they_raise_uncompiled_and_it_is_compiled_still() -> None:
    model, captured = llama(), Captured()
    logits, labels = logits_and_labels()
    with pytest.raises(ValueError, match="Expected input batch_size") as eager:
        model.loss_function(logits, labels[:1], vocab_size=100)
    (loss,) = compiled_losses(model, captured)
    with pytest.raises(ValueError, match="Expected input batch_size") as compiled:
        model.loss_function(logits, labels[:1], vocab_size=100)
    assert str(compiled.value) == str(eager.value)
    assert not loss.failure
    loss_of(model)
    assert captured.num_graphs == 1


@pytest.mark.usefixtures("all_are_worth_it", "as_captured")
def test_a_loss_that_is_compiled_again_and_again_or_in_part_is_left_alone_and_the_reason_is_said() -> None:
    model, captured = llama(), Captured()
    seen: list[int] = []

    def grows(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        seen.append(len(seen))
        return logits.square().mean() * len(seen)

    model.loss_function = grows
    (loss,) = compiled_losses(model, captured)
    found = [float(loss_of(model)[0]) for _ in range(9)]
    assert found == pytest.approx([found[0] * times for times in range(1, 10)])
    assert captured.num_graphs == loss_module._MOST_COMPILED
    assert "had to be compiled" in loss.failure

    def breaks(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return logits.square().mean() * float(logits.detach().sum().item() > 0)

    model.loss_function = breaks
    (loss,) = compiled_losses(model, captured)
    loss_of(model)
    assert loss.failure == "a part of it cannot be compiled"


@pytest.mark.usefixtures("all_are_worth_it", "as_captured")
def test_a_tangent_passes_through_it() -> None:
    model = llama()
    compiled_losses(model, Captured())
    logits, labels = logits_and_labels()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(logits.detach(), torch.linspace(0, 1, 100).expand_as(logits).contiguous())
        tangent = forward_ad.unpack_dual(model.loss_function(dual, labels, vocab_size=100)).tangent
    assert tangent is not None
    assert float(tangent) != 0


@pytest.mark.usefixtures("all_are_worth_it")
def test_where_memory_runs_out_while_it_is_compiled_that_is_raised_and_it_is_compiled_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(graph: object, inputs: object) -> Callable[..., Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = llama()
    compile_losses_by(monkeypatch, fails)
    (loss,) = compiled_losses(model, Captured())
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(model)
    assert not loss.failure


class Named(nn.Module):
    """Something else by the same names."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self._loss_function = own

    @property
    def loss_function(self) -> Any:
        return {"mse": nn.functional.mse_loss}[self._loss_function]


def test_what_is_not_a_loss_function_that_can_be_set_is_left_alone() -> None:
    assert not compiled_losses(Named("mse"), Captured())
    assert not compiled_losses(Named(nn.MSELoss()), Captured())
