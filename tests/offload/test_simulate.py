"""A step on a GPU that is not here, computed from shapes: its bytes are counted, its seconds estimated."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchstorm.errors import UnsupportedError
from torchstorm.kernels.linear_cross_entropy import chunks
from torchstorm.models.gpt import GPT, Block, GPTConfig
from torchstorm.models.xlstm import XLSTM, XLSTMConfig
from torchstorm.offload.session import Session
from torchstorm.offload.simulated.roofline import scratch_bytes
from torchstorm.offload.simulated.step import simulate
from torchstorm.plan.curve import checkpoint_point
from torchstorm.plan.forecast import KEEP, RAM, Placement, fast_profile
from torchstorm.plan.plan import Budget
from torchstorm.plan.profiles import named_machine
from torchstorm.plan.solve import solve
from torchstorm.plan.trace import HostCost, Trace

H200 = named_machine("h200")
LIMIT = 2**33


@dataclass(frozen=True, kw_only=True)
class Case:
    """GPT blocks in bfloat16: B sequences of T tokens."""

    width: int = 4096
    num_layers: int = 10
    num_heads: int = 32
    batch: int
    seq: int


RECORDS = Path(__file__).parents[2] / "benchmarks/results/h200"
SHAPES = {"4096x4": Case(batch=4, seq=4096), "32768x1": Case(batch=1, seq=32768)}
CHECKPOINTED = {"unlimited": False, "checkpoint": True}
# (case, checkpointed) -> step in ms, peak in bytes.
MEASURED = {
    (SHAPES[row["shape"]], CHECKPOINTED[row["way"]]): (row["step_s"] * 1e3, row["peak_gib"] * 2**30)
    for row in json.loads((RECORDS / "offload.json").read_text())["rows"]
    if row["way"] in CHECKPOINTED
}
GPT2_BYTES = json.loads((RECORDS / "train-gpt2.json").read_text())["unlimited"]["vram_bytes"]


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def trace_of(model: nn.Module, batch: Any, loss_fn: Any = square) -> Trace:
    return simulate(model, batch, loss_fn, H200, limit_bytes=LIMIT).trace


def peak(trace: Trace) -> int:
    return int(fast_profile(trace, [Placement(tier=KEEP)] * len(trace.parcels)).max())


class Blocks(nn.Module):
    def __init__(self, case: Case, *, recompute: bool) -> None:
        super().__init__()
        config = GPTConfig(num_layers=1, num_heads=case.num_heads, width=case.width, dropout=0.0)
        self.blocks = nn.ModuleList(Block(config) for _ in range(case.num_layers))
        self.recompute = recompute

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BTC = checkpoint(block, x_BTC, use_reentrant=False) if self.recompute else block(x_BTC)
        return x_BTC


def blocks_of(case: Case, *, recompute: bool) -> Blocks:
    with torch.device("meta"):
        return Blocks(case, recompute=recompute).to(torch.bfloat16)


def batch_of(case: Case) -> torch.Tensor:
    return torch.empty(case.batch, case.seq, case.width, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "case", dict.fromkeys(case for case, _ in MEASURED), ids=lambda case: f"{case.seq}x{case.batch}"
)
def test_the_h200_profile_gives_what_was_measured_on_one(case: Case, recompute: bool) -> None:
    step_ms, peak_bytes = MEASURED[case, recompute]
    trace = trace_of(blocks_of(case, recompute=recompute), batch_of(case))
    assert peak(trace) == pytest.approx(peak_bytes, rel=0.01)
    assert trace.compute_s * 1e3 == pytest.approx(step_ms, rel=0.05)


@pytest.mark.parametrize(
    "case", dict.fromkeys(case for case, _ in MEASURED), ids=lambda case: f"{case.seq}x{case.batch}"
)
def test_checkpointing_is_foreseen_from_a_step_without_it(case: Case) -> None:
    found = checkpoint_point(trace_of(blocks_of(case, recompute=False), batch_of(case)))
    step_ms, peak_bytes = MEASURED[case, True]
    assert found is not None
    assert found.peak_bytes == pytest.approx(peak_bytes, rel=0.01)
    assert found.step_ms == pytest.approx(step_ms, rel=0.05)


@pytest.mark.no_cover
def test_a_small_model_under_autocast_takes_the_memory_that_was_measured() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=256, num_layers=12, num_heads=12, width=768, dropout=0.1))

    def loss_fn(model: GPT, batch: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):  # as on the machine that the code was written on
            return model(batch[0], batch[1]).loss

    trace = trace_of(model, torch.zeros(2, 8, 1024, dtype=torch.long), loss_fn)
    state = 2 * sum(parameter.nbytes for parameter in model.parameters())
    assert peak(trace) + state == pytest.approx(GPT2_BYTES, rel=0.03)


def test_a_head_takes_a_chunk_of_logits_and_no_more() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50257, num_layers=1, num_heads=12, width=768, dropout=0.0)).bfloat16()
    tokens = torch.zeros(16, 1024, dtype=torch.long)
    with_loss = trace_of(model, tokens, lambda model, tokens: model(tokens, tokens).loss)
    with_logits = trace_of(
        model, tokens, lambda model, ids: F.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())
    )
    logits = tokens.numel() * 50257 * 2
    assert peak(with_logits) - peak(with_loss) > 1.5 * logits
    assert peak(with_loss) - with_loss.base_bytes > logits / 8


@pytest.mark.parametrize("N", [1, 700, 5000, 8192, 32768, 10**6])
@pytest.mark.parametrize("V", [256, 50257, 131072])
def test_a_head_s_chunks_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch, N: int, V: int) -> None:
    x, weight = torch.empty(N, 64, dtype=torch.float32, device="meta"), torch.empty(V, 64, device="meta")
    found = scratch_bytes(torch.ops.torchstorm.linear_cross_entropy_forward.default, [x, weight])
    filled_up = weight.nbytes if V % 4 else 0
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    assert found == 4 * -(-V // 64) * 64 * chunks.chunk_rows(N, V, x, gradients=True) + filled_up


def xlstm_seconds(pattern: str, seq: int) -> float:
    config = XLSTMConfig(
        vocab_size=256, num_layers=2, num_heads=4, width=1024, dropout=0.0, pattern=(pattern,), logit_cap=0.0
    )
    with torch.device("meta"):
        model = XLSTM(config).to(torch.bfloat16)
    tokens = torch.zeros(2**17 // seq, seq, dtype=torch.long)
    return trace_of(model, tokens, lambda model, tokens: model(tokens, tokens).loss).compute_s


def test_an_mlstms_token_costs_the_same_in_any_context() -> None:
    assert xlstm_seconds("mlstm-mlp", 32768) == pytest.approx(xlstm_seconds("mlstm-mlp", 1024), rel=0.02)


def test_an_slstms_tokens_wait_for_each_other() -> None:
    # 2 layers, forward and backward: 30 kernels for each token of a sequence.
    longer_s = xlstm_seconds("slstm", 8192) - xlstm_seconds("slstm", 4096)
    assert longer_s == pytest.approx(30 * 4096 * H200.kernel_s, rel=0.02)


def test_bytes_are_those_of_the_operations() -> None:
    model = nn.Sequential(nn.Linear(256, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 256, bias=False))
    batch = torch.zeros(512, 256)
    trace = trace_of(model, batch, lambda model, batch: model(batch).sum())
    weights = 2 * 256 * 1024 * 4
    assert trace.base_bytes == weights + batch.nbytes + H200.workspace_bytes
    # Saved: the batch (an input, which stays) and ReLU's output, once for ReLU itself and once for the last Linear.
    assert [(storage.nbytes, storage.parcel) for storage in trace.storages] == [(batch.nbytes, -1), (512 * 1024 * 4, 0)]
    assert [moment.kind for moment in trace.moments] == ["enter", "pack", "pack", "pack", *["unpack"] * 3]
    hidden = 512 * 1024 * 4
    # When ReLU runs, its input is there too; the gradients of both weights at the end.
    assert trace.moments[1].other_bytes == trace.base_bytes + 2 * hidden
    assert trace.moments[-1].other_bytes >= trace.base_bytes + weights
    assert peak(trace) == max(int(m) for m in fast_profile(trace, [Placement(tier=KEEP)]))


def test_an_input_that_only_autograd_holds_still_takes_room_until_it_lets_go() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    nbytes = 4096 * 256 * 4

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch + 1).sum()  # nobody else holds what the model is given

    trace = trace_of(model, torch.zeros(4096, 256), loss_fn)
    given = trace.storages[0]
    assert (given.nbytes, given.parcel) == (nbytes, -1)
    assert given.owned > trace.num_moments
    # The first Linear is the last to let go, in the last interval; until then its input lies there.
    assert trace.moments[-1].still_bytes >= trace.base_bytes + nbytes


def test_moments_and_storages_are_those_that_a_session_meets() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.LayerNorm(128)]
    model, batch = nn.Sequential(*layers), torch.randn(1024, 128)
    with Session(model, ram="1GiB") as session:
        with session.step():
            square(model, batch).backward()
        plan = session.plan()
    assert plan is not None
    found = trace_of(model, batch)
    assert [moment.signature for moment in found.moments] == [moment.signature for moment in plan.trace.moments]
    for one, other in zip(found.storages, plan.trace.storages, strict=True):
        assert (one.nbytes, one.made, one.needed, one.freed, one.block) == (
            *(other.nbytes, other.made, other.needed, other.freed, other.block),
        )
    assert [op.name for op in found.ops] == [op.name for op in plan.trace.ops]
    assert [(op.inputs, op.outputs) for op in found.ops] == [(op.inputs, op.outputs) for op in plan.trace.ops]


class Attention(nn.Module):
    def __init__(self, *, mask: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(128, 384)
        self.mask, self.dropout = mask, dropout

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        B, T, _ = x_BTC.shape
        q, k, v = (part.view(B, T, 2, 64).transpose(1, 2) for part in self.qkv(x_BTC).chunk(3, -1))
        mask = torch.ones(T, T, dtype=torch.bool, device=x_BTC.device).tril() if self.mask else None
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.dropout, is_causal=not self.mask)
        return out.transpose(1, 2).reshape(B, T, 128)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.1}], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_saves_no_matrix_as_on_a_gpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    T = 4096
    trace = trace_of(Attention(**options).to(dtype), torch.zeros(1, T, 128, dtype=dtype))
    assert max(storage.nbytes for storage in trace.storages) < T * T
    assert any("scaled_dot_product" in op.name for op in trace.ops)


def test_attention_inside_multihead_attention_is_fused_too() -> None:
    T = 2048
    model = nn.MultiheadAttention(128, 2, batch_first=True)
    trace = trace_of(
        model, torch.zeros(1, T, 128), lambda model, x: model(x, x, x, need_weights=False)[0].square().mean()
    )
    assert max(storage.nbytes for storage in trace.storages) < T * T


def test_a_dropout_mask_is_one_byte_an_element() -> None:
    trace = trace_of(nn.Sequential(nn.Linear(8, 512), nn.Dropout(0.1), nn.Linear(512, 8)), torch.zeros(4096, 8))
    assert 4096 * 512 in [storage.nbytes for storage in trace.storages]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_autocast_is_that_of_a_gpu_whichever_device_it_names(device: str) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64))

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            out = model(batch)
            assert out.dtype == torch.bfloat16
            return out.sum()

    before = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
    trace = trace_of(model, torch.zeros(512, 64), loss_fn)
    assert (torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")) == before
    sizes = [storage.nbytes for storage in trace.storages]
    # LayerNorm runs in float32 on CUDA: its input is saved cast up, its output cast down for the next Linear.
    assert 512 * 256 * 4 in sizes
    assert 512 * 256 * 2 in sizes
    assert 256 * 64 * 2 in sizes  # the cast weight


def test_compiled_blocks_are_simulated_uncompiled() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(64, 64), backend="eager"), nn.GELU())
    assert trace_of(model, torch.zeros(512, 64)).num_moments > 1


def test_checkpointing_inside_the_model_lowers_the_forecast() -> None:
    case = Case(width=2048, num_layers=3, num_heads=16, batch=2, seq=8192)
    full, less = (trace_of(blocks_of(case, recompute=recompute), batch_of(case)) for recompute in (False, True))
    assert peak(less) < peak(full)
    assert less.compute_s > full.compute_s


def test_the_model_is_afterwards_what_it_was() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5))
    square(model, torch.randn(8, 64)).backward()
    tensors = {name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    random_state = torch.get_rng_state()
    trace_of(model, torch.randn(8, 64).requires_grad_())
    after = {name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    assert all(after[name] is tensor for name, tensor in tensors.items())
    assert all(torch.equal(tensor, values[name]) for name, tensor in after.items())
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    # The batch was drawn in between, and nothing else.
    torch.set_rng_state(random_state)
    torch.randn(8, 64)
    state = torch.get_rng_state()
    torch.set_rng_state(random_state)
    trace_of(model, torch.randn(8, 64))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_is_left_by_an_error_is_what_it_was() -> None:
    model = nn.Linear(4, 4)
    weight = model.weight

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        trace_of(model, torch.zeros(2, 4), loss_fn)
    assert model.weight is weight
    assert torch.equal(torch.zeros(2) + 1, torch.ones(2))


def test_a_step_that_asks_for_numbers_is_refused_with_the_operation() -> None:
    model = nn.Linear(4, 4)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = square(model, batch)
        return loss if loss.item() > 0 else -loss

    with pytest.raises(UnsupportedError, match=r"_local_scalar_dense.* without machine="):
        trace_of(model, torch.zeros(2, 4), loss_fn)


def test_a_mistake_in_the_shapes_stays_the_mistake_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"reduction dim|cannot be multiplied"):
        trace_of(nn.Linear(4, 4), torch.zeros(2, 5))


def test_whole_numbers_that_follow_from_shapes_are_known() -> None:
    model = nn.Linear(4, 4)

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        assert batch["mask"].all()
        position = torch.arange(batch["x"].shape[0], device=batch["x"].device)
        position += 1
        assert int(position.max()) == 3
        assert position.nonzero().shape == (3, 1)
        return model(batch["x"][position - 1]).sum()

    trace_of(model, {"x": torch.zeros(3, 4), "mask": torch.ones(3, dtype=torch.bool)}, loss_fn)


def llama_trace(batch: int, seq: int, **shape: int) -> tuple[nn.Module, Trace]:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=32, **shape)).to(torch.bfloat16).train()
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    return model, trace_of(model, tokens, lambda model, ids: model(input_ids=ids, labels=ids, use_cache=False).loss)


@pytest.mark.no_cover
def test_a_model_of_eight_billion_parameters_is_forecast_without_its_weights() -> None:
    shape = {"hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
    model, trace = llama_trace(1, 4096, vocab_size=128256, **shape)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters > 8e9
    assert trace.base_bytes >= 2 * num_parameters
    # 6 operations a parameter and token, and attention, at what the chip sustains.
    assert 0.9 < trace.compute_s * H200.half_flops / (6 * num_parameters * 4096) < 1.5


@pytest.mark.no_cover
def test_half_way_to_everything_kept_a_llama_computes_again_what_is_cheap_and_moves_as_little_as_has_to() -> None:
    """A search that begins with everything kept, or everything moved, ends far from here."""
    shape = {"hidden_size": 2048, "num_hidden_layers": 22, "num_key_value_heads": 4, "intermediate_size": 5632}
    _, traced = llama_trace(4, 2048, vocab_size=32000, **shape)
    trace = replace(traced, host=HostCost(record_s=20e-6, move_s=120e-6, idle_s=0.020))
    kept = int(fast_profile(trace, [Placement(tier=KEEP)] * len(trace.parcels)).max())
    plan = solve(trace, H200, Budget(vram=int(0.7 * kept), ram=2**37), time_limit_s=100.0)
    assert plan.forecast.step_ms <= 1.03 * trace.compute_s * 1e3
    assert sum(one.tier == RAM for one in plan.placements) < 33
