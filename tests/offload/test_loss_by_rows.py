"""A model's own loss whose cross entropy is computed some rows at a time within steps: the bits of the whole at once,
less memory, and left alone where that is not what would be computed."""

from __future__ import annotations

import copy
import ctypes
import functools
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn._reduction import get_enum
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from offload.rehearsed import Rehearsal
from offload.small_llama import llama
from plan import naive
from torchstorm.offload import torch_private as private
from torchstorm.offload.loss import by_rows, cross_entropy, rows
from torchstorm.offload.loss.by_rows import LossByRows, LossesByRows
from torchstorm.offload.loss.cross_entropy import CrossEntropy
from torchstorm.offload.loss.place import with_losses
from torchstorm.offload.loss.rows import ALIGNED, MEAN, CrossEntropyByRows, How, has_same_bits, rows_at_a_time
from torchstorm.offload.session import Session
from torchstorm.offload.simulated.step import simulate
from torchstorm.plan.profiles import named_machine

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated:UserWarning"),
]

NUM_WORDS = 100


@pytest.fixture
def all_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small logits are computed by rows, too, in several parts."""
    monkeypatch.setattr(cross_entropy, "WORTH_BYTES", 0)
    monkeypatch.setattr(rows, "_LEAST_BYTES", 1)


def ids_of(index: int, length: int, num_words: int = NUM_WORDS) -> torch.Tensor:
    return torch.randint(num_words, (2, length), generator=torch.Generator().manual_seed(index))


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(
        one.dtype == other.dtype and torch.equal(_bytes_of(one), _bytes_of(other))
        for one, other in zip(ours, theirs, strict=True)
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def logits_and_labels(
    num_rows: int, num_words: int, dtype: torch.dtype, *, seed: int = 0, ignored: float = 0.2
) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(num_rows, num_words, generator=draw)).to(dtype).requires_grad_()
    labels = torch.randint(num_words, (num_rows,), generator=draw)
    return logits, torch.where(torch.rand(num_rows, generator=draw) < ignored, -100, labels)


def count_functions(monkeypatch: pytest.MonkeyPatch) -> list[How]:
    """How every cross entropy by rows was computed, from now on."""
    found = list[How]()
    forward = rows.forward

    def counted(logits: torch.Tensor, target: torch.Tensor, how: How) -> tuple[torch.Tensor, torch.Tensor]:
        found.append(how)
        return forward(logits, target, how)

    monkeypatch.setattr(rows, "forward", counted)
    return found


# ---------------------------------------------------------------- the bits


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 70),
    num_words=st.one_of(st.integers(1, 70), st.sampled_from([1000, 1024, 1025, 50257])),
    num_parts=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    computed=st.sampled_from([torch.float32, None]),
    reduction=st.sampled_from(["mean", "sum"]),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_some_rows_at_a_time_have_the_bits_of_the_whole_at_once(
    num_rows: int,
    num_words: int,
    num_parts: int,
    dtype: torch.dtype,
    computed: torch.dtype | None,
    reduction: str,
    ignored: float,
    seed: int,
) -> None:
    computed = computed or dtype
    logits, labels = logits_and_labels(num_rows, num_words, dtype, seed=seed, ignored=ignored)
    whole = nn.functional.cross_entropy(logits.to(computed), labels, reduction=reduction)
    expected = [whole.detach(), torch.autograd.grad(1.7 * whole, logits)[0]]
    each = -(-num_rows // num_parts // ALIGNED) * ALIGNED
    found = CrossEntropyByRows.apply(logits, labels, How(computed, get_enum(reduction), -100, each))
    assert same_bits([found.detach(), torch.autograd.grad(1.7 * found, logits)[0]], expected)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_numbers_that_are_none_have_the_same_bits(value: float) -> None:
    logits, labels = logits_and_labels(32, 50, torch.bfloat16)
    with torch.no_grad():
        logits[3, 7] = logits[20] = value
    how = How(torch.float32, MEAN, -100, 8)
    whole = nn.functional.cross_entropy(logits.float(), labels)
    found = CrossEntropyByRows.apply(logits, labels, how)
    ours, theirs = (
        [loss.detach(), torch.autograd.grad(loss, logits, torch.ones_like(loss))[0]] for loss in (found, whole)
    )
    assert same_bits(ours, theirs)
    assert has_same_bits(logits, labels, how)


def test_an_index_to_ignore_may_be_a_class() -> None:
    logits, labels = logits_and_labels(32, 5, torch.float32, ignored=0.0)
    whole = nn.functional.cross_entropy(logits, labels, ignore_index=0)
    found = CrossEntropyByRows.apply(logits, labels, How(torch.float32, MEAN, 0, 8))
    ours, theirs = ([loss.detach(), torch.autograd.grad(loss, logits)[0]] for loss in (found, whole))
    assert same_bits(ours, theirs)


def test_a_gradient_of_its_gradient_is_that_of_cross_entropy() -> None:
    logits, labels = logits_and_labels(32, 50, torch.float64)
    found = []
    for loss in (
        CrossEntropyByRows.apply(logits, labels, How(torch.float64, MEAN, -100, 8)),
        nn.functional.cross_entropy(logits, labels),
    ):
        (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
        found.append([grad.detach(), *torch.autograd.grad(grad.square().sum(), logits)])
    assert same_bits(*found)
    assert found[0][1].abs().max() > 0


def test_a_label_that_is_no_class_raises_what_it_raises_in_the_whole() -> None:
    logits, labels = logits_and_labels(32, 50, torch.float32)
    labels[20] = 50
    with pytest.raises(IndexError, match="Target 50 is out of bounds"):
        CrossEntropyByRows.apply(logits, labels, How(torch.float32, MEAN, -100, 8))


@settings(deadline=None)
@given(num_rows=st.integers(1, 10**6), num_words=st.integers(1, 10**6))
def test_parts_are_aligned_and_neither_many_nor_large(num_rows: int, num_words: int) -> None:
    with torch.device("meta"):
        logits = torch.empty(num_rows, num_words)
    each = rows_at_a_time(logits, torch.float32)
    assert each % ALIGNED == 0
    assert each == ALIGNED or each * num_words * 4 <= 2**27
    assert (each + ALIGNED) * num_words * 4 > 2**24


@pytest.mark.parametrize("ignored", [0.2, 1.0])
def test_rows_that_depend_on_others_are_noticed_whatever_is_ignored(
    ignored: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels = logits_and_labels(64, 50, torch.float32, ignored=ignored)
    how = How(torch.float32, MEAN, -100, 16)
    assert has_same_bits(logits, labels, how)
    backward = rows.backward
    monkeypatch.setattr(rows, "backward", lambda *given: backward(*given).mul_(1 + 2**-20))
    assert not has_same_bits(logits, labels, how)


# ---------------------------------------------------------------- in a Session


@pytest.mark.usefixtures("all_are_worth_it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.no_cover
def test_steps_within_a_budget_have_the_bits_of_the_model_alone_at_lengths_that_change(
    dtype: torch.dtype, recompute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (64, 48)

    def train(session: Session | None) -> list[list[torch.Tensor]]:
        found = []
        for index in range(6):
            ids = ids_of(index, lengths[index % 2])
            model.zero_grad()
            with session.step() if session is not None else torch.enable_grad():
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
            found.append([loss.detach(), *grads_of(model)])
        return found

    model = llama().to(dtype)
    expected = train(None)
    with Session(model, unlimited=True) as session:
        assert all(same_bits(*pair) for pair in zip(train(session), expected, strict=True))
        highest = session.report().highest
        assert highest is not None
    computed = count_functions(monkeypatch)
    with Session(
        model, ram=highest.ram_bytes * 2 // 3, disk=f"{tmp_path}:1GiB", recompute=recompute, check=True
    ) as session:
        found = train(session)
        report = session.report()
        assert report.measured is not None
        assert report.num_planned >= 2
        assert report.measured.ram_bytes <= highest.ram_bytes * 2 // 3
        assert not any("loss" in note for note in report.notes)
    assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))
    assert [how.dtype for how in computed] == [torch.float32] * len(computed)
    assert len(computed) == 7, "one of every step, and one that was compared"


@pytest.mark.usefixtures("all_are_worth_it")
def test_a_step_takes_less_memory_by_what_the_loss_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    num_words, length = 4000, 64
    logits_bytes = 2 * length * num_words * 2
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=1e9)

    def peak_bytes() -> int:
        model = llama(num_words).bfloat16()
        ids = gpu.meter.hold(ids_of(0, length, num_words))
        with gpu.session(model, 1 << 40) as session:
            for _ in range(3):
                with session.step():
                    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                model.zero_grad()
            return session.usage().vram_bytes

    with gpu.meter:
        ours = peak_bytes()
        monkeypatch.setattr(cross_entropy, "WORTH_BYTES", 1 << 40)
        theirs = peak_bytes()
    # Three copies in float32, of which some memory is free while other parts of backward take more.
    assert theirs - ours >= 3 * logits_bytes


@pytest.mark.usefixtures("all_are_worth_it")
@pytest.mark.parametrize("autocast", [False, True])
def test_a_loss_within_a_model_is_simulated_by_rows(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = count_functions(monkeypatch)
    machine, x = named_machine("h200"), torch.randn(50, 16)

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = model(x, torch.zeros(50, dtype=torch.int64, device=x.device))
            return loss

    simulate(Head().bfloat16(), x.bfloat16(), loss_of, machine, limit_bytes=1 << 35)
    assert [how.dtype for how in computed] == [torch.float32 if autocast else torch.bfloat16]


@pytest.mark.usefixtures("all_are_worth_it")
def test_a_forecast_for_another_machine_counts_no_copies_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    num_words, length = 4000, 64
    model, ids = llama(num_words).bfloat16(), ids_of(0, length, num_words)

    def kept_bytes() -> int:
        def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
            return loss

        return naive.all_kept_bytes(simulate(model, ids, loss_of, named_machine("h200"), limit_bytes=1 << 35).trace)

    ours = kept_bytes()
    monkeypatch.setattr(cross_entropy, "WORTH_BYTES", 1 << 40)
    assert kept_bytes() - ours >= 3 * (2 * length * num_words * 2)


@pytest.mark.usefixtures("all_are_worth_it")
def test_masked_words_autocast_and_a_given_number_of_items_have_the_same_bits() -> None:
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        vocab_size=NUM_WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    config.pad_token_id = config.bos_token_id = config.eos_token_id = config.cls_token_id = config.sep_token_id = 0
    masked = transformers.ModernBertForMaskedLM(config)
    ids = ids_of(0, 32)
    labels = ids.masked_fill(ids % 3 > 0, -100)
    for model, options in ((masked, {}), (llama(), {"num_items_in_batch": 17})):
        found = list[list[torch.Tensor]]()
        with Session(model, unlimited=True) as session:
            for index in range(2):
                model.zero_grad()
                torch.manual_seed(0)
                with torch.autocast("cpu", torch.bfloat16), session.step() if index else torch.enable_grad():
                    loss = model(input_ids=ids, labels=labels, **options).loss
                assert (type(_origin(loss)).__name__ == "CrossEntropyByRowsBackward") == (index == 1)
                loss.backward()
                found.append([loss.detach(), *grads_of(model)])
        assert same_bits(*found)


def _origin(loss: torch.Tensor) -> Any:
    """What made a loss, before it was divided by a number."""
    node = loss.grad_fn
    return node if node is None or "Div" not in type(node).__name__ else node.next_functions[0][0]


class Head(nn.Module):
    """Logits of a token each, and maybe their loss, computed again in backward or not."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(16, 32), nn.GELU()), nn.Linear(32, NUM_WORDS)
        self.criterion = nn.CrossEntropyLoss(reduction="sum")
        self.is_checkpointed = is_checkpointed

    def _loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.criterion(self.head(x), labels)
        return loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if not self.is_checkpointed:
            return self._loss(x, labels)
        loss: torch.Tensor = checkpoint(self._loss, x, labels, use_reentrant=False)
        return loss


@pytest.mark.usefixtures("all_are_worth_it")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_whatever_calls_cross_entropy_in_a_step_gets_it_by_rows(
    autocast: bool, is_checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = count_functions(monkeypatch)
    model = Head(is_checkpointed=is_checkpointed)
    x, labels = torch.randn(50, 16), ids_of(0, 25).view(-1)
    found = list[list[torch.Tensor]]()
    with Session(model, unlimited=True) as session:
        for index in range(4):
            model.zero_grad()
            with (
                session.step() if index % 2 else torch.enable_grad(),
                torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            ):
                loss = model(x, labels)
                loss.backward()
            found.append([loss.detach(), *grads_of(model)])
            assert len(computed) == (0, 2, 2, 3)[index] + is_checkpointed * ((index + 1) // 2)
    assert all(same_bits(one, found[0]) for one in found[1:])


@pytest.mark.usefixtures("all_are_worth_it")
def test_a_bert_that_makes_its_own_loss_has_the_bits_of_the_model_alone_within_a_budget(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=NUM_WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.BertForMaskedLM(config).bfloat16()
    ids = ids_of(0, 64)

    def train(session: Session | None) -> list[list[torch.Tensor]]:
        found = []
        for index in range(5):
            torch.manual_seed(index)
            model.zero_grad()
            with session.step() if session is not None else torch.enable_grad():
                loss = model(input_ids=ids, labels=ids.masked_fill(ids % 3 > 0, -100)).loss
                loss.backward()
            assert (type(loss.grad_fn).__name__ == "CrossEntropyByRowsBackward") == (session is not None)
            found.append([loss.detach(), *grads_of(model)])
        return found

    expected = train(None)
    with Session(model, unlimited=True) as session:
        train(session)
        most = session.usage().ram_bytes
    with Session(model, ram=most * 2 // 3, disk=f"{tmp_path}:1GiB", check=True) as session:
        assert all(same_bits(*pair) for pair in zip(train(session), expected, strict=True))
        assert session.report().num_planned >= 2


@pytest.mark.usefixtures("all_are_worth_it", "fresh_compiler")
def test_code_that_is_compiled_has_the_cross_entropy_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Head()
    x, labels = torch.randn(50, 16), ids_of(0, 25).view(-1)
    expected = model(x, labels).detach()
    loss = torch.compile(model._loss, backend="aot_eager")
    with Session(model, unlimited=True) as session:
        computed = count_functions(monkeypatch)
        for _ in range(2):
            with session.step():
                found = loss(model.body(x), labels)
                found.backward()
            torch.testing.assert_close(found.detach(), expected)
    assert not computed


@pytest.mark.usefixtures("all_are_worth_it")
def test_it_is_there_within_steps_alone_and_gone_after_one_that_fails() -> None:
    model = llama()
    own = model.loss_function
    ids = ids_of(0, 32)
    with Session(model, unlimited=True) as session:
        assert model.loss_function is own
        with session.step():
            assert isinstance(model.loss_function, LossByRows)
            assert copy.deepcopy(model).loss_function is own
            assert pickle.loads(pickle.dumps(model.loss_function)) is own
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert "_loss_function" not in vars(model)
        with pytest.raises(KeyError), session.step():
            raise KeyError
        assert "_loss_function" not in vars(model)


@pytest.mark.usefixtures("all_are_worth_it")
def test_one_of_transformers_that_was_set_is_set_again_after_a_step_and_none_is_put_off_where_functions_are_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = count_functions(monkeypatch)
    model = llama()
    own = model.loss_function
    model.loss_function = own
    ids = ids_of(0, 32)
    with Session(model, unlimited=True) as session:
        with session.step():
            assert isinstance(model.loss_function, LossByRows)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert vars(model)["_loss_function"] is own
        before = len(computed)
        with session.step(), torch._C.DisableTorchFunctionSubclass():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            assert len(computed) == before + 1, "by PyTorch's operator"
            loss.backward()


@pytest.mark.usefixtures("all_are_worth_it")
def test_a_loss_of_the_user_s_stays() -> None:
    model = llama()
    told = []

    def mine(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        told.append(type(logits))
        return logits.float().mean()

    model.loss_function = mine
    ids = ids_of(0, 32)
    with Session(model, unlimited=True) as session, session.step():
        assert model.loss_function is mine
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert told == [torch.Tensor]
    assert model.loss_function is mine


@pytest.mark.usefixtures("all_are_worth_it", "fresh_compiler", "told_once", "quickly")
def test_one_that_is_compiled_stays_compiled_within_steps() -> None:
    model = llama()
    with Session(model, unlimited=True) as session:
        session.compile()
        placed = model.loss_function
        with session.step():
            assert model.loss_function is placed
        assert model.loss_function is placed


@contextmanager
def placed_loss(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LossByRows, list[How]]]:
    (module,) = with_losses(llama())
    by_rows = CrossEntropy()
    loss = LossByRows(module, by_rows)
    loss.place()
    with by_rows.running():
        yield loss, count_functions(monkeypatch)


@pytest.mark.usefixtures("all_are_worth_it")
def test_it_is_computed_at_once_without_gradients_for_small_logits_and_within_transforms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(2, 16, NUM_WORDS)
    labels = ids_of(0, 16)
    with placed_loss(monkeypatch) as (loss, computed):

        def of(logits: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = loss(logits, labels, vocab_size=NUM_WORDS)
            return found

        of(logits)
        with torch.no_grad():
            of(logits.requires_grad_())
        with forward_ad.dual_level():
            of(forward_ad.make_dual(logits, torch.ones_like(logits)))
        expected = torch.autograd.grad(of(logits), logits)[0]
        assert len(computed) == 2, "compared once, and computed once"
        torch.testing.assert_close(torch.func.grad(of)(logits.detach()), expected, rtol=0, atol=0)
        torch.func.vmap(torch.func.grad(of))(torch.stack([logits.detach()] * 2))
        monkeypatch.setattr(cross_entropy, "WORTH_BYTES", logits.nbytes + 1)
        of(logits)
        assert len(computed) == 2
    monkeypatch.setattr(cross_entropy, "WORTH_BYTES", 0)
    of(logits)
    assert len(computed) == 2, "the step is over"


@pytest.mark.usefixtures("all_are_worth_it")
def test_whatever_is_no_cross_entropy_of_a_table_sees_the_logits_as_they_would_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(by_rows, "_is_known", lambda _: True)
    labels = ids_of(0, 16).view(-1)
    of = nn.functional.cross_entropy
    weights = torch.rand(NUM_WORDS)

    def shifted(given: torch.Tensor) -> torch.Tensor:
        return of(given.float()[..., :-1, :].contiguous().view(-1, NUM_WORDS), labels[:30])

    losses: list[Callable[[torch.Tensor], torch.Tensor]] = [
        shifted,
        lambda given: of(given.float().view(-1, NUM_WORDS), labels, weight=weights),
        lambda given: of(given.float().view(-1, NUM_WORDS), labels, label_smoothing=0.1),
        lambda given: of(given.float().view(-1, NUM_WORDS), labels, reduction="none").sum(),
        lambda given: of(given.float().view(-1, NUM_WORDS), labels, reduce=False).sum(),
        lambda given: of(given.float().view(-1, NUM_WORDS), labels.to(torch.uint8)),
        lambda given: of(given.float().transpose(1, 2), labels.view(2, 16)),
        lambda given: of(given.float()[:, -7:].reshape(-1, NUM_WORDS), labels[:14]),
        lambda given: of(given.view(-1, NUM_WORDS).view(torch.int16).float(), labels) + 0 * given.sum(),
        lambda given: given.float().logsumexp(-1).mean() + torch.softmax(given, -1).square().sum(),
        lambda given: (torch.ones(1) * given).sum(dtype=torch.float32) / given.shape[0] + given.float().dim(),
    ]
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 16, NUM_WORDS, generator=draw).bfloat16().requires_grad_()
    for function in losses:
        with placed_loss(monkeypatch) as (loss, computed):
            loss._found = function
            found = loss(logits)
            # What is no longer put off, PyTorch's operator computes by rows, if there are enough.
            assert bool(computed) == (function is shifted)
        whole = function(logits)
        ours, theirs = ([one.detach(), torch.autograd.grad(one, logits)[0]] for one in (found, whole))
        assert same_bits(ours, theirs)


def test_only_transformers_own_functions_are_given_what_stands_for_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    own = llama().loss_function
    assert by_rows._is_known(own)
    assert not by_rows._is_known(functools.wraps(own)(lambda logits, labels, **_: (logits / 2).mean()))
    with monkeypatch.context() as patch:
        patch.setattr(transformers.loss.loss_utils, "fixed_cross_entropy", lambda *_, **__: None)
        assert not by_rows._is_known(own)
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "cross_entropy", lambda *_, **__: None)
        assert not by_rows._is_known(own)
    assert by_rows._is_known(own)


@pytest.mark.usefixtures("all_are_worth_it")
def test_a_penalty_on_gradients_and_several_gradients_at_once_are_those_of_the_model_alone() -> None:
    model = Head().double()
    x, labels = torch.randn(50, 16, dtype=torch.float64), ids_of(0, 25).view(-1)
    found = list[list[torch.Tensor]]()
    with Session(model, unlimited=True) as session:
        for step in (torch.enable_grad(), session.step()):
            model.zero_grad()
            with step:
                loss = model(x, labels)
                penalty, *_ = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
                penalty.square().sum().backward()
                loss = model(x, labels)
                several = torch.autograd.grad(
                    loss, model.head.weight, torch.tensor([1.0, 3.0], dtype=torch.float64), is_grads_batched=True
                )
            found.append([*several, *grads_of(model)])
    assert same_bits(*found)


@pytest.mark.usefixtures("all_are_worth_it")
def test_only_the_thread_of_the_step_has_it_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = count_functions(monkeypatch)
    model, labels = Head(), ids_of(0, 25).view(-1)

    def beside() -> None:
        model(torch.randn(50, 16), labels).backward()

    with Session(model, unlimited=True) as session, session.step():
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        assert not computed
        beside()
        assert computed


@pytest.mark.parametrize("counts", [True, False], ids=["as it is", "PyTorch does not count its reference"])
def test_what_computes_it_is_held_neither_too_often_nor_too_seldom(
    counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stash = torch._C._stash_obj_in_tls

    def stash_uncounted(name: str, given: object) -> None:
        stash(name, given)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(given))

    if not counts and not private._takes_without_counting():
        monkeypatch.setattr(torch._C, "_stash_obj_in_tls", stash_uncounted)
    private._takes_without_counting.cache_clear()
    by_rows = CrossEntropy()
    num_references = sys.getrefcount(by_rows)
    try:
        for _ in range(3):
            with by_rows.running():
                with by_rows.running():
                    assert cross_entropy.running() is by_rows
                assert cross_entropy.running() is by_rows
            assert sys.getrefcount(by_rows) == num_references
    finally:
        monkeypatch.undo()
        private._takes_without_counting.cache_clear()


@pytest.mark.usefixtures("all_are_worth_it")
def test_modes_of_the_user_s_do_not_see_the_comparison() -> None:
    class Counts(TorchDispatchMode):
        num_log_softmax = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.num_log_softmax += func.overloadpacket is torch.ops.aten._log_softmax
            return func(*args, **(kwargs or {}))

    model, x, labels = Head(), torch.randn(50, 16), ids_of(0, 25).view(-1)
    found = []
    with Session(model, unlimited=True) as session:
        for _ in range(2):
            with session.step(), Counts() as counts:
                model(x, labels).backward()
            found.append(counts.num_log_softmax)
    assert found[0] == found[1] > 2


@pytest.mark.usefixtures("all_are_worth_it")
def test_every_type_and_number_of_classes_is_compared_and_strided_logits_are_computed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = list[tuple[int, torch.dtype, torch.dtype]]()

    def compare(logits: torch.Tensor, target: torch.Tensor, how: How) -> bool:
        compared.append((logits.shape[1], logits.dtype, how.dtype))
        return True

    monkeypatch.setattr(cross_entropy, "has_same_bits", compare)
    by_rows = CrossEntropy()
    labels = ids_of(0, 16).view(-1) % 50
    whole = None, MEAN, -100, 0.0
    for num_words in (50, 60):
        for dtype in (torch.bfloat16, torch.float32):
            logits = torch.randn(32, num_words).to(dtype).requires_grad_()
            for cast in (torch.float32, dtype):
                assert by_rows(logits, cast, labels, *whole) is not None
    assert compared == [
        (num_words, *types)
        for num_words in (50, 60)
        for types in (
            (torch.bfloat16, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.float32),
        )
    ]
    strided = torch.randn(32, 120, requires_grad=True)[:, ::2]
    assert by_rows(strided, torch.float32, labels, *whole) is None
    with torch.autocast("cpu", torch.bfloat16):
        logits = torch.randn(32, 50).bfloat16().requires_grad_()
        assert by_rows(logits, torch.bfloat16, labels, *whole) is None
        assert by_rows(logits, torch.float32, labels, *whole) is not None


@pytest.mark.usefixtures("all_are_worth_it")
def test_where_some_rows_have_other_bits_it_is_computed_at_once_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cross_entropy, "has_same_bits", lambda *_: False)
    computed = count_functions(monkeypatch)
    model = llama()
    ids = ids_of(0, 32)
    with Session(model, unlimited=True) as session:
        for _ in range(2):
            with session.step():
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert session.report().notes == (
            "The loss is computed at once: some rows at a time have other bits on this device.",
        )
    assert not computed


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=NUM_WORDS, n_embd=32, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config).bfloat16()


@pytest.mark.usefixtures("all_are_worth_it")
def test_a_model_whose_kind_of_loss_transformers_does_not_know_has_it_by_rows_and_is_warned_of_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = count_functions(monkeypatch)
    warned = list[str]()
    monkeypatch.setattr(transformers.modeling_utils.logger, "warning_once", warned.append)
    model = gpt2()
    ids = ids_of(0, 32)
    with Session(model, unlimited=True) as session:
        with session.step():
            model(input_ids=ids, use_cache=False).logits.sum().backward()
        assert not warned
        with session.step():
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert len(warned) == 1
    assert [how.dtype for how in computed] == [torch.float32] * 2


def test_only_models_whose_loss_can_be_set_have_one() -> None:
    assert len(with_losses(llama())) == 1
    assert not with_losses(llama().model)
    assert len(with_losses(gpt2())) == 1
    assert not with_losses(gpt2().transformer)
    assert len(with_losses(nn.Sequential(llama(), llama()))) == 2
    assert not with_losses(nn.Linear(2, 2))
    with LossesByRows(nn.Linear(2, 2)).placed():
        pass


@pytest.mark.usefixtures("all_are_worth_it")
def test_logits_that_a_users_hook_gives_back_with_other_strides_have_the_bits_of_the_model_alone() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(
                lambda saved: saved.t().contiguous() if saved.dim() == 2 else saved,
                lambda saved: saved.t() if saved.dim() == 2 else saved,
            ):
                return nn.functional.cross_entropy(logits, labels)

    given, labels = 5 * torch.randn(40, 64), torch.randint(64, (40,))
    model, found = Loss(), []
    with Session(model, unlimited=True) as session:
        for context in (session.step, nullcontext):
            logits = given.clone().requires_grad_()
            with context():
                model(logits, labels).backward()
            assert logits.grad is not None
            found.append(logits.grad)
    assert torch.equal(*found)
