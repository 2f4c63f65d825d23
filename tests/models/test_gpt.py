"""models/gpt.py: GPT-2's numbers, shapes, initial values and sampling."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from torchstorm.errors import ConfigError
from torchstorm.models.gpt import GPT, SIZES, GPTConfig, load_gpt2_weights

TINY = GPTConfig(vocab_size=31, max_seq_len=16, num_layers=2, num_heads=3, width=24, dropout=0.1)


def tiny_theirs() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=31, n_positions=16, n_embd=24, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0)
    )
    # Biases and norms start at 0 and 1, where a mix-up of two of them would not show.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def test_logits_and_loss_equal_transformers_gpt2_with_the_same_weights() -> None:
    # In float64 only a different formula can tell the two apart, not the order of sums.
    theirs, ours = tiny_theirs().double(), GPT(TINY).eval().double()
    load_gpt2_weights(ours, theirs.state_dict())
    idx_BT = torch.randint(31, (3, 11))
    expected_BTV = theirs(idx_BT).logits
    expected_loss = F.cross_entropy(expected_BTV[:, :-1].flatten(0, 1), idx_BT[:, 1:].flatten())
    torch.testing.assert_close(ours(idx_BT).logits, expected_BTV, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours(idx_BT[:, :-1], idx_BT[:, 1:]).loss, expected_loss, rtol=1e-10, atol=1e-10)


def test_gradients_equal_transformers_gpt2_with_the_same_weights() -> None:
    theirs, ours = tiny_theirs().double(), GPT(TINY).eval().double()
    load_gpt2_weights(ours, theirs.state_dict())
    idx_BT = torch.randint(31, (2, 9))
    F.cross_entropy(theirs(idx_BT[:, :-1]).logits.flatten(0, 1), idx_BT[:, 1:].flatten()).backward()
    ours(idx_BT[:, :-1], idx_BT[:, 1:]).loss.backward()
    their_block = theirs.transformer.h[1]
    torch.testing.assert_close(ours.wte.weight.grad, theirs.transformer.wte.weight.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        ours.blocks[1].attn.c_attn.weight.grad, their_block.attn.c_attn.weight.grad.t(), rtol=1e-10, atol=1e-10
    )


def test_weights_of_the_124m_model_fit_gpt2() -> None:
    with torch.device("meta"):
        theirs = GPT2LMHeadModel(GPT2Config())
        ours = GPT(SIZES["gpt2"])
    load_gpt2_weights(ours, theirs.state_dict())
    assert ours.num_params() == 124_439_808
    assert ours.num_params() == sum(p.numel() for p in theirs.parameters())
    assert ours.num_params(embeddings=False) == 124_439_808 - (50257 + 1024) * 768


@pytest.mark.parametrize(
    ("name", "num_params"),
    [("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)],
)
def test_named_sizes_have_the_published_parameter_counts(name: str, num_params: int) -> None:
    with torch.device("meta"):
        assert GPT(SIZES[name]).num_params() == num_params


def test_weights_of_another_shape_are_refused_and_leave_the_model_unchanged() -> None:
    model = GPT(replace(TINY, max_seq_len=8))
    before = model.wte.weight.detach().clone()
    with pytest.raises(ConfigError, match=r"wpe.weight is \(16, 24\) in the weights, but \(8, 24\) in the model"):
        load_gpt2_weights(model, tiny_theirs().state_dict())
    assert torch.equal(model.wte.weight, before)


def test_weights_with_another_number_of_layers_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"3 layers: 12 missing \['blocks.2.attn.c_attn.bias'"):
        load_gpt2_weights(GPT(replace(TINY, num_layers=3)), tiny_theirs().state_dict())


def test_masks_of_old_checkpoints_and_a_missing_prefix_are_no_obstacle() -> None:
    state_dict = dict(tiny_theirs().transformer.state_dict())
    state_dict["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    state_dict["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    model = GPT(TINY)
    load_gpt2_weights(model, state_dict)
    assert torch.equal(model.blocks[0].mlp.c_fc.weight, state_dict["h.0.mlp.c_fc.weight"].t())


def test_initial_weights_have_gpt2s_spread_and_residual_projections_a_smaller_one() -> None:
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=500, max_seq_len=64, num_layers=8, num_heads=4, width=128))
    block = model.blocks[3]
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.03)
    for projection in (block.attn.c_proj, block.mlp.c_proj):
        assert projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.03)
        assert not projection.bias.any()
    assert (block.ln_1.weight == 1).all()
    assert not block.ln_1.bias.any()


def test_the_head_is_the_embedding_itself() -> None:
    model = GPT(TINY)
    assert model.lm_head.weight is model.wte.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_an_untrained_model_guesses_uniformly() -> None:
    torch.manual_seed(2)
    idx_BT, targets_BT = torch.randint(31, (2, 8, 16))
    assert GPT(TINY)(idx_BT, targets_BT).loss.item() == pytest.approx(math.log(31), abs=0.1)


def test_a_position_does_not_see_what_comes_after_it() -> None:
    model = GPT(TINY).eval()
    idx_BT = torch.randint(31, (1, 12))
    changed_BT = idx_BT.clone()
    changed_BT[0, 7] = (idx_BT[0, 7] + 1) % 31
    before, after = model(idx_BT).logits, model(changed_BT).logits
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_dropout_is_active_in_training_and_off_in_evaluation() -> None:
    model = GPT(replace(TINY, dropout=0.5))
    idx_BT = torch.randint(31, (1, 12))
    assert not torch.equal(model(idx_BT).logits, model(idx_BT).logits)
    model.eval()
    assert torch.equal(model(idx_BT).logits, model(idx_BT).logits)


def test_no_targets_give_no_loss() -> None:
    output = GPT(TINY)(torch.zeros(2, 5, dtype=torch.long))
    assert output.loss is None
    assert output.logits.shape == (2, 5, 31)


def test_a_sequence_longer_than_the_positions_is_refused_with_both_lengths() -> None:
    with pytest.raises(ConfigError, match="17 tokens, but this model has max_seq_len=16"):
        GPT(TINY)(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 25}, r"width=25 cannot be split over num_heads=3: .* Use width=27"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": -0.1}, "dropout=-0.1"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused_with_its_values(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TINY, **changes)  # type: ignore[arg-type]


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        TINY.width = 48  # type: ignore[misc]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_generation_repeats_with_the_same_seed_and_differs_with_another() -> None:
    model, start_BT = GPT(TINY), torch.zeros(2, 1, dtype=torch.long)
    first = model.generate(start_BT, 12, top_k=20, generator=seeded(5))
    assert first.shape == (2, 13)
    assert torch.equal(first, model.generate(start_BT, 12, top_k=20, generator=seeded(5)))
    assert not torch.equal(first, model.generate(start_BT, 12, top_k=20, generator=seeded(6)))


def test_generation_goes_on_past_the_last_position_and_leaves_the_mode_as_it_was() -> None:
    model = GPT(TINY).train()
    assert model.generate(torch.zeros(1, 3, dtype=torch.long), 20, generator=seeded(0)).shape == (1, 23)
    assert model.training


def test_temperature_zero_and_top_1_both_take_the_likeliest_token() -> None:
    model, start_BT = GPT(TINY).eval(), torch.tensor([[3, 1, 4]])
    greedy = model.generate(start_BT, 5, temperature=0)
    assert greedy[0, 3] == model(start_BT).logits[0, -1].argmax()
    assert torch.equal(greedy, model.generate(start_BT, 5, top_k=1))


def test_top_k_never_draws_outside_the_k_likeliest() -> None:
    model, start_BT = GPT(TINY).eval(), torch.full((200, 1), 7)
    likeliest = set(model(start_BT).logits[0, -1].topk(4).indices.tolist())
    drawn = set(model.generate(start_BT, 1, top_k=4, generator=seeded(1))[:, -1].tolist())
    assert drawn == likeliest


@pytest.mark.parametrize(
    ("start", "options", "message"),
    [
        ([[]], {}, r"shape \(1, 0\)"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1]], {"top_k": 0}, "top_k=0"),
    ],
)
def test_generation_refuses_what_it_cannot_do(start: list[list[int]], options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPT(TINY).generate(torch.tensor(start, dtype=torch.long), 1, **options)  # type: ignore[arg-type]
