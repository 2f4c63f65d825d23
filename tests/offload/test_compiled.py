"""Compiled blocks: every variant and every mix gives the bits of the one that saves most, within a budget too.

Two compilers: Inductor where its own kernels are what is tested, and the same partitions run operation by operation
(`quickly`) where it is not.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from offload.steps import Outcome, assert_same
from torchstorm.errors import ConfigError, UnsupportedError
from torchstorm.models.gpt import GPT, GPTConfig
from torchstorm.offload import torch_private as private
from torchstorm.offload.compiled import compile as compiled_module
from torchstorm.offload.compiled import graphs
from torchstorm.offload.compiled import kind as kind_module
from torchstorm.offload.compiled.call import refuse_compiled_whole
from torchstorm.offload.compiled.compile import CompiledBlocks
from torchstorm.offload.session import Session
from torchstorm.plan.choose import Blocks, Choice
from torchstorm.plan.trace import Trace
from torchstorm.plan.variants import CHEAP, INPUTS, LEAN, LEAST, SAVE, VARIANTS

CONFIG = GPTConfig(vocab_size=32, max_seq_len=32, num_layers=4, num_heads=2, width=64, dropout=0.1)
BATCH = 8
# Said by Inductor and Dynamo of themselves.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler", "told_once"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def gpt(num_layers: int = 2) -> GPT:
    torch.manual_seed(1)
    return GPT(replace(CONFIG, num_layers=num_layers))


def tokens(index: int) -> torch.Tensor:
    return torch.randint(0, 32, (BATCH, CONFIG.max_seq_len), generator=torch.Generator().manual_seed(index))


def gpt_step(model: nn.Module, index: int) -> torch.Tensor:
    ids = tokens(index)
    loss: torch.Tensor = model(ids, ids).loss
    loss.backward()
    return loss


def run(
    model: nn.Module,
    step: Callable[[nn.Module, int], torch.Tensor] = gpt_step,
    *,
    session: Session | None = None,
    num_steps: int = 2,
) -> Outcome:
    """Gradients of some steps; the weights stay as they are."""
    outcome = Outcome()
    for index in range(num_steps):
        torch.manual_seed(100 + index)
        model.zero_grad()
        with session.step() if session else contextlib.nullcontext():
            loss = step(model, index)
        outcome.losses.append(loss.detach().clone())
        outcome.gradients.append(
            {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        )
    outcome.state = {name: value.clone() for name, value in model.state_dict().items()}
    return outcome


def with_everything_kept(
    model: nn.Module, step: Callable[[nn.Module, int], torch.Tensor] = gpt_step, *, num_steps: int
) -> tuple[Outcome, int]:
    """What a model's compiled blocks give when they save everything, and the bytes that this takes."""
    with Session(model, unlimited=True) as session:
        session.compile()
        outcome = run(model, step, session=session, num_steps=num_steps)
        return outcome, session.usage().ram_bytes


@functools.cache
def gpt_with_everything_kept() -> tuple[Outcome, int]:
    """The same for tests that run a GPT of four blocks `quickly`, six steps of it."""
    return with_everything_kept(gpt(4), num_steps=6)


def num_compiled() -> int:
    """Graphs that Dynamo has captured since it was reset."""
    return int(counters["stats"]["unique_graphs"])


def assert_variants_agree(
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, int], torch.Tensor],
    variants: tuple[str, ...] = (SAVE, LEAST),
) -> CompiledBlocks:
    """Runs fresh models that save most and least; returns the blocks of the last. Only where attention draws nothing is
    INPUTS another variant than LEAST."""
    expected = None
    for variant in variants:
        torch.manual_seed(1)
        model = make()
        compiled = CompiledBlocks(model, variant=variant)
        found = run(model, step)
        if expected is not None:
            assert_same(expected, found)
        expected = expected or found
    assert not compiled.notes
    return compiled


# ---------------------------------------------------------------------- Inductor


@pytest.mark.no_cover
def test_variants_and_a_mix_of_them_have_the_bits_of_torch_compile_with_dropout() -> None:
    plain = gpt(4)
    for block in plain.blocks:
        block.compile(options=private.EXACT_OPTIONS)
    expected = run(plain)
    counters.clear()
    model = gpt(4)
    compiled = CompiledBlocks(model, variant=CHEAP)
    assert_same(expected, run(model))
    compiled.set({"blocks.0": INPUTS, "blocks.2": INPUTS})
    assert_same(expected, run(model))
    assert num_compiled() == 2, "four blocks are alike: one compilation a variant"


@pytest.mark.no_cover
def test_within_a_budget_a_compiled_model_has_the_same_bits_as_without(tmp_path: Path) -> None:
    free = gpt(4)
    with Session(free, unlimited=True) as session:
        blocks = session.compile(free)
        expected = run(free, session=session, num_steps=5)
        needed = session.usage().ram_bytes
        assert set(blocks.variants.values()) == {SAVE}
    model = gpt(4)
    budget = needed // 4
    with Session(model, ram=budget, disk=str(tmp_path)) as session:
        blocks = session.compile()
        found = run(model, session=session, num_steps=5)
        report = session.report()
    assert_same(expected, found)
    assert report.highest is not None
    assert report.highest.ram_bytes <= budget
    assert blocks.choice is not None, "nothing was chosen"
    assert report.num_planned > 0


@pytest.mark.no_cover
def test_low_precision_is_rounded_where_the_saved_value_was() -> None:
    """Without EXACT_OPTIONS a recomputed bfloat16 value keeps digits that the saved one had lost."""
    assert private.EXACT_OPTIONS["emulate_precision_casts"]
    if torch.__version__ < "2.13":
        return  # Inductor's C++ kernels know that option since then; its Triton kernels did before

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x)

    def step(model: nn.Module, index: int) -> torch.Tensor:
        x = torch.randn(96, 64).to(torch.bfloat16).requires_grad_()  # so that the first block is one like the second
        loss: torch.Tensor = model(x).float().square().mean()
        loss.backward()
        return loss

    assert_variants_agree(lambda: nn.Sequential(Mlp(), Mlp()).to(torch.bfloat16), step)


# ---------------------------------------------------------------------- what is saved


@pytest.mark.no_cover
@pytest.mark.usefixtures("quickly")
def test_what_a_variant_is_said_to_save_is_what_it_saves() -> None:
    model = gpt()
    sizes: dict[str, list[int]] = {}
    tables = {}
    for variant in VARIANTS:
        compiled = CompiledBlocks(model, variant=variant)
        saved: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor, saved: dict[int, torch.Tensor] = saved) -> torch.Tensor:
            saved.setdefault(tensor.untyped_storage()._cdata, tensor)
            return tensor

        x = torch.randn(BATCH, CONFIG.max_seq_len, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.blocks[0](x)
        known = {p.untyped_storage()._cdata for p in model.parameters()} | {x.untyped_storage()._cdata}
        sizes[variant] = sorted(
            tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in known
        )
        tables[variant] = compiled.tables()[0].nearest(variant)
    for variant in VARIANTS:
        assert Counter(size for size in sizes[variant] if size >= 1024) == Counter(tables[variant].sizes), variant
    totals = [sum(sizes[variant]) for variant in VARIANTS]
    assert totals == sorted(totals, reverse=True)
    assert totals[1] < 0.7 * totals[0]
    assert totals[3] < 0.4 * totals[1]
    assert totals[4] == totals[3], "attention has dropout"


class Rotating(nn.Module):
    """Attention with rotary embeddings, several heads of which share one of keys and values."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(32)
        self.q, self.kv, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q = self.rotated(self.q(h).view(2, -1, 4, 8).transpose(1, 2))
        k, v = self.kv(h).view(2, -1, 2, 16).transpose(1, 2).split(8, dim=-1)
        dropout = self.dropout if self.training else 0.0
        found = nn.functional.scaled_dot_product_attention(
            q, self.rotated(k), v, is_causal=True, dropout_p=dropout, enable_gqa=True
        )
        out: torch.Tensor = x + self.out(found.transpose(1, 2).reshape(x.shape))
        return out

    @staticmethod
    def rotated(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[-2] * x.shape[-1]).view(x.shape[-2:])
        one, other = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-other, one), dim=-1) * angles.sin()


@pytest.mark.no_cover
@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_block_saves_little_but_its_input_where_attention_draws_nothing(dropout: float) -> None:
    compiled = assert_variants_agree(
        lambda: nn.Sequential(Rotating(dropout), Rotating(dropout)),
        rotating_step,
        (SAVE, LEAST) if dropout else (SAVE, INPUTS, LEAST),
    )
    variants = compiled.tables()[0].variants
    own_bytes = 2 * 32 * 32 * 4
    if dropout:
        assert LEAST not in variants
        assert variants[INPUTS].saved_bytes >= own_bytes, "attention's output stays"
    else:
        assert variants[LEAST].saved_bytes < own_bytes / 4 < variants[INPUTS].saved_bytes


def rotating_step(model: nn.Module, index: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(2, 32, 32)).square().mean()
    loss.backward()
    return loss


@pytest.mark.usefixtures("quickly")
def test_where_nothing_can_move_blocks_begin_in_what_saves_least_and_a_small_budget_holds(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(*(Rotating(0.0) for _ in range(4)))

    model = make()
    expected, needed = with_everything_kept(make(), rotating_step, num_steps=4)
    budget = int(0.3 * needed)
    with Session(make(), ram=budget, disk=str(tmp_path)) as session:
        assert set(session.compile().variants.values()) == {CHEAP}
    with Session(model, ram=budget) as session:
        blocks = session.compile()
        assert set(blocks.variants.values()) == {LEAST}
        assert_same(expected, run(model, rotating_step, session=session, num_steps=4))
        report = session.report()
    assert report.highest is not None
    assert report.highest.ram_bytes <= budget
    assert blocks.notes == ()


@pytest.mark.usefixtures("quickly")
@pytest.mark.no_cover
def test_views_of_one_buffer_are_saved_as_one_storage_and_may_come_back_anywhere() -> None:
    """q, k and v are three strided views of one buffer, which moves as one."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192)
            self.inner = nn.Sequential(nn.Linear(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.view(4, 32, 2, 32).transpose(1, 2) for part in self.qkv(x).split(64, dim=2))
            out: torch.Tensor = self.inner((q * k * v).transpose(1, 2).reshape(4, 32, 64))
            return out

    model = nn.Sequential(Attention(), Attention())
    CompiledBlocks(model, variant=SAVE)
    seen: list[tuple[torch.Tensor, tuple[int, ...]]] = []

    def unpack(packed: tuple[torch.Tensor, tuple[int, ...]]) -> torch.Tensor:
        seen.append(packed)
        flat = packed[0].untyped_storage().clone()
        return torch.empty(0).set_(flat, packed[0].storage_offset(), packed[0].size(), packed[0].stride())

    x = torch.randn(4, 32, 64)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor, tensor.stride()), unpack):
        model(x).sum().backward()
    found = [p.grad for p in model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    large = [tensor for tensor, _ in seen if tensor.untyped_storage().nbytes() == 4 * 32 * 192 * 4]
    assert len({tensor.untyped_storage()._cdata for tensor in large}) == 2, "one buffer a block"


# ---------------------------------------------------------------------- other blocks


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout2d(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(F.relu(self.norm(self.conv(x))))


class Breaks(nn.Module):
    """Prints, and takes a branch that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(32, 64), nn.GELU()), nn.Sequential(nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.first(x), 0.3)
        print("between")
        if hidden.mean() > 10:
            hidden = hidden * 2
        return x + self.second(hidden)


class Numbered(nn.Module):
    """As a layer that knows its place, and reads it."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) * len(self.place)


def row_step(model: nn.Module, index: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(64, 32)).square().mean()
    loss.backward()
    return loss


def autocast_step(model: nn.Module, index: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: torch.Tensor = model(tokens(index), tokens(index)).loss
    loss.backward()
    return loss


@pytest.mark.no_cover
@pytest.mark.usefixtures("quickly")
def test_under_autocast_the_variants_agree() -> None:
    assert_variants_agree(gpt, autocast_step)


@pytest.mark.no_cover
@pytest.mark.usefixtures("quickly")
def test_blocks_whose_graphs_break_agree_and_are_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    compiled = assert_variants_agree(lambda: nn.Sequential(Breaks(), Breaks()), row_step)
    assert capsys.readouterr().out.count("between") == 2 * 2 * 2
    assert len(compiled.tables()) == 2
    model = nn.Sequential(Breaks(), Breaks())
    free = copy.deepcopy(model)
    CompiledBlocks(free, variant=SAVE)
    expected = run(free, row_step, num_steps=4)
    with Session(model, ram=170_000, disk=str(tmp_path)) as session:
        blocks = session.compile()
        assert_same(expected, run(model, row_step, session=session, num_steps=4))
        assert {table.name for table in blocks.tables()} == {"0", "1"}


@pytest.mark.no_cover
@pytest.mark.usefixtures("quickly")
def test_blocks_that_differ_in_a_constant_are_all_compiled() -> None:
    """More than Dynamo's own limit of eight, beyond which it would leave them uncompiled."""
    model = nn.Sequential(*(Numbered(str(number)) for number in range(10)))
    CompiledBlocks(model)
    model(torch.randn(4, 8)).sum().backward()
    assert num_compiled() == 10


@pytest.mark.no_cover
@pytest.mark.usefixtures("quickly")
def test_convolutions_and_batch_norm_agree_for_another_batch_size_too_and_statistics_count_once() -> None:
    def step(model: nn.Module, index: int) -> torch.Tensor:
        x = torch.randn((8, 5)[index], 4, 16, 16, requires_grad=True)  # so that both blocks are alike
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    assert_variants_agree(lambda: nn.Sequential(Convolutional(), Convolutional()), step)


@pytest.mark.usefixtures("quickly")
def test_what_a_block_returns_besides_its_output_and_takes_by_keyword_arrives() -> None:
    class TakesMore(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
            return {"out": self.inner(x) * scale, "name": "seen", "scale": scale}

    model = nn.ModuleList(TakesMore() for _ in range(2))
    expected = model[0](torch.ones(2, 8), scale=torch.tensor(3.0))
    CompiledBlocks(nn.Sequential(*model))
    found = model[0](torch.ones(2, 8), scale=torch.tensor(3.0))
    assert torch.equal(found["out"], expected["out"])
    assert found["name"] == "seen"


# ---------------------------------------------------------------------- the model around them


@pytest.mark.usefixtures("quickly")
def test_without_gradients_and_in_eval_blocks_run_compiled_and_save_nothing() -> None:
    model = gpt().eval()
    expected = model(tokens(0)).logits
    compiled = CompiledBlocks(model)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(0)).logits, expected)
    assert compiled.tables() == []
    model.train()
    gpt_step(model, 0)
    assert len(compiled.tables()) == 2


@pytest.mark.usefixtures("quickly")
def test_state_dict_and_copies_know_nothing_of_compilation() -> None:
    model = gpt()
    before = list(model.state_dict())
    CompiledBlocks(model)
    assert list(model.state_dict()) == before
    assert all(private.get_call(block) is None for block in copy.deepcopy(model).blocks)


@pytest.mark.usefixtures("quickly")
def test_undone_blocks_run_as_they_did() -> None:
    model = gpt()
    compiled = CompiledBlocks(model)
    compiled.undo()
    gpt_step(model, 0)
    assert num_compiled() == 0


@pytest.mark.usefixtures("quickly")
def test_hooks_run_on_the_blocks_that_have_them_and_on_no_other() -> None:
    """Dynamo does not look at hooks when it takes what was compiled for one block for the next."""
    model = gpt()
    seen: list[str] = []
    CompiledBlocks(model)
    gpt_step(model, 0)
    handles = [
        model.blocks[1].register_forward_hook(lambda *_: seen.append("after")),
        model.blocks[1].mlp.register_forward_pre_hook(lambda *_: seen.append("inside")),
    ]
    gpt_step(model, 0)
    assert seen == ["inside", "after"]
    for handle in handles:
        handle.remove()
    gpt_step(model, 0)
    assert seen == ["inside", "after"]


# ---------------------------------------------------------------------- refusals


def test_a_model_that_was_compiled_whole_is_refused_by_name_of_the_way_out() -> None:
    model = gpt()
    wrapped = torch.compile(model)
    model.compile()
    for whole in (wrapped, model):
        with pytest.raises(UnsupportedError, match=r"This GPT was compiled as a whole.*storm\.compile\(model\)"):
            refuse_compiled_whole(whole)
    with Session(gpt(), unlimited=True) as session, pytest.raises(UnsupportedError, match="as a whole"):
        session.compile(wrapped)


@pytest.mark.usefixtures("quickly")
def test_blocks_that_are_compiled_by_themselves_are_no_reason_to_refuse() -> None:
    model = gpt()
    CompiledBlocks(model)
    refuse_compiled_whole(model)
    refuse_compiled_whole(model.blocks[0])


def test_a_model_without_repeated_blocks_is_told_to_name_some() -> None:
    with Session(nn.Linear(4, 4), unlimited=True) as session, pytest.raises(ConfigError, match="No repeated blocks"):
        session.compile()


def test_another_model_than_the_sessions_is_refused() -> None:
    with Session(gpt(), unlimited=True) as session, pytest.raises(ConfigError, match="trains another model"):
        session.compile(gpt())


@pytest.mark.parametrize(
    ("variants", "message"),
    [({"blocks.0": "fast"}, "variant='fast' does not exist; there are save"), ({"x": "save"}, "'x' is no compiled")],
)
def test_a_variant_or_block_that_does_not_exist_is_refused(variants: dict[str, str], message: str) -> None:
    compiled = CompiledBlocks(gpt())
    with pytest.raises(ConfigError, match=message):
        compiled.set(variants)
    assert set(compiled.variants.values()) == {CHEAP}


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_two_products_and_half_of_them_where_it_is_causal(causal: bool) -> None:
    batch, heads, tokens, width = 2, 3, 64, 16
    with FakeTensorMode():
        q, k, v = (torch.empty(batch, heads, tokens, width, device="cuda", dtype=torch.float16) for _ in range(3))
        graph = make_fx(lambda *qkv: torch.ops.aten._scaled_dot_product_flash_attention(*qkv, 0.0, causal)[0])(q, k, v)
    found = {node.name: (graphs.matmul_flops(node), graphs.attention_flops(node)) for node in graph.graph.nodes}
    pairs = tokens * tokens // (2 if causal else 1)
    assert max(found.values()) == (0, 2 * 2 * batch * heads * pairs * width)
    assert sum(attention > 0 for _, attention in found.values()) == 1


@pytest.mark.parametrize(
    ("queries", "keys", "width", "as_many"),
    [(197, 197, 64, (256, 256, 128)), (128, 256, 128, (128, 256, 128)), (1, 300, 256, (128, 384, 256))],
)
def test_attention_takes_as_long_as_products_of_whole_tiles(
    queries: int, keys: int, width: int, as_many: tuple[int, int, int]
) -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    with FakeTensorMode():
        q, k = (torch.empty(2, 3, n, width, device="cuda", dtype=torch.float16) for n in (queries, keys))
        graph = make_fx(lambda q, k: attention(q, k, k, 0.0, False)[0])(q, k)
        product = make_fx(torch.mm)(torch.empty(4, 5), torch.empty(5, 6))
    assert max(map(graphs.flops_as_products, graph.graph.nodes)) == 2 * 2 * 2 * 3 * math.prod(as_many)
    assert sum(map(graphs.flops_as_products, product.graph.nodes)) == 2 * 4 * 5 * 6


def test_attention_that_pytorch_does_not_count_is_counted_by_its_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> int:
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")

    attention = torch.ops.aten._scaled_dot_product_flash_attention
    monkeypatch.setitem(graphs.flop_registry, attention, fail)
    monkeypatch.setitem(graphs.flop_registry, torch.ops.aten.mm, fail)
    with FakeTensorMode():
        q = torch.empty(2, 6, 64, 16, device="cuda", dtype=torch.float16)
        k, v = (torch.empty(2, 2, 64, 16, device="cuda", dtype=torch.float16) for _ in range(2))
        graph = make_fx(lambda *qkv: attention(*qkv, 0.0, False)[0])(q, k, v)
    found = {graphs.attention_flops(node) for node in graph.graph.nodes}
    assert found == {0, 2 * 2 * 2 * 6 * 64 * 64 * 16}
    product = make_fx(torch.mm)(torch.ones(4, 4), torch.ones(4, 4))
    assert {graphs.matmul_flops(node) for node in product.graph.nodes} == {0}


@pytest.mark.no_cover
@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("variant", [SAVE, CHEAP])  # what each of them saves is held to above
def test_what_a_session_counts_is_what_the_variant_saves_once_however_many_views_of_it(variant: str) -> None:
    """Of q, k and v, three views of one storage, a graph saves each with a version counter of its own."""
    model = gpt(2)
    with Session(model, ram="64MiB") as session:
        blocks = session.compile(variant=variant)
        run(model, session=session, num_steps=3)
        plan = session.plan()
        (table, _) = blocks.tables()
    assert plan is not None
    sizes = Counter(s.nbytes for s in plan.trace.storages if s.block == table.name and s.nbytes >= 1024)
    expected = Counter(table.nearest(variant).sizes)
    assert sizes - expected == Counter([BATCH * CONFIG.max_seq_len * CONFIG.width * 4]), "and the block's input"
    assert not expected - sizes


@pytest.mark.no_cover
@pytest.mark.usefixtures("quickly")
def test_where_the_variants_chosen_do_not_fit_after_all_others_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, needed = gpt_with_everything_kept()
    choose, num_chosen = compiled_module.choose_variants, 0

    def wrong_at_first(trace: Trace, blocks: Blocks, *args: Any, **options: Any) -> Choice:
        nonlocal num_chosen
        num_chosen += 1
        if num_chosen == 1:
            variants = {table.name: SAVE for table in blocks.tables}
            return Choice(variants=variants, step_ms=1.0, measured_ms=None, num_tried=1)
        return choose(trace, blocks, *args, **options)

    monkeypatch.setattr(compiled_module, "choose_variants", wrong_at_first)
    model = gpt(4)
    with Session(model, ram=needed * 6 // 10) as session:
        blocks = session.compile()
        assert_same(expected, run(model, session=session, num_steps=6))
        report = session.report()
    assert num_chosen == 2
    assert set(blocks.variants.values()) != {SAVE}
    assert report.measured is not None
    assert report.measured.ram_bytes <= needed * 6 // 10
    assert any(note.startswith("compiled blocks, by what they save: ") for note in report.notes)


@pytest.mark.no_cover
@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(("promised_ms", "expected"), [(1.0, LEAN), (1.98, CHEAP)])
def test_after_steps_of_one_mix_others_are_chosen_if_they_promise_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, promised_ms: float, expected: str
) -> None:
    bits, needed = gpt_with_everything_kept()
    seen: list[set[str]] = []

    def later(trace: Trace, blocks: Blocks, *_: Any, **options: Any) -> Choice:
        tables, measured = blocks.tables, blocks.measured
        seen.append(set(measured.values()))
        wanted = CHEAP if len(seen) == 1 else LEAN
        variants = {table.name: table.nearest(wanted).name for table in tables}
        is_other = variants != measured
        return Choice(variants=variants, step_ms=promised_ms if is_other else 2.0, measured_ms=2.0, num_tried=1)

    monkeypatch.setattr(compiled_module, "choose_variants", later)
    model = gpt(4)
    with Session(model, ram=needed, disk=str(tmp_path)) as session:
        blocks = session.compile()
        assert_same(bits, run(model, session=session, num_steps=6))
        report = session.report()
    assert seen[:2] == [{CHEAP}, {CHEAP}], "of a first step, and of one that followed a plan"
    assert set(blocks.variants.values()) == {expected}
    assert report.num_in_force >= 1, "a plan for what was chosen last"


class Headed(nn.Module):
    """Operations around compiled blocks, which change a tensor that those before them have read."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Changing() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = torch.ones(32)
        x = torch.sin(nn.functional.gelu(self.before(x) + shift) + shift)
        with torch.device("cpu"):  # another mode above the Session's
            for block in self.blocks:
                x = block(x, shift)
        out: torch.Tensor = self.head(x)
        return out


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        shift.add_(1)
        out: torch.Tensor = x + self.net(x)
        return out


def headed() -> Headed:
    torch.manual_seed(1)
    return Headed()


@pytest.mark.no_cover
@pytest.mark.usefixtures("quickly")
def test_what_is_around_compiled_blocks_is_computed_again_and_no_mode_sees_what_they_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, needed = with_everything_kept(headed(), row_step, num_steps=6)
    model = headed()
    modes: list[tuple[int, int]] = []
    call = kind_module.Kind.call

    def spy(self: Any, *arguments: Any) -> Any:
        modes.append((torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()))
        return call(self, *arguments)

    def cheap(trace: Trace, blocks: Blocks, *_: Any, **options: Any) -> Choice:
        variants = {one.name: one.nearest(CHEAP).name for one in blocks.tables}  # whatever they take on this machine
        is_other = variants != blocks.measured
        return Choice(variants=variants, step_ms=1.0 if is_other else 2.0, measured_ms=2.0, num_tried=1)

    monkeypatch.setattr(kind_module.Kind, "call", spy)
    monkeypatch.setattr(compiled_module, "choose_variants", cheap)
    with Session(model, ram=int(0.6 * needed)) as session:
        session.compile()
        assert_same(expected, run(model, row_step, session=session, num_steps=6))
        plan = session.plan()
        assert plan is not None
        assert plan.recomputes
        assert session.report().num_in_force
    assert {(0, 0), (0, 1)} & set(modes[len(modes) // 2 :])
    assert set(modes[len(modes) // 2 :]) <= {(0, 0), (0, 1)}, "none, or the device's"


@torch.compiler.disable
def count(shift: torch.Tensor) -> None:
    with torch.no_grad():
        shift.mul_(1.01)


class Counting(nn.Module):
    """What runs uncompiled at its edge changes what operations before it have read."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        count(shift)
        out: torch.Tensor = x + self.net(x)
        return out


@pytest.mark.no_cover
@pytest.mark.usefixtures("quickly")
def test_blocks_of_which_a_part_runs_uncompiled_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.Changing", Counting)

    expected, needed = with_everything_kept(headed(), row_step, num_steps=6)
    model = headed()
    with Session(model, ram=int(0.6 * needed)) as session:
        blocks = session.compile()
        assert_same(expected, run(model, row_step, session=session, num_steps=6))
    assert blocks.has_breaks
    assert not blocks.are_whole


class Remembering(nn.Module):
    """Joins a buffer to what it is given, and changes it then."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.ones(64, 8))
        self.net = nn.Linear(40, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([x, self.memory], 1)
        with torch.no_grad():
            self.memory.mul_(0.5).add_(x[:, :8])
        out: torch.Tensor = x + self.net(joined * joined)
        return out


@pytest.mark.usefixtures("quickly")
def test_a_buffer_that_is_joined_and_then_changed_is_saved_as_it_was() -> None:
    assert_variants_agree(lambda: nn.Sequential(Remembering(), Remembering()), row_step)
