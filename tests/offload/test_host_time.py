"""What a settled step of an unmodified transformers model leaves to Python: what it does once, not once a layer."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import torchstorm
from torchstorm.offload.native import library
from torchstorm.offload.replan.planner import Planner
from torchstorm.offload.session import Session
from torchstorm.offload.step.clock import CpuClock
from torchstorm.offload.step.tables import Table, Tables
from torchstorm.plan.plan import Plan

transformers = pytest.importorskip("transformers")
BATCH, LENGTH, WIDTH = 4, 64, 128
_OURS = str(Path(torchstorm.__file__).parent)
# How a function in Python gets to a mode that sees it.
_TO_A_MODE = torch.overrides.handle_torch_function.__code__
# They do no more than to call a function of PyTorch's.
_ONE_LINE = {"attention_backend", "_norm"}

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": 4,
    "attn_implementation": "sdpa",
}


def llama(num_layers: int) -> nn.Module:
    options = {**_COMMON, "num_key_value_heads": 2, "num_hidden_layers": num_layers, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))


def gpt2(num_layers: int) -> nn.Module:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)  # on a CPU, dropout is many operations
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=WIDTH, n_layer=num_layers, n_head=4, use_cache=False, attn_implementation="sdpa", **rates
    )
    return transformers.GPT2LMHeadModel(config)


def bert(num_layers: int) -> nn.Module:
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**_COMMON, num_hidden_layers=num_layers, **rates))


def entries_in_a_step(make: Callable[[int], nn.Module], num_layers: int, share: float) -> Counter[str]:
    """The functions of ours in Python that PyTorch or C++ calls in a settled step, and how often, with a share of the
    RAM that it takes without a budget; and PyTorch's own for a mode that sees functions."""
    torch.manual_seed(0)
    model = make(num_layers).train().to(torch.bfloat16)
    ids = torch.randint(3, 64, (BATCH, LENGTH))
    entries: list[Counter[str]] = []

    def is_ours(frame: FrameType | None) -> bool:
        return frame is not None and frame.f_code.co_filename.startswith(_OURS)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and ((is_ours(frame) and not is_ours(frame.f_back)) or frame.f_code is _TO_A_MODE):
            entries[-1][frame.f_code.co_qualname] += 1

    with Session(model, unlimited=True) as session:
        for _ in range(2):
            with session.step():
                model(input_ids=ids, labels=ids).loss.backward()
        unlimited = session.report().measured
    assert unlimited is not None
    with Session(model, ram=int(share * unlimited.ram_bytes)) as session:
        for number in range(14):
            with session.step():
                if number >= 10:
                    entries.append(Counter())
                    sys.setprofile(note)
                try:
                    model(input_ids=ids, labels=ids).loss.backward()
                finally:
                    sys.setprofile(None)
            model.zero_grad()
        plan = session.plan()
        assert session.report().num_planned >= 10
        assert plan is not None
        assert plan.recomputes == (share < 1)
    every_time = functools.reduce(operator.and_, entries)  # a step that is planned anew notes something once
    return Counter({name: count for name, count in every_time.items() if name not in _ONE_LINE})


@pytest.mark.no_cover
@pytest.mark.parametrize("share", [4.0, 0.7, 0.4])
@pytest.mark.parametrize("make", [llama, gpt2, bert])
def test_a_settled_step_enters_no_python_of_ours_once_a_layer(
    make: Callable[[int], nn.Module], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.wait()
    assert library.library() is not None
    monkeypatch.setattr(Planner, "judge", lambda *_: None)  # no plan is replaced for the times of its steps
    ticks = itertools.count()  # everything takes as long, so that the plan does not depend on the machine
    monkeypatch.setattr(CpuClock, "mark", lambda _: next(ticks) * 1e-3)
    follow = Tables.follow  # as where bytes can move: else everything is recorded that could run again

    def follow_alone(self: Tables, plan: Plan, others: tuple[Plan, ...], _: bool, all_recorded: bool) -> Table:
        return follow(self, plan, others, any_other=False, all_recorded=all_recorded)

    monkeypatch.setattr(Tables, "follow", follow_alone)
    found = {num: entries_in_a_step(make, num, share) for num in (2, 8)}
    more = found[8] - found[2]
    assert not {name: count for name, count in more.items() if count >= 6}, more
