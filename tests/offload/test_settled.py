"""The short way through a settled step: the same bits, checks and bytes as the long way."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from offload.forced import force_recompute
from offload.noted import note_packed
from torchstorm.errors import OutOfVRAMError, StorageError, UnsupportedError
from torchstorm.offload.fast import Cpu
from torchstorm.offload.native import library
from torchstorm.offload.recompute.operators import operator
from torchstorm.offload.recompute.tape import TINY_BYTES
from torchstorm.offload.run.shortage import drop_step
from torchstorm.offload.session import Session
from torchstorm.offload.step import saving
from torchstorm.offload.step.hooks import SavedTensors
from torchstorm.offload.step.kept import Kept
from torchstorm.offload.step.letting_go import LetGo, _read_later
from torchstorm.offload.step.packed import Placeholder
from torchstorm.offload.step.parcels import Call, Parcel, Saved, Value
from torchstorm.offload.step.residency import Residency
from torchstorm.offload.step.running import Running
from torchstorm.offload.step.settled import Settled
from torchstorm.offload.step.tables import Tables
from torchstorm.offload.step.views import weak_reference
from torchstorm.plan.forecast import KEEP, Figures
from torchstorm.plan.plan import Budget, Plan
from torchstorm.plan.recompute import RECOMPUTE
from torchstorm.plan.trace import ENTER, PACK, UNPACK, Moment, Trace

pytestmark = pytest.mark.usefixtures("short_way")

WIDTH, ROWS, NUM_LAYERS = 64, 512, 8
LAYER_BYTES = 4 * WIDTH * ROWS


class Tanh(torch.autograd.Function):
    """As a compiled graph does it, one function saves what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh() ** 2)


class Chain(nn.Module):
    """`middle` runs between its halves, on what these have made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.activate: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.middle: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        self.num_again = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = self.activate(layer(x))
            if number == NUM_LAYERS // 2:
                x = self.middle(x)
                for _ in range(self.num_again):
                    x = layer(x).sigmoid()
        return x


class Recurrent(nn.Module):
    """Saves parts of one storage that have a version counter each, and whole tensors after them."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, content = self.cell(x)
        hidden, content = self.cell(hidden, (hidden, content))
        return self.layer(hidden).tanh().exp() * content


def chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


def data(index: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def session_on(model: nn.Module, way: str, folder: Path) -> Session:
    """In which everything is kept without a plan, or by a plan, or half of it is moved or computed again."""
    if way == "unlimited":
        return Session(model, unlimited=True)
    if way == "computed again":
        return Session(model, ram=6 * LAYER_BYTES)
    ram = 40 * LAYER_BYTES if way == "roomy" else 5 * LAYER_BYTES
    return Session(model, ram=ram, disk=str(folder), recompute=False)


def settle(model: Chain, session: Session, num_steps: int = 5) -> None:
    for index in range(num_steps):
        with session.step():
            model(data(index)).square().mean().backward()
    model.zero_grad()


def settled(
    way: str, folder: Path, activate: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
) -> tuple[Chain, Session]:
    model = chain()
    model.activate = activate
    session = session_on(model, way, folder)
    settle(model, session)
    return model, session


def seen_in(model: Chain) -> list[torch.Tensor]:
    """What comes through the model's middle from now on."""
    seen: list[torch.Tensor] = []
    model.middle = lambda x: seen.append(x) or x  # type: ignore[func-returns-value]
    return seen


@pytest.fixture(params=["unlimited", "roomy", "tight", "computed again"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def packed_in(step: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What autograd gets in a step."""
    found = list[object]()
    with monkeypatch.context() as patch:
        note_packed(patch, found)
        step()
    return found


@pytest.mark.parametrize("way", ["unlimited", "roomy", "tight"])
def test_what_stays_in_a_settled_step_takes_the_short_way(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, session = settled(way, tmp_path)
    types = packed_in(lambda: settle(model, session, 1), monkeypatch)
    num_kept = types.count(Kept)
    assert num_kept >= (2 if way == "tight" else NUM_LAYERS - 2), types
    if way == "tight":
        assert session.usage().disk_bytes > 0


@pytest.mark.parametrize("activate", [torch.tanh, Tanh.apply], ids=["operator", "function"])
def test_python_does_no_more_of_a_settled_step_than_to_begin_copies_and_end_them(
    activate: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what is saved, nor what comes back, wherever it was; nor what is let go."""
    model, session = settled("tight", tmp_path, activate)
    called = Counter[str]()

    def count(owner: type, name: str) -> None:
        before = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (called.update([name]), before(*args))[1])

    for owner, names in {
        Settled: ("_pack_planned", "_pack_away", "_begin", "_finish", "arrive", "follows"),
        saving.Saver: ("save_as_planned",),
        Residency: ("send", "drop", "fetch", "rebuild", "discard"),
        LetGo: ("add", "_remove"),
    }.items():
        for name in names:
            count(owner, name)
    settle(model, session, 1)
    assert session.report().num_planned > 0
    assert called["send"] > 2
    saves, returns = ("_pack_planned", "_pack_away", "save_as_planned"), ("arrive", "follows", "rebuild", "fetch")
    by_cpp = (*saves, *returns, "_begin", "_finish", "drop", "discard", "add", "_remove")
    is_by_cpp = library.library() is not None
    assert not is_by_cpp or {name: called[name] for name in by_cpp if called[name] > 1} == {}, called
    assert is_by_cpp or all(called[name] > 1 for name in by_cpp), called


def test_gradients_and_bytes_are_those_without_it(way: str, tmp_path: Path) -> None:
    plain, model = chain(), chain()
    session = session_on(model, way, tmp_path)
    for index in range(8):
        plain(data(index)).square().mean().backward()
        with session.step():
            model(data(index)).square().mean().backward()
        assert all(map(torch.equal, gradients(plain), gradients(model))), index
    peak = session.usage().ram_bytes
    assert peak <= session.report().highest.ram_bytes  # type: ignore[union-attr]
    if way in ("tight", "computed again"):
        assert peak <= 6 * LAYER_BYTES
    else:
        assert peak >= NUM_LAYERS * LAYER_BYTES
    residency = session._shared.residency
    with session._shared.saved._locked:
        assert residency.resident_bytes == residency.staging_bytes


def test_a_step_that_leaves_the_plan_keeps_bits_and_budget(tmp_path: Path) -> None:
    plain, model = chain(), chain()
    session = session_on(model, "tight", tmp_path)
    settle(model, session)
    for num_again in (3, 0, 2):
        for one in (plain, model):
            one.num_again = num_again
        plain(data(9)).square().mean().backward()
        with session.step():
            model(data(9)).square().mean().backward()
        assert all(map(torch.equal, gradients(plain), gradients(model))), num_again
        assert session.usage().ram_bytes <= 5 * LAYER_BYTES


def test_a_backward_that_leaves_the_plan_has_the_same_bits(way: str, tmp_path: Path) -> None:
    """The half of the layers whose backward would come first is not asked for."""
    model, plain = chain(), chain()
    session = session_on(model, way, tmp_path)
    settle(model, session)
    found: dict[Chain, list[torch.Tensor]] = {}

    for one in (plain, model):
        halves: list[torch.Tensor] = []
        one.middle = lambda x, halves=halves: halves.append(x) or x  # type: ignore[misc]

        def step(one: Chain = one, halves: list[torch.Tensor] = halves) -> None:
            one(data(7))
            halves[0].square().mean().backward()

        if one is model:
            with session.step():
                step()
        else:
            step()
        found[one] = gradients(one)
    assert all(map(torch.equal, found[plain], found[model]))


@pytest.mark.parametrize("way", ["unlimited", "roomy"])  # what has moved away is as it was
def test_a_change_in_place_is_the_error_that_autograd_raises(way: str, tmp_path: Path) -> None:
    model, session = settled(way, tmp_path)
    seen = seen_in(model)

    def step() -> None:
        with session.step():
            loss = model(data(7)).square().mean()
            with torch.no_grad():
                seen[0].add_(1)
            loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step()


def test_a_change_in_place_of_what_is_to_be_computed_again_is_the_same_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = NUM_LAYERS // 2
    force_recompute(monkeypatch, lambda one: one == number)
    model = chain()
    with Session(model, ram=40 * LAYER_BYTES, disk=str(tmp_path)) as session:
        settle(model, session, 10)  # by the last of which the operations that make it are known
        assert session.plan().placements[number].tier == RECOMPUTE  # type: ignore[union-attr]

        def change(_: nn.Module, given: tuple[torch.Tensor], out: torch.Tensor) -> None:
            given[0].detach().add_(1)

        model.layers[number + 1].register_forward_hook(change)  # which has saved it once more
        with pytest.raises(RuntimeError, match="modified by an inplace operation"), session.step():
            model(data(7)).square().mean().backward()


@pytest.mark.parametrize("refill", [False, True], ids=["freed", "refilled"])
def test_a_storage_that_is_resized_is_refused(way: str, refill: bool, tmp_path: Path) -> None:
    model, session = settled(way, tmp_path)
    seen = seen_in(model)

    def step() -> None:
        with session.step():
            loss = model(data(7)).square().mean()
            storage = seen[0].untyped_storage()
            content = seen[0].detach().clone()
            storage.resize_(0)
            if refill:
                storage.resize_(content.nbytes)
                seen[0].data.copy_(content)
            loss.backward()

    with pytest.raises(UnsupportedError, match="freed or replaced before backward"):
        step()


@pytest.mark.parametrize("way", ["unlimited", "roomy", "tight"])  # two steps' tensors at once need a tier to go to
def test_a_backward_after_the_step_and_after_the_next_one_is_exact(way: str, tmp_path: Path) -> None:
    model, plain = chain(), chain()
    session = session_on(model, way, tmp_path)
    settle(model, session)
    with session.step():
        first = model(data(1)).square().mean()
    with session.step():
        model(data(2)).square().mean().backward()
    model.zero_grad()
    first.backward()
    plain(data(1)).square().mean().backward()
    assert all(map(torch.equal, gradients(plain), gradients(model)))


def test_what_stays_where_the_plan_has_something_new_leave_is_another_step(tmp_path: Path) -> None:
    """Each layer is given once what an earlier one was given, and saves that again."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
            self.given: dict[int, int] = {}
            self.left: list[bool] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sums: list[torch.Tensor] = []
            for number, layer in enumerate(self.layers):
                sums.append(x + 1)  # which the layer alone saves
                x = layer(sums[self.given.get(number, number)]) * 0.5
                self.left.append(session._shared.saved.left_plan)
            return x

    torch.manual_seed(0)
    model = Sums()
    plain = copy.deepcopy(model)
    with session_on(model, "tight", tmp_path) as session:

        def step(index: int) -> None:
            with session.step():
                model(data(index)).square().mean().backward()

        for index in range(5):
            step(index)
        assert not any(model.left[-NUM_LAYERS:])
        plan = session.plan()
        assert plan is not None
        tiers = {placement.tier for placement in plan.placements}
        assert KEEP in tiers
        assert len(tiers) > 1
        for earlier in range(NUM_LAYERS):
            for later in range(earlier + 1, NUM_LAYERS):
                for one in model, plain:
                    one.zero_grad()
                    one.given = {later: earlier}
                model.left.clear()
                step(1)
                assert model.left[later], (earlier, later)
                plain(data(1)).square().mean().backward()
                assert all(map(torch.equal, gradients(plain), gradients(model))), (earlier, later)
                model.given = {}
                for index in range(2):
                    step(index)


@pytest.mark.parametrize("within", ["forward", "backward"])
def test_what_cpp_keeps_is_there_for_python_once_that_asks(way: str, within: str, tmp_path: Path) -> None:
    plain, model = chain(), chain()
    session = session_on(model, way, tmp_path)
    residency, counted, found = session._shared.residency, list[int](), list[int]()

    def ask(_: torch.Tensor) -> None:
        residency.kept.settle()  # what backward has let go of
        before = residency.resident_bytes
        kept = residency.kept.in_step().values()
        by_cpp = residency.kept.by_cpp
        assert by_cpp is None or not any(by_cpp.holds(one.address) for one in kept)
        assert all(residency.kept.holds(one.address) for one in kept if one.num_live)
        found.append(sum(len(one.alive()) for one in kept))
        counted.append(residency.resident_bytes - before)

    def middle(x: torch.Tensor) -> torch.Tensor:
        if within == "backward":
            x.register_hook(ask)
        else:
            ask(x)
        return x * x * x  # saved before and after

    plain.middle = lambda x: x * x * x
    model.middle = middle
    for index in range(8):
        plain(data(index)).square().mean().backward()
        with session.step():
            model(data(index)).square().mean().backward()
        assert all(map(torch.equal, gradients(plain), gradients(model))), index
        assert residency.resident_bytes == residency.staging_bytes
    assert found[-1] >= (way != "tight"), found
    assert counted[-1] == 0


@pytest.mark.parametrize(("num_layers", "make"), [(0, Chain), (0, Recurrent), (40, Chain), (40, Recurrent), (5, Chain)])
def test_all_that_a_step_saved_beside_another_steps_graph_is_counted_off_again(
    num_layers: int, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """With a budget of so many layers' results, 0 for none: what a plan was made for is not the room that there is."""
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    ram, disk = num_layers * LAYER_BYTES or None, str(tmp_path) if num_layers else None
    with Session(model, ram=ram, disk=disk, recompute=False, unlimited=not num_layers) as session:
        residency = session._shared.residency

        def step(index: int) -> None:
            for one in model, plain:
                one.zero_grad()
            with session.step():
                model(data(index)).square().mean().backward()
            plain(data(index)).square().mean().backward()
            assert all(map(torch.equal, gradients(plain), gradients(model))), index

        for index in range(5):
            step(index)
        with session.step():
            held = model(data(5)).square().mean()
        for index in range(3):
            step(index)
        held.backward()
        plain(data(5)).square().mean().backward()
        assert all(map(torch.equal, gradients(plain), gradients(model)))
        with session._shared.saved._locked:
            assert residency.resident_bytes == residency.staging_bytes
        for index in range(3):
            step(index)
            with session._shared.saved._locked:
                assert residency.resident_bytes == residency.staging_bytes, index


def test_what_a_dropped_step_kept_is_gone_and_not_counted(way: str, tmp_path: Path) -> None:
    model, session = settled(way, tmp_path)
    shared, held = session._shared, list[StorageWeakRef]()
    model.middle = lambda x: held.append(StorageWeakRef(x.untyped_storage())) or x  # type: ignore[func-returns-value]
    settle(model, session)
    with session.step():
        loss = model(data(1)).square().mean()
        assert way != "roomy" or not held[-1].expired()
        drop_step(shared.saved, RuntimeError())
        assert held[-1].expired()
        assert shared.residency.resident_bytes == shared.residency.staging_bytes
        with pytest.raises(OutOfVRAMError, match="ran out of memory and was dropped"):
            loss.backward()
    del loss
    model.middle = lambda x: x
    settle(model, session, 2)
    # Now with a part of it let go by backward.
    seen = seen_in(model)
    settle(model, session)
    with session.step():
        loss = model(data(1)).square().mean()
        torch.autograd.grad(loss, seen[-1])
        drop_step(shared.saved, RuntimeError())
        assert shared.residency.resident_bytes == shared.residency.staging_bytes


def test_under_a_mode_of_the_users_gradients_are_the_same(way: str, tmp_path: Path) -> None:
    class Double(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.ops.aten.tanh.default else out

    plain, model = chain(), chain()
    session = session_on(model, way, tmp_path)
    settle(model, session)
    for _ in range(2):
        with Double():
            plain(data(1)).square().mean().backward()
            with session.step():
                model(data(1)).square().mean().backward()
        assert all(map(torch.equal, gradients(plain), gradients(model)))


class Norm(nn.Module):
    """What it divides by is small beside the budget, and what it makes is computed again from that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, 8)
        return (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)).view_as(x)


def test_what_is_too_small_to_move_takes_the_short_way_where_something_is_computed_again_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force_recompute(monkeypatch)
    monkeypatch.setattr(saving, "least_moved_bytes", lambda _: 2 * (ROWS * WIDTH // 8) * 4)
    model = chain()
    model.layers = nn.ModuleList(nn.Sequential(layer, Norm()) for layer in model.layers)
    with Session(model, ram=40 * LAYER_BYTES, check=True) as session:
        settle(model, session)
        plan = session.plan()
        assert plan is not None
        again = {number for number, one in enumerate(plan.placements) if one.tier == RECOMPUTE}
        read = {plan.trace.values[value].storage for op in plan.trace.ops for value in op.inputs}
        small = [one for at, one in enumerate(plan.trace.storages) if one.parcel < 0 and at in read]
        assert again
        assert any(one.nbytes > TINY_BYTES for one in small)

        long: list[int] = []
        save = saving.Saver.save

        def noted(self: saving.Saver, run: Running, storage: torch.UntypedStorage, tensor: torch.Tensor) -> Saved:
            long.append(run.num_saved)
            return save(self, run, storage, tensor)

        model(data(0)).square().mean().backward()
        expected = gradients(model)
        monkeypatch.setattr(saving.Saver, "save", noted)
        with session.step():
            model(data(0)).square().mean().backward()
        assert all(torch.equal(one, other) for one, other in zip(gradients(model), expected, strict=True))
        assert long == [0]  # by which the plan is chosen


def test_what_others_are_computed_again_from_takes_the_short_way_where_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_recompute(monkeypatch, lambda number: number % 2 == 1)
    plain, model = chain(), chain()
    with Session(model, ram=40 * LAYER_BYTES, disk=str(tmp_path), check=True) as session:
        settle(model, session)
        plan = session.plan()
        assert plan is not None
        parcels = [plan.trace.storages[one.storage].parcel for one in plan.trace.moments if one.kind == PACK]
        again = [number >= 0 and plan.placements[number].tier == RECOMPUTE for number in parcels]
        assert 4 <= sum(again) <= len(again) - 4
        plain(data(0)).square().mean().backward()

        def step() -> None:
            with session.step():
                model(data(0)).square().mean().backward()

        types = packed_in(step, monkeypatch)
        assert all(map(torch.equal, gradients(plain), gradients(model)))
        assert types.count(Placeholder) == sum(again) + 1  # the first one, by which the plan is chosen
        assert types.count(Kept) == len(again) - sum(again) - 1


class TwoLosses(nn.Module):
    """Of what `tanh` saves, `exp` makes what it saves itself, and refers to nothing else of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.made = torch.empty(0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.made = self.first(x).tanh()
        return y.mean(), (y.detach() + self.second).exp().mean()


@pytest.mark.parametrize("drops", [False, True], ids=["ended", "dropped"])
def test_what_others_are_computed_again_from_waits_for_them_where_autograd_lets_go_of_it_earlier(
    drops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_recompute(monkeypatch, lambda number: number == 1)
    torch.manual_seed(0)
    plain, model = TwoLosses(), TwoLosses()
    model.load_state_dict(plain.state_dict())
    with Session(model, ram=40 * LAYER_BYTES, disk=str(tmp_path), check=True) as session:
        residency = session._shared.residency
        for index in range(8):
            is_late = index == 7
            first, second = plain(data(index))
            first.backward()
            second.backward()
            with session.step():
                first, second = model(data(index))
                first.backward(retain_graph=not is_late)
                if is_late:
                    assert residency.kept.awaited
                    if drops:
                        del first, second
                        assert residency.resident_bytes == residency.staging_bytes
                        break
                second.backward()
                assert not residency.kept.awaited
            assert all(map(torch.equal, gradients(plain), gradients(model))), index
            del first, second
        assert not residency.kept.awaited
        assert residency.resident_bytes == residency.staging_bytes
        assert session.plan().placements[1].tier == RECOMPUTE  # type: ignore[union-attr]


def test_nothing_is_computed_again_from_what_was_changed_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_recompute(monkeypatch, lambda number: number == 1)
    model = TwoLosses()
    with Session(model, ram=40 * LAYER_BYTES, disk=str(tmp_path)) as session:

        def step(index: int, *, changed: bool = False) -> None:
            with session.step():
                first, second = model(data(index))
                first.backward(retain_graph=True)
                if changed:
                    with torch.no_grad():
                        model.made.add_(1)
                second.backward()

        for index in range(7):
            step(index)
        with pytest.raises(UnsupportedError, match="cannot be computed again as planned"):
            step(7, changed=True)
        step(8)
        assert not session._shared.residency.kept.awaited


@pytest.mark.parametrize("is_held", [False, True])
def test_nothing_waits_for_what_would_make_bytes_that_are_held(is_held: bool) -> None:
    add = operator(torch.ops.aten.add.Tensor)

    def made_from(*inputs: Value) -> Value:
        call = Call(torch.device("cpu"), add, add, (), {}, list(inputs), [], [], None, 0, 0)
        return Value(4, call)

    first = Value(4, None)
    second = made_from(first)
    third = made_from(second)
    if is_held:
        second.held = torch.zeros(1), 0
    absent = Parcel(4, "", True, 0)
    storage = torch.zeros(1).untyped_storage()
    absent.members.add(Saved(absent, 4, 0, 0, None, 0, weak_reference(storage), 0, "", value=third))
    assert _read_later({absent}) == ({second} if is_held else {first, second})


def test_what_only_something_read_that_has_gone_by_itself_goes_with_it() -> None:
    add = operator(torch.ops.aten.add.Tensor)
    first = Value(4, None)
    second = Value(4, Call(torch.device("cpu"), add, add, (), {}, [first], [], [], None, 0, 0))
    residency = Residency(
        Cpu(has_budget=False),
        limit_bytes=1024,
        tiers={},
        default_tier=KEEP,
        staging_bytes=0,
        check=False,
    )
    let_go = LetGo(residency, running=Running)
    storages = [torch.zeros(1).untyped_storage() for _ in range(2)]
    parcels = [residency.new_parcel(4, "", movable=True), residency.new_absent_parcel(4, "")]
    for parcel, storage, value in zip(parcels, storages, (first, second), strict=True):
        parcel.buffer = None if value is second else torch.zeros(4, dtype=torch.uint8)
        saved = Saved(parcel, 4, 0, 0, None, storage._cdata, weak_reference(storage), 0, "", live=1, value=value)
        value.saved, value.is_read = saved, True
        parcel.members.add(saved)
        residency.known.add(saved, saved.address)
    assert second.saved is not None
    for value in first, second:  # of which the first is read by what makes the second, and that by nothing
        assert value.saved is not None
        let_go.add(value.saved, 0)
    let_go.settle()
    assert not residency.known
    assert not residency.absent
    assert residency.resident_bytes == 0


class Failing:
    """A tier whose next copies back fail, and whose copies out are waited for as they are told to be."""

    def __init__(self, tier: Any) -> None:
        self._tier, self.num_failures = tier, 0
        self.while_waiting: Callable[[torch.Tensor], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def get(self, handle: Any, out: torch.Tensor) -> Any:
        if self.num_failures:
            self.num_failures -= 1
            raise StorageError("a test")
        return self._tier.get(handle, out)

    def put(self, content: torch.Tensor, *, label: str = "") -> Any:
        handle, tier = self._tier.put(content, label=label), self
        copy, wait = handle.written, handle.written.wait

        class Waited:
            def wait(self) -> None:
                wait()
                if tier.while_waiting is not None:
                    tier.while_waiting(content)

            def __getattr__(self, name: str) -> Any:
                return getattr(copy, name)

        handle.written = Waited()
        return handle


def failing_in(session: Session) -> Failing:
    tiers = session._shared.residency._tiers
    tiers["disk"] = found = Failing(tiers["disk"])
    return found


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_copy_back_that_failed_is_begun_again_where_backward_is(num_failures: int, tmp_path: Path) -> None:
    plain = chain()
    model, session = settled("tight", tmp_path)
    plain(data(7)).square().mean().backward()
    tier = failing_in(session)
    with session.step():
        loss = model(data(7)).square().mean()
        for _ in range(num_failures):
            tier.num_failures = 1
            with pytest.raises(StorageError, match="a test"):
                loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
    assert all(map(torch.equal, gradients(plain), gradients(model)))


class Spaced(Chain):
    """What its tanh saves, nothing saves once more."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.made.clear()
        for layer in self.layers:
            x = layer(x).tanh()
            self.made.append(x.detach())
            x = x * 1.0
        return x


def test_a_change_while_a_copy_out_is_waited_for_is_the_error_that_autograd_raises(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Spaced()
    with Session(model, ram=10 * LAYER_BYTES, disk=str(tmp_path), recompute=False) as session:
        settle(model, session, 6)
        tier = failing_in(session)

        def change(content: torch.Tensor) -> None:
            for one in model.made:
                if tier.while_waiting is not None and one.data_ptr() == content.data_ptr():
                    tier.while_waiting = None
                    one.add_(1)

        tier.while_waiting = change
        with pytest.raises(RuntimeError, match="modified by an inplace operation"), session.step():
            model(data(7)).square().mean().backward()
        assert tier.while_waiting is None


class Twice(nn.Module):
    """Its product saves one tensor twice, or another one of the same size that nothing has saved before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_same = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).tanh()
        other = self.second(x) + 1.0
        return (y * (y if self.is_same else other)).square() + other.sin()


def test_another_storage_in_the_place_of_one_that_is_saved_again_is_none_of_the_plan_s(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Twice()
    model = copy.deepcopy(plain)
    with Session(model, ram=40 * LAYER_BYTES, disk=str(tmp_path), recompute=False) as session:
        for index, is_same in enumerate([True] * 5 + [False, True]):
            plain.is_same = model.is_same = is_same
            before = session.report().num_planned
            plain(data(index)).mean().backward()
            with session.step():
                model(data(index)).mean().backward()
            assert all(map(torch.equal, gradients(plain), gradients(model)))
            if index >= 3:  # the first ones are measured
                assert session.report().num_planned - before == is_same


@pytest.mark.usefixtures("short_way")
def test_a_step_that_only_follows_its_plan_tells_what_its_forward_took(tmp_path: Path) -> None:
    model = Twice()
    with Session(model, ram=2**18, disk=str(tmp_path)) as storm:
        for _ in range(4):
            with storm.step():
                loss = model(torch.randn(256, 64)).square().mean()
                time.sleep(0.05)
                loss.backward()
        in_force = storm._shared.plans.in_force
        assert in_force is not None
        took = in_force.recent[-1]
        assert 0.05 < took.forward_s < took.step_s
        assert took.host_s == pytest.approx(took.forward_s, abs=0.01)


def test_plans_by_which_nothing_leaves_have_tables_of_their_own() -> None:
    figures = Figures(step_ms=0.0, vram_bytes=0, ram_bytes=0, disk_bytes=0)
    tables, found = Tables(), []
    for num in (1, 2):  # of what an earlier step saved
        kinds = (ENTER, *[UNPACK] * num)
        moments = tuple(Moment(kind=kind, storage=-1, nbytes=8, compute_s=0.0, other_bytes=0) for kind in kinds)
        trace = Trace(device="cpu", moments=moments, storages=(), parcels=(), base_bytes=0, staging_bytes=0)
        plan = Plan(trace=trace, budget=Budget(), placements=(), forecast=figures)
        found.append(tables.of(plan, all_recorded=True))
        assert tables.of(plan, all_recorded=True) is found[-1]
    assert [table.num_moments for table in found] == [2, 3]


class Parts(nn.Module):
    """Saves whole tensors, views and parts of them, some of them several times, and what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        first, second = hidden.sin().chunk(2)
        shifted = (hidden * 2).data[8:].requires_grad_()  # a part with a version counter of its own
        joined = torch.cat([first.exp(), second.t().exp().t(), shifted.exp(), hidden[:, :1].expand(-1, WIDTH).exp()])
        return joined * joined * joined.sum() * (x[:1] * 3).exp().sum()


def bytes_kept(model: nn.Module, *, by_cpp: bool) -> tuple[list[int], Counter[str]]:
    """What counts in three settled steps without a plan, and how often hooks of theirs have gone through Python."""
    calls = Counter[str]()
    with pytest.MonkeyPatch.context() as patch, Session(model, unlimited=True) as session:
        if not by_cpp:
            patch.setattr(library._building, "found", None)
        counted = []
        for index in range(7):
            if index == 4:
                for name in ("pack", "unpack"):
                    patch.setattr(SavedTensors, name, counting(getattr(SavedTensors, name), name, calls))
            with session.step():
                model(data(index)).square().mean().backward()
            counted.append(session.usage().ram_bytes)
            residency = session._shared.residency
            with session._shared.saved._locked:
                assert residency.resident_bytes == residency.staging_bytes, index
    return counted[4:], calls


def counting(method: Callable[..., object], name: str, calls: Counter[str]) -> Callable[..., object]:
    def counted(*given: object) -> object:
        calls[name] += 1
        return method(*given)

    return counted


@pytest.mark.parametrize("make", [Chain, Parts, Recurrent])
def test_what_is_kept_without_a_plan_is_counted_alike_and_needs_no_python(make: Callable[[], nn.Module]) -> None:
    has_cpp = library.library() is not None
    by_python, _ = bytes_kept(make(), by_cpp=False)
    by_cpp, calls = bytes_kept(make(), by_cpp=has_cpp)
    assert by_python == by_cpp
    assert min(by_cpp) > 0
    if has_cpp and make is Chain:
        assert calls == {"pack": 3, "unpack": 3}, "of the input, which is none of what counts"


@pytest.mark.parametrize("way", ["unlimited", "tight"])
def test_the_values_of_a_sparse_tensor_are_saved_as_without_a_session(way: str, tmp_path: Path) -> None:
    def loss(model: Chain, index: int) -> torch.Tensor:
        x = model(data(index))
        values = (x * 2).to_sparse().coalesce().values()
        return values.square().sin().sum() + x.sum()

    plain, model = chain(), chain()
    with session_on(model, way, tmp_path) as session:
        for index in range(6):
            loss(plain, index).backward()
            with session.step():
                loss(model, index).backward()
            assert all(map(torch.equal, gradients(plain), gradients(model)))
            assert session._shared.residency.resident_bytes == session._shared.residency.staging_bytes
