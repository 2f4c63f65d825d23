"""On a GPU, steps of random sizes get plans of their own, are exact, and keep the budget."""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
import transformers
from torch import nn

from torchstorm.offload.session import Session

pytestmark = pytest.mark.gpu

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
LONGEST, MOST_STEPS = 512, 240
NUM_WORDS = 4096  # so many that the loss goes by rows at every length, half of the longest included


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=NUM_WORDS,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.to("cuda", torch.bfloat16)


def gradients(model: nn.Module, length: int, session: Session | None) -> list[torch.Tensor]:
    ids = torch.randint(0, NUM_WORDS, (8, length), generator=torch.Generator().manual_seed(length)).cuda()
    if session is None:
        model(input_ids=ids, labels=ids).loss.backward()
    else:
        with session.step():
            model(input_ids=ids, labels=ids).loss.backward()
    found = [one.grad.cpu() for one in model.parameters() if one.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def has_plans_for_smaller(session: Session) -> bool:
    return any(small.plan is not None for one in session._shared.plans._all for small in one.smaller.values())


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_steps_of_random_sizes_keep_the_budget_bit_for_bit_and_get_plans_of_their_own(share: float) -> None:
    torch.use_deterministic_algorithms(True)  # put back by conftest.py
    model = llama()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    lengths = [LONGEST, *random.Random(0).choices(range(LONGEST // 2, LONGEST + 1), k=60)]
    expected = {length: gradients(model, length, None) for length in sorted(set(lengths), reverse=True)}
    budget = base + int(share * (torch.cuda.max_memory_allocated() - base))
    with Session(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), vram=budget) as session:
        # Such a plan waits until those for larger steps have been proven.
        for num_steps, length in enumerate(itertools.islice(itertools.cycle(lengths), MOST_STEPS)):
            if num_steps >= len(lengths) and has_plans_for_smaller(session):
                break
            assert all(map(torch.equal, expected[length], gradients(model, length, session))), length
            assert session.usage().vram_bytes <= budget, length
        assert has_plans_for_smaller(session)
        assert not any("smaller" in note.lower() for note in session.report().notes), session.report().notes
