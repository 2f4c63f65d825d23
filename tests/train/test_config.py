"""train/config.py: options that are checked, saved and compared."""

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from torchstorm.errors import CheckpointError, ConfigError, SizeError
from torchstorm.train.config import TrainConfig, parse_betas, resumed_config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, r"--steps=0, but it must be at least 1\."),
        ({"batch": -2}, "--batch=-2"),
        ({"layers": 0}, "--layers=0"),
        ({"warmup": -1}, r"--warmup=-1, but it must be at least 0 \(no warm-up\)"),
        ({"weight_decay": float("nan")}, "--weight-decay=nan"),
        ({"lr": 0.0}, r"--lr=0\.0, but it must be above 0"),
        ({"lr": 1e-4, "min_lr": 1e-3}, r"--min-lr=0\.001 is above --lr=0\.0001"),
        ({"dropout": 1.0}, r"--dropout=1\.0"),
        ({"betas": (0.9, 1.0)}, r"--betas=0\.9,1\.0"),
        ({"dtype": "float16"}, "--dtype='float16', but it must be one of float32, bfloat16"),
        ({"tokenizer": "bpe"}, "--tokenizer='bpe', but it must be one of bytes, chars"),
        ({"compare": True}, "no budget was given: add --ram SIZE and --disk DIR"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**options)


@pytest.mark.parametrize("tier", ["vram", "ram"])
def test_a_size_that_cannot_be_read_is_refused_with_the_options_name(tier: str) -> None:
    with pytest.raises(SizeError, match=f"--{tier}='12 apples' is not a size"):
        TrainConfig(**{tier: "12 apples"})  # type: ignore[arg-type]


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        TrainConfig().steps = 3  # type: ignore[misc]


def test_a_resumed_run_has_the_saved_options_and_the_changes_that_touch_no_loss() -> None:
    config = TrainConfig(steps=7, betas=(0.5, 0.6), ram="1GiB", layers=2)
    saved = json.loads(json.dumps(config.to_json()))
    assert resumed_config(saved, {}) == config
    changed = resumed_config(saved, {"ram": "2GiB", "val_every": 3, "steps": 7, "betas": (0.5, 0.6)})
    assert (changed.ram, changed.val_every, changed.steps) == ("2GiB", 3, 7)


@pytest.mark.parametrize(("name", "value"), [("steps", 9), ("seed", 1), ("layers", 3), ("betas", (0.1, 0.2))])
def test_a_change_that_would_make_another_run_is_refused_with_both_values(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"--{name}=.* was given, but the checkpoint is from a run with {name}="):
        resumed_config(TrainConfig().to_json(), {name: value})


def test_options_of_another_version_are_refused_by_name() -> None:
    saved = TrainConfig().to_json()
    del saved["seq"]
    with pytest.raises(CheckpointError, match="rotary, seq exist only in one of both"):
        resumed_config({**saved, "rotary": True}, {})


def test_betas_are_two_numbers() -> None:
    assert parse_betas("0.9, 0.99") == (0.9, 0.99)
    for text in ("0.9", "a,b", "1,2,3", ""):
        with pytest.raises(ConfigError, match=f"--betas='{text}' cannot be read"):
            parse_betas(text)
