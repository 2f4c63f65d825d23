"""FSDP2 with and without a Session, on gloo: the same bits, whether gathered weights are freed in between or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torchstorm.offload.session import Session

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.no_cover

WIDTH, ROWS, STEPS = 128, 256, 4


def small() -> nn.Module:
    layers = [
        nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        )
        for _ in range(4)
    ]
    return nn.Sequential(*layers)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def loss_of(model: nn.Module) -> torch.Tensor:
    if isinstance(model, nn.Sequential):
        return model(torch.randn(ROWS, WIDTH)).square().mean()
    ids = torch.randint(0, 64, (4, 64))
    return model(input_ids=ids, labels=ids).loss


def train(name: str, reshard: bool, low_precision: bool, session_of) -> tuple[list[torch.Tensor], Session | None]:
    torch.manual_seed(0)
    model = small() if name == "small" else llama()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low_precision else None)
    for block in model if name == "small" else model.model.layers:
        fully_shard(block, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, reshard_after_forward=reshard, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    session = session_of(model) if session_of else None
    found = []
    for index in range(STEPS):
        torch.manual_seed(100 * index + torch.distributed.get_rank())
        if session is None:
            loss = loss_of(model)
            loss.backward()
        else:
            with session.step():
                loss = loss_of(model)
                loss.backward()
        found += [loss.detach(), *(weight.grad.to_local().clone() for weight in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found, session


def compare(rank: int, world_size: int, folder: str) -> None:
    """In a process of its own: trains everything there is with and without a Session."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    cases = [
        ("small", True, False),
        ("small", False, False),
        ("llama", True, False),
        ("llama", False, False),
        ("llama", True, True),
    ]
    for name, reshard, low_precision in cases if world_size == 1 else cases[1:3]:
        expected, _ = train(name, reshard, low_precision, None)
        _, unlimited = train(name, reshard, low_precision, lambda model: Session(model, unlimited=True))
        assert unlimited is not None
        peak = unlimited.report().highest.ram_bytes
        for share in (0.6, 0.35):
            budget = int(share * peak)
            found, session = train(
                name, reshard, low_precision, lambda model, budget=budget: Session(model, ram=budget, disk=folder)
            )
            case = f"{name}, reshard_after_forward={reshard}, bf16={low_precision}, {share:.0%}, rank {rank}"
            for number, (one, other) in enumerate(zip(expected, found, strict=True)):
                assert torch.equal(one, other), f"{case}: tensor {number} of {len(expected)} differs"
            assert session is not None
            highest = session.report().highest
            assert highest.ram_bytes <= budget, case
            assert highest.disk_bytes > 0, f"{case}: nothing moved, so nothing was tested"
            assert session.report().num_planned, case
            session.close()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_under_fsdp2_are_its_own_to_the_last_bit(world_size: int, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(compare, args=(world_size, str(tmp_path)), nprocs=world_size)
