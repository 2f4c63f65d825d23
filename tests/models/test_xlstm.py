"""models/xlstm.py: its blocks, its sizes, and that a text read token by token is the text read at once."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import Tensor

from torchstorm.errors import ConfigError
from torchstorm.models import xlstm_blocks
from torchstorm.models.families import SIZES as ALL_SIZES
from torchstorm.models.families import make_model
from torchstorm.models.gpt import GPT
from torchstorm.models.gpt import SIZES as GPT_SIZES
from torchstorm.models.xlstm import SIZES, XLSTM, XLSTMConfig
from torchstorm.models.xlstm_blocks import MIXERS

TINY = XLSTMConfig(vocab_size=31, num_layers=3, num_heads=2, width=64, dropout=0.0)
PATTERNS = [("mlstm",), ("slstm",), ("mlstm-mlp",), ("mlstm", "slstm", "mlstm-mlp")]
each_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=" ".join)


def model_of(pattern: tuple[str, ...] = TINY.pattern, **changes: float) -> XLSTM:
    """In float64, so that what must agree agrees to rounding."""
    torch.manual_seed(3)
    # An open input gate: with the initial one nearly shut, little would hang on the state.
    return XLSTM(replace(TINY, pattern=pattern, input_gate_bias=0.0, **changes)).double().eval()  # type: ignore[arg-type]


def tokens(B: int, T: int) -> Tensor:
    return torch.randint(31, (B, T), generator=torch.Generator().manual_seed(T))


@each_pattern
def test_reading_token_by_token_gives_the_logits_of_reading_at_once(pattern: tuple[str, ...]) -> None:
    model, idx_BT = model_of(pattern), tokens(2, 70)
    expected_BTV = model(idx_BT).logits
    logits_BV, states = model.advance(idx_BT[:, :30])
    torch.testing.assert_close(logits_BV, expected_BTV[:, 29], rtol=1e-9, atol=1e-9)
    for t in range(30, 60):
        logits_BV, states = model.advance(idx_BT[:, t : t + 1], states)
        torch.testing.assert_close(logits_BV, expected_BTV[:, t], rtol=1e-9, atol=1e-9)
    logits_BV, _ = model.advance(idx_BT[:, 60:], states)  # several at once, from a state
    torch.testing.assert_close(logits_BV, expected_BTV[:, -1], rtol=1e-9, atol=1e-9)


@each_pattern
def test_greedy_text_is_that_of_reading_everything_anew_for_each_token(pattern: tuple[str, ...]) -> None:
    model, idx_BT = model_of(pattern), tokens(2, 5)
    expected_BT = idx_BT
    for _ in range(40):
        expected_BT = torch.cat([expected_BT, model(expected_BT).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(model.generate(idx_BT, 40, temperature=0), expected_BT)


@each_pattern
def test_a_token_costs_the_same_memory_however_many_came_before(pattern: tuple[str, ...]) -> None:
    model = model_of(pattern)

    def held_bytes(T: int) -> int:
        _, states = model.advance(tokens(2, T))
        return sum(part.untyped_storage().nbytes() for state in states for part in state)

    assert held_bytes(1) == held_bytes(9) == held_bytes(100)


def test_a_single_token_goes_through_the_step_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of(), []
    step = xlstm_blocks.mlstm_step
    monkeypatch.setattr(xlstm_blocks, "mlstm_step", lambda *given: calls.append(1) or step(*given))
    model.generate(tokens(1, 5), 4)
    assert len(calls) == 3 * TINY.num_layers  # the first token comes from reading the start


@each_pattern
def test_a_position_does_not_see_what_comes_after_it(pattern: tuple[str, ...]) -> None:
    model, idx_BT = model_of(pattern), tokens(1, 12)
    changed_BT = idx_BT.clone()
    changed_BT[0, 7] = (idx_BT[0, 7] + 1) % 31
    before, after = model(idx_BT).logits, model(changed_BT).logits
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.no_cover
@each_pattern
def test_every_parameter_learns(pattern: tuple[str, ...]) -> None:
    model = XLSTM(replace(TINY, pattern=pattern, num_layers=6, input_gate_bias=-2.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    idx_BT = tokens(4, 33)
    losses = []
    for step in range(30):
        loss = model(idx_BT[:, :-1], idx_BT[:, 1:]).loss
        loss.backward()
        if step == 2:  # what multiplies something that begins as zero learns from the second step on
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                assert parameter.grad.isfinite().all(), name
                assert parameter.grad.any(), name
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@each_pattern
def test_autocast_gives_nearly_the_same_loss(pattern: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, idx_BT = XLSTM(replace(TINY, pattern=pattern)), tokens(2, 40)
    expected = model(idx_BT, idx_BT).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(idx_BT, idx_BT).loss
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=2e-2)
    assert found.item() != expected.item()


def test_the_pattern_is_begun_anew_where_there_are_more_blocks() -> None:
    config = replace(TINY, num_layers=5, pattern=("mlstm", "slstm"))
    kinds = [type(block.mixer) for block in XLSTM(config).blocks]
    assert kinds == [MIXERS[kind] for kind in ("mlstm", "slstm", "mlstm", "slstm", "mlstm")]


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("xlstm-125m", 123_671_184),
        ("xlstm-350m", 355_297_472),
        ("xlstm-1.3b", 1_318_113_664),
        ("xlstm-7b", 6_865_039_872),  # as published, in the paper's table of 32 blocks of width 4096
    ],
)
def test_named_sizes_have_the_parameters_that_they_are_named_for(name: str, num_params: int) -> None:
    with torch.device("meta"):
        assert XLSTM(SIZES[name]).num_params() == num_params


def test_small_sizes_have_gpts_parameters() -> None:
    """With the vocabulary of bytes and the positions that `torchstorm train` has where nothing is said."""
    with torch.device("meta"):
        gpt = GPT(replace(GPT_SIZES["gpt-nano"], vocab_size=256, max_seq_len=256)).num_params()
        ours = XLSTM(replace(SIZES["xlstm-nano"], vocab_size=256)).num_params()
        assert ours == pytest.approx(gpt, rel=0.02)
        gpt = GPT(GPT_SIZES["gpt2-medium"]).num_params()
        assert XLSTM(SIZES["xlstm-350m"]).num_params() == pytest.approx(gpt, rel=0.02)


def test_both_families_stand_in_one_table() -> None:
    assert set(ALL_SIZES) == set(GPT_SIZES) | set(SIZES)
    with torch.device("meta"):
        assert isinstance(make_model(ALL_SIZES["gpt-nano"]), GPT)
        assert isinstance(make_model(ALL_SIZES["xlstm-nano"]), XLSTM)


def test_a_tied_head_is_the_embedding_and_counts_once() -> None:
    tied, free = XLSTM(TINY), XLSTM(replace(TINY, tied=False))
    assert tied.head.weight is tied.embedding.weight
    assert free.num_params() - tied.num_params() == 31 * 64
    assert free.num_params(embeddings=False) == tied.num_params(embeddings=False)


def test_gates_begin_as_in_the_papers() -> None:
    gates = XLSTM(TINY).blocks[0].mixer.gates
    assert gates.linear.bias.tolist() == [-10, -10, 3, 6]
    i_BHT, f_BHT = gates(1e6 * torch.randn(1, 5, 64))
    assert i_BHT.dtype == f_BHT.dtype == torch.float32
    assert max(i_BHT.abs().max(), f_BHT.abs().max()) <= 15


def test_logits_are_capped_where_the_config_says_so() -> None:
    model, idx_BT = model_of(), tokens(1, 9)
    capped = model(idx_BT).logits
    free = XLSTM(replace(model.config, logit_cap=0.0)).double()
    free.load_state_dict(model.state_dict())
    torch.testing.assert_close(capped, 30 * torch.tanh(free(idx_BT).logits / 30))


def test_an_untrained_model_guesses_nearly_uniformly() -> None:
    torch.manual_seed(2)
    idx_BT, targets_BT = torch.randint(31, (2, 8, 32))
    assert XLSTM(replace(TINY, tied=False))(idx_BT, targets_BT).loss.item() == pytest.approx(math.log(31), abs=0.4)


def test_dropout_is_active_in_training_and_off_in_evaluation() -> None:
    model, idx_BT = XLSTM(replace(TINY, dropout=0.5)), tokens(1, 12)
    assert not torch.equal(model(idx_BT).logits, model(idx_BT).logits)
    model.eval()
    assert torch.equal(model(idx_BT).logits, model(idx_BT).logits)


def test_generation_repeats_with_the_same_seed_and_leaves_the_mode_as_it_was() -> None:
    model, start_BT = model_of().train(), tokens(2, 3)

    def text(seed: int) -> Tensor:
        return model.generate(start_BT, 12, top_k=20, generator=torch.Generator().manual_seed(seed))

    first = text(5)
    assert first.shape == (2, 15)
    assert torch.equal(first, text(5))
    assert not torch.equal(first, text(6))
    assert model.training
    assert torch.equal(model.generate(start_BT, 0), start_BT)
    with pytest.raises(ConfigError, match="temperature=-1"):
        model.generate(start_BT, 1, temperature=-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 25}, r"width=25, with q and k 12.5 wide, cannot be .* num_heads=2. Use width=28, or"),
        ({"num_heads": 32, "width": 32}, r"q and k 16 wide, cannot .* num_heads=32. Use width=64"),
        ({"width": 33, "num_heads": 3, "qk_share": 1.0, "pattern": ("mlstm",)}, r"width=33, .* Use width=36"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"gate_cap": -1.0}, "gate_cap=-1"),
        ({"qk_share": 0.0}, "qk_share=0"),
        ({"pattern": ("lstm",)}, r"names \['lstm'\]; there are mlstm, slstm, mlstm-mlp"),
        ({"pattern": ()}, "names nothing"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused_with_its_values(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TINY, **changes)  # type: ignore[arg-type]


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        TINY.width = 48  # type: ignore[misc]
