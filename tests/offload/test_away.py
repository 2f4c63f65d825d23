"""The mode that sees functions is away where a step calls none that is to be recorded. What is written meanwhile is
seen, and everything is afterwards as it was before."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # C++ stands in for the mode only where Dynamo says when it compiles
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from offload.forced import force_recompute
from torchstorm.errors import UnsupportedError
from torchstorm.offload.native import library
from torchstorm.offload.recompute.tape import Tape
from torchstorm.offload.recompute.watched import Calls
from torchstorm.offload.session import Session

WIDTH, ROWS, NUM_LAYERS = 32, 256, 8
NUM_STEPS = 8

num_modes = torch._C._len_torch_function_stack
Aside = Callable[["Net", int, torch.Tensor], None]


class Net(nn.Module):
    """The sum of its norm and a buffer is computed again, and nothing else."""

    def __init__(self, aside: Aside | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("offset", torch.zeros(ROWS, WIDTH))  # larger than what a record keeps a copy of
        self.aside = aside
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                x = self.norm(x)
                x = (x + self.offset).sin()
            self.seen.append(num_modes())
            if self.aside is not None:
                self.aside(self, index, x)
        return x.square().mean()


def step(model: Net, index: int) -> list[torch.Tensor]:
    torch.manual_seed(index)
    loss = model(torch.randn(ROWS, WIDTH))
    loss.backward()
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    return [loss.detach(), model.offset.clone(), *gradients]


@pytest.fixture(autouse=True)
def _by_cpp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with Session(nn.Linear(1, 1), unlimited=True):
        assert not library.wait()
    force_recompute(monkeypatch, lambda number: number == 2)
    before = torch._C._dispatch_tls_local_include_set()
    yield
    assert not num_modes()
    assert torch._C._dispatch_tls_local_include_set() == before


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of what was written to while the mode was away."""
    found: list[torch.Size] = []
    method = Tape.is_about_to_change

    def noted(self: Tape, tensors: list[torch.Tensor]) -> None:
        assert not num_modes()
        found.extend(one.shape for one in tensors)
        method(self, tensors)

    monkeypatch.setattr(Tape, "is_about_to_change", noted)
    return found


def both(
    plain: Net, model: Net, session: Session, around: Callable[[], Any] = contextlib.nullcontext
) -> Iterator[None]:
    """Takes steps with a Session and without, and compares them; goes on after each."""
    for index in range(NUM_STEPS):
        with around():
            expected = step(plain, index)
            model.seen.clear()
            with session.step():
                found = step(model, index)
        assert all(map(torch.equal, expected, found)), index
        yield


def compare(aside: Aside | None, folder: Path, around: Callable[[], Any] = contextlib.nullcontext) -> Net:
    """Takes steps with a Session and without; returns the model that has had one."""
    plain, model = (torch.manual_seed(0) and Net(aside) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    with Session(model, ram="600KiB", disk=str(folder)) as session:
        for _ in both(plain, model, session, around):
            assert not num_modes()
        plan = session.plan()
        assert plan is not None
        assert plan.recomputes
        assert session.report().num_planned >= NUM_STEPS - 3
    return model


def test_the_mode_is_there_for_what_is_recorded_and_for_nothing_else(tmp_path: Path) -> None:
    model = compare(None, tmp_path)
    assert model.seen[3:] == [0] * (NUM_LAYERS - 3)


def write_to_the_buffer(model: Net, index: int, x: torch.Tensor) -> None:
    if index == NUM_LAYERS - 2:
        with torch.no_grad():
            model.offset.add_(0.1)


def write_by_index(model: Net, index: int, x: torch.Tensor) -> None:
    if index == NUM_LAYERS - 2:
        model.offset[3:5] = 0.5


def write_with_out(model: Net, index: int, x: torch.Tensor) -> None:
    if index == NUM_LAYERS - 2:
        torch.mul(model.offset, 0.5, out=model.offset)


def write_to_several(model: Net, index: int, x: torch.Tensor) -> None:
    if index == NUM_LAYERS - 2:
        torch._foreach_add_([model.offset, torch.zeros(3)], 1.0)


def write_to_a_view(model: Net, index: int, x: torch.Tensor) -> None:
    if index == NUM_LAYERS - 2:
        model.offset.view(-1)[: 7 * WIDTH].fill_(0.25)


WRITES = [write_to_the_buffer, write_by_index, write_with_out, write_to_several, write_to_a_view]


@pytest.mark.parametrize("write", WRITES)
def test_what_a_record_reads_may_be_written_to_while_the_mode_is_away(
    write: Aside, told: list[torch.Size], tmp_path: Path
) -> None:
    compare(write, tmp_path)
    assert told


def test_a_write_that_only_a_later_step_does_is_seen_too(told: list[torch.Size], tmp_path: Path) -> None:
    steps = []

    def sometimes(model: Net, index: int, x: torch.Tensor) -> None:
        steps.append(index)
        if len(steps) // (2 * NUM_LAYERS) == NUM_STEPS - 2:
            write_to_the_buffer(model, index, x)

    compare(sometimes, tmp_path)
    assert told == [torch.Size((ROWS, WIDTH))]


def increase(x: torch.Tensor) -> None:
    x.add_(0.5)


def test_an_operator_that_is_registered_while_steps_run_may_write_too(told: list[torch.Size], tmp_path: Path) -> None:
    with torch.library._scoped_library("torchstorm_tests", "FRAGMENT") as defined:
        calls = []

        def write(model: Net, index: int, x: torch.Tensor) -> None:
            calls.append(index)
            if len(calls) == 2 * NUM_LAYERS * (NUM_STEPS - 3):
                defined.define("increase_(Tensor(a!) x) -> ()")
                defined.impl("increase_", increase, "CompositeExplicitAutograd")
            if len(calls) > 2 * NUM_LAYERS * (NUM_STEPS - 2) and index == NUM_LAYERS - 2:
                with torch.no_grad():
                    torch.ops.torchstorm_tests.increase_(model.offset.add_(1.0))

        compare(write, tmp_path)
    assert told == 2 * [torch.Size((ROWS, WIDTH))]


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_users_are_left_in_their_order(tmp_path: Path) -> None:
    calls = []

    def within(model: Net, index: int, x: torch.Tensor) -> None:
        with Counting() as counting, torch.device("cpu"):
            F.gelu(model.layers[0](x)).cos()
            torch.zeros(3)
        calls.append(counting.num)

    compare(within, tmp_path)
    assert len(set(calls)) == 1, "whether the mode is there or not"


@pytest.mark.parametrize("around", [Counting, lambda: torch.device("cpu")], ids=["a mode", "a device"])
def test_below_other_modes_it_stays(around: Callable[[], Any], tmp_path: Path) -> None:
    model = compare(None, tmp_path, around)
    assert min(model.seen) > 0


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * ctx.saved_tensors[0].cos()


class Guarded(Net):
    """The mode goes away within the guard."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Sine.apply(torch.tanh(x) + self.offset)  # type: ignore[no-untyped-call]
            with torch.inference_mode():
                x.mean()
            self.offset.data.add_(0.5)
            x = layer(x)
        return x.square().mean()


def test_a_guard_that_restores_what_was_there_before_hides_no_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    force_recompute(monkeypatch)
    plain, model = (torch.manual_seed(0) and Guarded() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    with Session(model, ram="900KiB", disk=str(tmp_path)) as session:
        for _ in both(plain, model, session):
            pass
        assert session.report().num_planned >= NUM_STEPS - 3
        plan = session.plan()
        assert plan is not None
        assert plan.recomputes


def test_a_write_in_inference_mode_leaves_a_record_what_it_reads(told: list[torch.Size], tmp_path: Path) -> None:
    def write(model: Net, index: int, x: torch.Tensor) -> None:
        if index == NUM_LAYERS - 2:
            with torch.inference_mode():
                model.offset.data.add_(0.5)

    compare(write, tmp_path)
    assert told


def test_what_lies_where_a_record_s_argument_was_is_not_taken_for_it(tmp_path: Path) -> None:
    others, gives = list[torch.Tensor](), [False]

    def give_other_memory(model: Net, index: int, x: torch.Tensor) -> None:
        if gives[0] and index == NUM_LAYERS - 2:
            assert not num_modes()
            model.offset.data = torch.full((ROWS, WIDTH), 2.5)
            others.extend(torch.empty(()).fill_(1.0) for _ in range(100))  # one of them has the old address

    model = Net(give_other_memory)
    with Session(model, ram="600KiB", disk=str(tmp_path)) as session:
        for index in range(NUM_STEPS):
            gives[0] = index == NUM_STEPS - 1
            told = pytest.raises(UnsupportedError, match="was given other memory since")
            with told if gives[0] else contextlib.nullcontext(), session.step():
                step(model, index)


@pytest.mark.parametrize("is_once", [True, False])
def test_a_default_device_that_is_set_in_forward_stays(is_once: bool, tmp_path: Path) -> None:
    calls = []

    def set_it(model: Net, index: int, x: torch.Tensor) -> None:
        calls.append(index)
        if index == NUM_LAYERS - 2 and (not is_once or len(calls) > 2 * NUM_LAYERS * (NUM_STEPS - 1) + NUM_LAYERS):
            torch.set_default_device("cpu")

    plain, model = (torch.manual_seed(0) and Net(set_it) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    try:
        with Session(model, ram="600KiB", disk=str(tmp_path)) as session:
            for _ in both(plain, model, session):
                pass
        assert num_modes() == 1
        assert type(torch._C._get_function_stack_at(0)) is DeviceContext
    finally:
        torch.set_default_device(None)


def test_what_is_compiled_in_a_step_leaves_nothing_behind(tmp_path: Path) -> None:
    torch._dynamo.reset()
    whole = torch.compile(lambda x: x.sin() * 2, backend="eager")
    steps = []

    def compiled(model: Net, index: int, x: torch.Tensor) -> None:
        steps.append(index)
        if len(steps) > 2 * NUM_LAYERS * (NUM_STEPS - 2):
            assert whole(x.detach()).equal(x.detach().sin() * 2)

    compare(compiled, tmp_path)


def test_an_error_in_forward_leaves_nothing_behind(tmp_path: Path) -> None:
    fails = [False]

    def fail(model: Net, index: int, x: torch.Tensor) -> None:
        if fails[0] and index == NUM_LAYERS - 2:
            assert not num_modes()
            raise ValueError("as the user's")

    before = torch._C._dispatch_tls_local_include_set()
    model, plain = (torch.manual_seed(0) and Net(fail) for _ in range(2))
    with Session(model, ram="600KiB", disk=str(tmp_path)) as session:
        for index in range(NUM_STEPS):
            fails[0] = index == NUM_STEPS - 2
            with pytest.raises(ValueError) if fails[0] else contextlib.nullcontext(), session.step():  # noqa: PT011
                step(model, index)
            assert not num_modes()
            assert torch._C._dispatch_tls_local_include_set() == before
            model.zero_grad()
        fails[0] = False
        with session.step():
            found = step(model, 3)
    plain.load_state_dict(model.state_dict())
    assert all(map(torch.equal, step(plain, 3), found))


def test_a_step_in_another_thread_is_the_same(told: list[torch.Size], tmp_path: Path) -> None:
    """Python calls what is pending in its main thread alone."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            compare(write_to_the_buffer, tmp_path)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors
    assert not told, "there the mode stays: nothing is left that waits for the main thread"


class InParts(Net):
    """What is recorded comes after a function that calls others, which saves before it has called the last of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index in (2, 5):
                x_1BC = x[None]
                weights = torch.eye(3 * WIDTH, WIDTH), torch.zeros(3 * WIDTH)
                x = F.multi_head_attention_forward(
                    *(x_1BC, x_1BC, x_1BC, WIDTH, 4, *weights, None, None, False, 0.0),
                    *(self.layers[0].weight, self.layers[0].bias),
                    need_weights=index == 2,
                )[0][0]
                x = (x + self.offset).sin()
            self.seen.append(num_modes())
        return x.square().mean()


def test_a_function_that_calls_others_is_seen_from_its_begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    force_recompute(monkeypatch, lambda number: number == 6)
    plain, model = InParts(), InParts()
    model.load_state_dict(plain.state_dict())
    with Session(model, ram="900KiB", disk=str(tmp_path)) as session:
        num_planned = [session.report().num_planned for _ in both(plain, model, session)]
        assert num_planned[-1] == num_planned[-2] + 1
    assert 0 in model.seen


def test_the_mode_comes_back_before_a_function_that_calls_others() -> None:
    number = (9 << 30) + 1
    calls = Calls([number])
    assert calls.moments == {9}
    calls.learn([8, 9], 20)
    assert calls.present == {7, 8, 9}
    calls.learn([], 5)
    assert calls.present == {5}, "it has to be there when forward is over"
    calls.learn([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 20)
    assert calls.present == set(range(10))
