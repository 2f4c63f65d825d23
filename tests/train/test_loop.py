"""train/loop.py: what a run learns, and that it repeats to the last bit."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
from torchstorm.errors import ConfigError
from torchstorm.models.gpt import GPT
from torchstorm.models.xlstm import SIZES, XLSTMConfig
from torchstorm.plan.forecast import Figures
from torchstorm.train import loop
from torchstorm.train.config import TrainConfig
from torchstorm.train.data import Corpus, load_corpus
from torchstorm.train.loop import RunState, StepInfo, model_config, run_training, sample_text

CPU = torch.device("cpu")


@pytest.fixture
def config(options: dict[str, Any]) -> TrainConfig:
    return TrainConfig(**options)


def corpus_of(config: TrainConfig) -> Corpus:
    return load_corpus(config.data, tokenizer=config.tokenizer, batch=config.batch, seq=config.seq)


def run(config: TrainConfig, **options: Any) -> tuple[RunState, list[StepInfo], GPT]:
    infos: list[StepInfo] = []
    options = {"unlimited": True, "after_step": lambda state, model, optimizer, info: infos.append(info), **options}
    state, model, _ = run_training(config, corpus_of(config), CPU, **options)
    return state, infos, model


@pytest.mark.parametrize("model", ["gpt-micro", "xlstm-micro"])
def test_a_run_learns(config: TrainConfig, model: str) -> None:
    config = replace(config, model=model)
    state, _, _ = run(replace(config, steps=90, lr=1e-2, val_every=0, dropout=0.0, layers=1, width=16, seq=16))
    assert state.losses[0] == pytest.approx(5.5, abs=0.5)
    assert state.losses[-1] < 2.5
    assert state.val_losses == [(90, pytest.approx(state.losses[-1], abs=0.5))]


def test_a_run_repeats_to_the_last_bit_whatever_was_drawn_before(config: TrainConfig) -> None:
    first, _, _ = run(config)
    torch.manual_seed(99)
    torch.rand(5)
    second, _, _ = run(config)
    assert (first.losses, first.val_losses, first.sample) == (second.losses, second.val_losses, second.sample)
    assert first.weights_sha256 == second.weights_sha256
    other, _, _ = run(replace(config, seed=1))
    assert not set(first.losses) & set(other.losses)
    assert first.weights_sha256 != other.weights_sha256


def test_validations_in_between_do_not_change_the_run(config: TrainConfig) -> None:
    with_many, _, _ = run(replace(config, val_every=1))
    with_one, _, _ = run(replace(config, val_every=0))
    assert with_many.losses == with_one.losses
    assert [step for step, _ in with_many.val_losses] == [1, 2, 3, 4, 5, 6]
    assert with_many.val_losses[-1] == with_one.val_losses[0]


def test_dropout_draws_something_else_at_each_step(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    # The same batch and a learning rate that moves nothing: only dropout can change the loss.
    corpus = corpus_of(config)
    batch = corpus.batch("train", batch=4, seq=32, seed=0, index=(0, 0))
    monkeypatch.setattr(Corpus, "batch", lambda self, split, **kwargs: batch)
    still, _, _ = run(replace(config, lr=1e-30, dropout=0.5, weight_decay=0.0))
    assert len(set(still.losses)) == config.steps


def test_micro_batches_add_up_to_their_mean(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = corpus_of(config)
    big = corpus.batch("train", batch=4, seq=32, seed=0, index=(0, 0))
    config = replace(config, dropout=0.0, val_every=0, steps=4)

    def halves(self: Corpus, split: str, *, batch: int, index: tuple[int, ...], **kwargs: Any) -> Any:
        micro = index[-1] if split == "train" else 0
        return tuple(part[micro * batch : (micro + 1) * batch] for part in big)

    monkeypatch.setattr(Corpus, "batch", halves)
    whole, _, _ = run(config)
    split, _, _ = run(replace(config, batch=2, accumulate=2))
    assert split.losses == pytest.approx(whole.losses, rel=1e-5)


def test_gradients_are_clipped_to_the_norm_asked(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    step = torch.optim.AdamW.step

    def measured(self: torch.optim.AdamW, *args: Any) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", measured)
    run(replace(config, grad_clip=0.01))
    assert norms == pytest.approx([0.01] * config.steps, rel=1e-3)
    norms.clear()
    run(replace(config, grad_clip=0.0))
    assert min(norms) > 0.1


def test_bfloat16_trains_in_float32_weights_and_to_nearly_the_same_losses(config: TrainConfig) -> None:
    full, _, _ = run(replace(config, dropout=0.0))
    half, _, model = run(replace(config, dropout=0.0, dtype="bfloat16"))
    assert half.losses == pytest.approx(full.losses, rel=2e-2)
    assert half.losses != full.losses
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_each_step_is_told_with_its_memory_and_speed(config: TrainConfig) -> None:
    state, infos, _ = run(config)
    assert [info.step for info in infos] == [1, 2, 3, 4, 5, 6]
    assert [info.loss for info in infos] == state.losses
    assert [info.val_loss is not None for info in infos] == [False, True] * 3
    assert all(info.ram_bytes > 50_000 and info.vram_bytes == info.disk_bytes == 0 for info in infos)
    assert all(info.tokens_per_s > 0 for info in infos)
    assert state.measured is not None
    assert state.measured.ram_bytes == max(info.ram_bytes for info in infos)
    assert state.measured.step_ms > 0


@pytest.mark.no_cover
@pytest.mark.parametrize("model", ["gpt-micro", "xlstm-micro"])
def test_a_budgeted_run_gives_the_losses_of_the_unlimited_one_to_the_last_bit(
    config: TrainConfig, model: str, tmp_path: Path
) -> None:
    config = replace(config, model=model, dropout=0.2, accumulate=2)
    free, free_infos, _ = run(config)
    budget_bytes = max(info.ram_bytes for info in free_infos) * 6 // 10
    tight = replace(config, ram=str(budget_bytes), disk=str(tmp_path))
    held, held_infos, _ = run(tight, unlimited=False)
    assert held.losses == free.losses
    assert held.weights_sha256 == free.weights_sha256
    assert max(info.ram_bytes for info in held_infos) <= budget_bytes
    assert held.forecast is not None


def test_the_forecast_of_a_run_is_the_first_one_with_a_time_as_soon_as_that_is_known(
    config: TrainConfig, tmp_path: Path
) -> None:
    stated: list[Figures | None] = []
    config = replace(config, ram="8MiB", disk=str(tmp_path), steps=6, val_every=0)
    state, _, _ = run(config, unlimited=False, after_step=lambda state, *rest: stated.append(state.forecast))
    first = stated[0]
    assert first is not None
    assert math.isnan(first.step_ms)  # the second step is timed
    assert state.forecast is not None
    assert state.forecast.step_ms > 0
    assert stated[1:] == [state.forecast] * 5
    assert replace(first, step_ms=0.0) == replace(state.forecast, step_ms=0.0)
    assert state.corrected is not None


def test_mkl_keeps_to_one_number_of_threads_in_a_run() -> None:
    """In a process of its own: the setting stays."""
    program = """
import ctypes, torch
from pathlib import Path
from torchstorm.train.loop import deterministic
library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
before = library.mkl_serv_get_dynamic()
with deterministic(torch.device("cpu")):
    print(before, library.mkl_serv_get_dynamic())
"""
    found = forked.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "0"]


def test_deterministic_algorithms_are_on_during_a_run_and_as_before_after_it(config: TrainConfig) -> None:
    seen = []
    run(config, after_step=lambda *args: seen.append(torch.are_deterministic_algorithms_enabled()))
    assert seen == [True] * 6
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_evaluation_uses_no_dropout_and_only_the_held_back_part(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, dropout=0.9)
    corpus, model = corpus_of(config), GPT(model_config(config, 256))
    drawn: list[str] = []
    draw = Corpus.batch
    monkeypatch.setattr(Corpus, "batch", lambda self, split, **kw: drawn.append(split) or draw(self, split, **kw))
    assert loop.evaluate(model, config, corpus, CPU) == loop.evaluate(model, config, corpus, CPU)
    assert model.training
    assert drawn == ["val"] * 4


def test_options_change_the_named_model(config: TrainConfig) -> None:
    named = model_config(replace(config, layers=None, heads=None, width=None, model="gpt2"), 65)
    assert (named.num_layers, named.num_heads, named.width) == (12, 12, 768)
    changed = model_config(replace(config, model="gpt2", layers=6, heads=6, width=384, seq=256, dropout=0.2), 65)
    assert (changed.num_layers, changed.num_heads, changed.width, changed.dropout) == (6, 6, 384, 0.2)
    assert (changed.vocab_size, changed.max_seq_len) == (65, 256)


def test_options_change_a_named_xlstm_too(config: TrainConfig) -> None:
    changed = model_config(replace(config, model="xlstm-350m", layers=6, heads=2, width=64, dropout=0.2), 65)
    assert isinstance(changed, XLSTMConfig)
    assert changed == replace(SIZES["xlstm-350m"], vocab_size=65, num_layers=6, num_heads=2, width=64, dropout=0.2)


def test_an_unknown_model_is_refused_with_the_known_ones(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match=r"--model='gpt5' is not known: use one of gpt-nano, .*gpt2-xl, .*xlstm-7b"):
        model_config(replace(config, model="gpt5"), 256)


def test_a_sample_of_zero_tokens_is_no_text(config: TrainConfig) -> None:
    model = GPT(model_config(config, 256))
    assert sample_text(model, replace(config, sample_chars=0), corpus_of(config), CPU) == ""
    assert len(sample_text(model, config, corpus_of(config), CPU)) > 0


def test_a_state_comes_back_from_json_as_it_was(config: TrainConfig) -> None:
    import json

    state, _, _ = run(config)
    assert RunState.from_json(json.loads(json.dumps(state.to_json()))) == state
    assert RunState.from_json(json.loads(json.dumps(RunState().to_json()))) == RunState()
