"""A model that changes after its Session was made: the same bits as without a Session, or an error at the next step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from offload.steps import Outcome, assert_same
from torchstorm.errors import DeviceError, TorchstormWarning, UnsupportedError
from torchstorm.offload.misuse import check_unmoved
from torchstorm.offload.session import Session
from torchstorm.offload.step.inputs import ModelTensors

WIDTH, ROWS = 64, 128
NUM_STEPS, CHANGED = 9, 4  # the change comes before this step; by then a plan is followed

Change = Callable[[nn.Module], object]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models this small only lose by more; the root conftest puts it back."""
    torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.1, self.training)).tanh()


class Adapter(nn.Module):
    """A layer with a low-rank one beside it, as PEFT puts them in a model's place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 8, bias=False)
        self.up = nn.Linear(8, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.up(self.down(self.dropout(x)))


def make() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(6)))


def add_adapters(model: nn.Module) -> None:
    model.requires_grad_(False)
    for block in model.children():
        block.up, block.down = Adapter(block.up), Adapter(block.down)


def merge_adapters(model: nn.Module) -> None:
    for block in model.children():
        for name in ("up", "down"):
            adapter = getattr(block, name)
            with torch.no_grad():
                adapter.base.weight += 2 * adapter.up.weight @ adapter.down.weight
            setattr(block, name, adapter.base)
    model.requires_grad_(True)


def replace_a_layer(model: nn.Module) -> None:
    model[2].up = nn.Linear(WIDTH, 4 * WIDTH)


def tie_weights(model: nn.Module) -> None:
    model[3].up.weight = model[1].up.weight


def normalize_weights(model: nn.Module) -> None:
    for block in model.children():
        nn.utils.parametrizations.weight_norm(block.up)


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.randn(ROWS, WIDTH))
    with torch.inference_mode():
        model(torch.randn(ROWS, WIDTH))
    model.train()


def empty_and_load(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu").load_state_dict(state)


CHANGES: dict[str, Change] = {
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "to double": lambda model: model.double(),
    "adapters added": add_adapters,
    "a layer replaced": replace_a_layer,
    "a layer added": lambda model: model.append(Block()),
    "a layer removed": lambda model: model.pop(5),
    "a layer frozen": lambda model: model[0].requires_grad_(False),
    "weights tied": tie_weights,
    "weights normalized": normalize_weights,
    "evaluated without gradients in between": evaluate,
    "evaluated for good": lambda model: model.eval(),
    "moved to the meta device and back": empty_and_load,
    "weights loaded in place of the old ones": lambda model: model.load_state_dict(make().state_dict(), assign=True),
}


def train(
    changes: dict[int, Change], session_of: Callable[[nn.Module, torch.optim.Optimizer], Session] | None
) -> tuple[Outcome, Session | None]:
    """A fresh optimizer follows each change, as it must where parameters were added or replaced."""
    torch.manual_seed(1)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    session = session_of(model, optimizer) if session_of else None
    outcome = Outcome()
    for index in range(NUM_STEPS):
        torch.manual_seed(100 + index)
        if index in changes:
            changes[index](model)
            optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        x = torch.randn(ROWS, WIDTH).to(next(model.parameters()).dtype)
        if session is None:
            loss = model(x).square().mean()
            loss.backward()
        else:
            with session.step():
                loss = model(x).square().mean()
                loss.backward()
        outcome.losses.append(loss.detach().clone())
        outcome.gradients.append(
            {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        )
        optimizer.step()
        optimizer.zero_grad()
    outcome.state = {name: value.clone() for name, value in model.state_dict().items()}
    return outcome, session


def bytes_before_and_after(changes: dict[int, Change]) -> list[int]:
    """What the steps save, before each change and after the last."""
    found: dict[int, int] = {}
    model = make()
    with Session(model, unlimited=True) as session:
        for index in [0, *changes]:
            changes.get(index, lambda model: None)(model)
            with session.step():
                model(torch.randn(ROWS, WIDTH).to(next(model.parameters()).dtype)).square().mean().backward()
            found[index] = session.usage().ram_bytes
    return list(found.values())


def assert_exact(changes: dict[int, Change], tmp_path: Path, *, moves: bool, share: float) -> None:
    saved = bytes_before_and_after(changes)
    ram = int(min(saved) * share)
    disk = str(tmp_path) if moves else None
    expected, _ = train(changes, None)
    found, session = train(changes, lambda model, _: Session(model, ram=ram, disk=disk, recompute=not moves))
    assert session is not None
    assert_same(expected, found)
    plan, last, report = session.plan(), session.usage(), session.report()
    session.close()
    assert last.ram_bytes <= ram
    assert report.num_planned > 1
    assert plan is not None
    if moves:
        assert last.disk_bytes > 0
        assert not plan.recomputes
    else:
        assert plan.recomputes


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_changed_between_steps_trains_to_the_same_bits_where_tensors_are_moved(
    name: str, tmp_path: Path
) -> None:
    assert_exact({CHANGED: CHANGES[name]}, tmp_path, moves=True, share=0.5)


@pytest.mark.no_cover
@pytest.mark.parametrize("name", [name for name in CHANGES if name not in ("to bfloat16", "to double")])
def test_a_model_changed_between_steps_trains_to_the_same_bits_where_tensors_are_computed_again(
    name: str, tmp_path: Path
) -> None:
    assert_exact({CHANGED: CHANGES[name]}, tmp_path, moves=False, share=0.8)


@pytest.mark.no_cover
@pytest.mark.parametrize("moves", [True, False], ids=["moved", "computed again"])
def test_a_type_of_the_same_size_is_another_one_all_the_same(moves: bool, tmp_path: Path) -> None:
    """From bfloat16 to float16 no tensor changes its bytes: the step follows the plan of the other type."""
    changes: dict[int, Change] = {
        0: lambda model: model.to(torch.bfloat16),
        CHANGED: lambda model: model.to(torch.float16),
    }
    assert_exact(changes, tmp_path, moves=moves, share=0.8)


@pytest.mark.no_cover
@pytest.mark.parametrize("moves", [True, False], ids=["moved", "computed again"])
def test_adapters_added_and_merged_again_train_to_the_same_bits(moves: bool, tmp_path: Path) -> None:
    assert_exact({3: add_adapters, 6: merge_adapters}, tmp_path, moves=moves, share=0.8 if not moves else 0.5)


def test_a_model_changed_within_a_step_gives_the_same_bits(tmp_path: Path) -> None:
    """The step knows the weights that there were when it began; those that came since count as saved tensors."""

    def run(session_of: Callable[[nn.Module], Session] | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = make()
        session = session_of(model) if session_of else None
        found = []
        for index in range(4):
            torch.manual_seed(index)
            x = torch.randn(ROWS, WIDTH, dtype=torch.float64)

            def forward_and_backward(x: torch.Tensor = x) -> None:
                replace_a_layer(model)
                model.double()
                loss = model(x).square().mean()
                model[4].up = nn.Linear(WIDTH, 4 * WIDTH)
                loss.backward()
                model.float()

            if session is None:
                forward_and_backward()
            else:
                with session.step():
                    forward_and_backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if session is not None:
            assert session.usage().disk_bytes > 0
            session.close()
        return found

    expected = run(None)
    found = run(lambda model: Session(model, ram="3MiB", disk=str(tmp_path)))
    assert expected
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


# ---------------------------------------------------------------------- the optimizer


@pytest.mark.no_cover
def test_an_optimizer_that_was_swapped_lets_go_of_its_state_and_the_bits_are_the_same(tmp_path: Path) -> None:
    ram = int(bytes_before_and_after({})[0] * 0.5)
    gone: list[weakref.ref[torch.optim.Optimizer]] = []

    def session_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Session:
        gone.append(weakref.ref(optimizer))
        return Session(model, ram=ram, disk=str(tmp_path), optimizer=optimizer)

    changes: dict[int, Change] = {CHANGED: lambda model: None}
    expected, _ = train(changes, None)
    found, session = train(changes, session_of)
    assert session is not None
    assert_same(expected, found)
    assert session.usage().disk_bytes > 0
    gc.collect()
    assert gone[0]() is None
    model = make()
    with session.step():  # and goes on as a Session without an optimizer
        model(torch.randn(ROWS, WIDTH)).sum().backward()
    session.close()


def test_an_optimizer_that_knows_nothing_of_added_adapters_is_warned_of(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    with Session(model, ram="2MiB", disk=str(tmp_path), optimizer=optimizer) as session:
        with session.step():
            model(torch.randn(ROWS, WIDTH)).sum().backward()
        optimizer.zero_grad()
        add_adapters(model)
        message = "none of the 24 of Sequential that are to be trained"
        with pytest.warns(TorchstormWarning, match=message), session.step():
            model(torch.randn(ROWS, WIDTH)).sum().backward()
        for _ in range(3):  # once only: warnings are errors
            with session.step():
                model(torch.randn(ROWS // 2, WIDTH)).sum().backward()


# ---------------------------------------------------------------------- moved, compiled


@pytest.mark.parametrize("part", ["all of it", "a layer"])
def test_a_step_of_a_model_that_was_moved_to_another_device_is_an_error_until_it_is_back(
    part: str, tmp_path: Path
) -> None:
    model = make()
    with Session(model, ram="2MiB", disk=str(tmp_path)) as session:
        with session.step():
            model(torch.randn(ROWS, WIDTH)).sum().backward()
        moved = model if part == "all of it" else model[3]
        state = {name: value.clone() for name, value in moved.state_dict().items()}
        moved.to("meta")
        with pytest.raises(DeviceError, match=r"made for Sequential on cpu, and now it has parameters on meta\. Move"):
            session.step().__enter__()
        moved.to_empty(device="cpu").load_state_dict(state)
        with session.step():
            model(torch.randn(ROWS, WIDTH)).sum().backward()


def test_buffers_may_lie_elsewhere(tmp_path: Path) -> None:
    model = make()
    with Session(model, ram="2MiB", disk=str(tmp_path)) as session:
        model.register_buffer("shape", torch.empty(3, device="meta"))
        with session.step():
            model(torch.randn(ROWS, WIDTH)).sum().backward()


# torch's own, of a compiled module that is called while modules are watched.
GLOBAL_HOOKS = "ignore:Using `torch.compile\\(module\\)` when there are global hooks:UserWarning"


NO_LEAF = "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"  # Dynamo looks at it


@pytest.mark.filterwarnings(GLOBAL_HOOKS, NO_LEAF)
@pytest.mark.parametrize("when", ["before its first call", "after its first call", "after a step"])
@pytest.mark.parametrize("how", ["model.compile()", "torch.compile(model)", "in one graph", "around a wrapper"])
def test_a_model_compiled_whole_after_its_session_was_made_is_refused(how: str, when: str, tmp_path: Path) -> None:
    model, x = make()[:2], torch.randn(ROWS, WIDTH)  # two blocks, since Dynamo takes its time for each
    session = Session(model, ram="40MiB", disk=str(tmp_path))
    if when == "after a step":
        for _ in range(3):
            with session.step():
                model(x).sum().backward()
    compiled: Callable[[torch.Tensor], torch.Tensor] = model
    if how == "model.compile()":
        model.compile(backend="aot_eager")
    elif how == "around a wrapper":
        compiled = torch.compile(nn.Sequential(nn.Identity(), model), backend="aot_eager")
    else:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=how == "in one graph")
    if when == "after its first call":
        compiled(x).sum().backward()
    with pytest.raises(UnsupportedError, match=r"compiled as a whole.*block by block"), session.step():
        compiled(x).sum().backward()
    torch._dynamo.reset()
    model._compiled_call_impl = None
    with session.step():  # as it was before
        model(x).sum().backward()
    session.close()


@pytest.mark.no_cover
@pytest.mark.filterwarnings(NO_LEAF)
def test_blocks_compiled_by_themselves_after_the_session_was_made_train_to_the_same_bits(tmp_path: Path) -> None:
    def compile_blocks(model: nn.Module) -> None:
        torch._dynamo.reset()
        for block in model.children():
            block.compile(backend="aot_eager")

    assert_exact({CHANGED: compile_blocks}, tmp_path, moves=True, share=0.5)


@pytest.mark.no_cover
def test_a_function_that_was_compiled_with_the_model_in_it_gives_the_same_bits_or_says_what_it_needs(
    tmp_path: Path,
) -> None:
    torch._dynamo.reset()
    model, x = make(), torch.randn(ROWS, WIDTH)
    model.eval()
    loss_of = torch.compile(lambda x: model(x).square().mean(), backend="aot_eager", fullgraph=True)
    loss_of(x).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with Session(model, ram="40MiB", disk=str(tmp_path)) as session:
        for _ in range(3):
            model.zero_grad()
            with session.step():
                loss_of(x).backward()
            assert all(torch.equal(one, p.grad) for one, p in zip(expected, model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_step_within_a_compiled_function_is_refused(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = make()
    session = Session(model, ram="40MiB", disk=str(tmp_path))

    @torch.compile(backend="aot_eager")
    def step(x: torch.Tensor) -> None:
        with session.step():
            model(x).sum().backward()

    with pytest.raises(
        UnsupportedError, match=r"within a function that torch.compile compiles.*Enter the step outside"
    ):
        step(torch.randn(ROWS, WIDTH))
    with session.step():
        model(torch.randn(ROWS, WIDTH)).sum().backward()
    session.close()


def test_compiled_autograd_is_refused(tmp_path: Path) -> None:
    model = make()
    session = Session(model, ram="40MiB", disk=str(tmp_path))
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")),
        pytest.raises(UnsupportedError, match=r"Compiled autograd is enabled.*Disable it"),
        session.step(),
    ):
        model(torch.randn(ROWS, WIDTH)).sum().backward()
    session.close()


def change_nothing(model: nn.Sequential) -> None:
    pass


def replace_a_weight(model: nn.Sequential) -> None:
    model[1][0].weight = nn.Parameter(torch.ones(4, 4))


def share_a_weight(model: nn.Sequential) -> None:
    model[1][0].weight = model[0].weight


def drop_a_bias(model: nn.Sequential) -> None:
    model[0].bias = None


def delete_a_layer(model: nn.Sequential) -> None:
    del model[1]


def add_a_layer_within(model: nn.Sequential) -> None:
    model[1].append(nn.Linear(4, 4))


def add_a_buffer(model: nn.Sequential) -> None:
    model[1][0].register_buffer("mask", torch.ones(4))


def swap_two_layers(model: nn.Sequential) -> None:
    model[0], model[1][0] = model[1][0], model[0]


def replace_all_buffers(model: nn.Sequential) -> None:
    model[1][1]._buffers = {name: one.clone() for name, one in model[1][1]._buffers.items()}


def use_attention(model: nn.Sequential) -> None:
    model.append(nn.MultiheadAttention(4, 1))


@pytest.mark.parametrize(
    "change",
    [
        *(change_nothing, replace_a_weight, share_a_weight, drop_a_bias, delete_a_layer),
        *(add_a_layer_within, add_a_buffer, swap_two_layers, replace_all_buffers, use_attention),
    ],
)
def test_a_model_s_tensors_are_those_that_it_has_now(change: Callable[[nn.Sequential], None]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    found = model_tensors(model)
    found.read()
    assert not found.asks_for_modes
    change(model)
    for _ in range(2):
        found.read()
        assert list(map(id, found.parameters)) == list(map(id, model.parameters()))
        assert list(map(id, found.buffers)) == list(map(id, model.buffers()))
        assert found.asks_for_modes == (change is use_attention)


def model_tensors(model: nn.Module) -> ModelTensors:
    return ModelTensors(model, partial(check_unmoved, model, device=torch.device("cpu")))


def freeze_a_weight(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)


def change_the_type(model: nn.Sequential) -> None:
    model.double()


def give_a_weight_other_memory(model: nn.Sequential) -> None:
    model[0].weight.data = torch.zeros(4, 4)


def give_a_buffer_other_memory(model: nn.Sequential) -> None:
    model[1][1].running_mean.data = torch.zeros(4)  # type: ignore[index, union-attr]


@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize(
    ("change", "is_another"),
    [
        (change_nothing, False),
        (replace_a_weight, False),
        (freeze_a_weight, True),
        (change_the_type, True),
        (drop_a_bias, True),
        (give_a_weight_other_memory, False),
        (give_a_buffer_other_memory, False),
    ],
)
def test_the_kind_and_the_memory_of_a_model_s_tensors_are_those_that_it_has_now(
    change: Callable[[nn.Sequential], None], is_another: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    found = model_tensors(model)
    found.read()
    before = found.state
    change(model)
    for _ in range(2):
        found.read()
        assert (found.state != before) is is_another
        assert found.fixed == {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}


@pytest.mark.usefixtures("short_way")
def test_a_model_that_was_moved_is_refused_until_it_is_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    found = model_tensors(model)
    found.read()
    model.to("meta")
    for _ in range(2):
        with pytest.raises(DeviceError, match="on meta"):
            found.read()
    model.to_empty(device="cpu")
    found.read()
    assert found.fixed == {one.untyped_storage()._cdata for one in model.parameters()}
