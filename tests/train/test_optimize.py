"""train/optimize.py: what decays, and the rate over time."""

import pytest
import torch

from torchstorm.models.gpt import GPT, GPTConfig
from torchstorm.train.config import TrainConfig
from torchstorm.train.optimize import learning_rate, make_optimizer, set_learning_rate

CONFIG = TrainConfig(steps=110, warmup=10, lr=1.0, min_lr=0.1, weight_decay=0.25, betas=(0.8, 0.9))


def test_only_matrices_and_embeddings_decay_and_every_parameter_is_there_once() -> None:
    model = GPT(GPTConfig(vocab_size=8, max_seq_len=4, num_layers=1, num_heads=1, width=4))
    decayed, plain = make_optimizer(model, CONFIG).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed_names = {names.pop(id(parameter)) for parameter in decayed["params"]}
    assert decayed_names == {
        "wte.weight",
        "wpe.weight",
        *(f"blocks.0.{layer}.weight" for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    }
    assert {names.pop(id(parameter)) for parameter in plain["params"]}
    assert not names
    assert decayed["betas"] == (0.8, 0.9)


def test_the_rate_climbs_in_a_line_falls_in_a_cosine_and_ends_at_its_least() -> None:
    assert learning_rate(0, CONFIG) == pytest.approx(1 / 11)
    assert learning_rate(9, CONFIG) == pytest.approx(10 / 11)
    assert learning_rate(10, CONFIG) == pytest.approx(1.0)
    assert learning_rate(60, CONFIG) == pytest.approx(0.55)
    assert learning_rate(110, CONFIG) == pytest.approx(0.1)
    rates = [learning_rate(step, CONFIG) for step in range(10, 110)]
    assert rates == sorted(rates, reverse=True)


def test_without_a_least_rate_it_ends_at_a_tenth() -> None:
    assert learning_rate(100, TrainConfig(steps=100, lr=0.5)) == pytest.approx(0.05)


def test_a_warm_up_longer_than_the_run_never_divides_by_zero() -> None:
    assert learning_rate(5, TrainConfig(steps=5, warmup=5, lr=0.5)) == pytest.approx(0.5)


def test_setting_the_rate_reaches_every_group() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=1.0)
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
