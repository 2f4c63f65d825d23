"""What a user may get wrong: it works to the same bits, or the error or the one warning says what to do."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.steps import saved_bytes, train
from torchstorm.errors import (
    ConfigError,
    PlanError,
    StorageError,
    TorchstormWarning,
    UnsupportedError,
)
from torchstorm.offload.session import Session

WIDTH, ROWS = 64, 128


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models this small only lose by more; the root conftest puts it back."""
    torch.set_num_threads(1)


def mlp() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(batch()).square().mean()


def plain_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = loss_of(model)
    loss.backward()
    return loss


@pytest.fixture
def budget() -> int:
    return saved_bytes(mlp, plain_step) // 2


@pytest.fixture
def sessions(budget: int, tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Makes Sessions that must move tensors, and closes them."""
    made: list[Session] = []

    def make(model: Any, **options: Any) -> Session:
        made.append(Session(model, **({"ram": budget, "disk": str(tmp_path)} | options)))
        return made[-1]

    yield make
    for session in made:
        session.close()


# ---------------------------------------------------------------------- what a Session is given


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ([mlp(), mlp()], r"one torch.nn.Module, but was given a list of 2: put them into a torch.nn.ModuleList"),
        ((mlp(),), "a tuple of 1: put them into a torch.nn.ModuleList"),
        (mlp().parameters(), "was given generator: give the model"),
        (mlp().state_dict(), r"a state dict \(OrderedDict of 16\): give the model that it is for"),
        (nn.Linear, "the class Linear: give an instance"),
        (lambda x: x, "was given function: give the model"),
        (None, "was given None: give the model"),
        ("gpt2", "was given 'gpt2': give the model"),
        ({}, "was given dict of 0: give the model"),
    ],
    ids=["list", "tuple", "generator", "state dict", "class", "function", "None", "name", "dict"],
)
def test_what_is_no_model_is_refused_with_what_to_give(model: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Session(model, disk=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.AdamW, r"optimizer=class AdamW is no torch.optim.Optimizer. Give the one"),
        ([torch.optim.SGD(mlp().parameters())], "optimizer=list of 1 is no .* Where there are several, leave it out"),
        (mlp().parameters(), "optimizer=generator is no"),
        ("adam", "optimizer='adam' is no"),
    ],
    ids=["class", "list", "parameters", "name"],
)
def test_what_is_no_optimizer_is_refused_with_what_to_give(optimizer: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Session(mlp(), disk=str(tmp_path), optimizer=optimizer)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_and_a_disk_that_are_neither_text_nor_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="plan=5 is neither a Plan nor a file"):
        Session(mlp(), plan=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"disk=1000 is of type int: give a path"):
        Session(mlp(), disk=1000)  # type: ignore[arg-type]


def test_a_disk_may_be_a_path(budget: int, tmp_path: Path) -> None:
    model = mlp()
    with Session(model, ram=budget, disk=tmp_path / "spill") as session:
        for index in range(3):
            with session.step():
                plain_step(model, index)
        assert session.usage().disk_bytes > 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_models_whose_steps_a_session_does_not_see_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"is TorchScript, .* as it was before torch\.jit"):
        Session(torch.jit.script(mlp()))
    parallel = nn.DataParallel(mlp())
    assert Session(parallel) is not None  # on a CPU it only passes calls on
    parallel.device_ids = [0, 1]
    with pytest.raises(UnsupportedError, match=r"in 2 threads on as many GPUs.* Use DistributedDataParallel"):
        Session(nn.Sequential(parallel))


@pytest.mark.parametrize("other", ["of another model of the class", "of a copy", "of nothing of the model's"])
def test_an_optimizer_that_trains_another_model_is_warned_of_once(other: str, sessions: Callable[..., Session]) -> None:
    model = mlp()
    parameters = {
        "of another model of the class": mlp().parameters,
        "of a copy": copy.deepcopy(model).parameters,
        "of nothing of the model's": lambda: [torch.zeros(3, requires_grad=True)],
    }[other]
    optimizer = torch.optim.AdamW(parameters())
    message = "none of the 16 of Sequential that are to be trained. Give the one that was made with this model's"
    with pytest.warns(TorchstormWarning, match=message) as caught:
        session = sessions(model, optimizer=optimizer)
    assert caught[0].filename == __file__
    for index in range(3):  # once only: warnings are errors
        with session.step():
            plain_step(model, index)


def test_an_optimizer_of_a_part_of_the_model_or_of_more_is_fine(sessions: Callable[..., Session]) -> None:
    model, scale = mlp(), torch.ones(1, requires_grad=True)
    for parameters in (list(model[0].parameters()), [scale, *model.parameters()]):
        session = sessions(model, optimizer=torch.optim.SGD(parameters))
        with session.step():
            (scale * loss_of(model)).backward()


def test_a_session_and_its_step_cannot_be_copied(sessions: Callable[..., Session]) -> None:
    session = sessions(mlp())
    for copy_it in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="cannot be copied: create a new one"):
            copy_it(session)


# ---------------------------------------------------------------------- how a step is entered


def test_one_context_of_a_step_may_be_entered_again_and_again(sessions: Callable[..., Session]) -> None:
    def context(model: nn.Module) -> Session:
        session = sessions(model)
        once = session.step()
        session.step = lambda: once  # type: ignore[method-assign]
        return session

    assert_exact(context)


def test_a_step_may_be_a_decorator(sessions: Callable[..., Session]) -> None:
    expected_of = mlp()
    model = copy.deepcopy(expected_of)
    session = sessions(model)
    decorated = [session.step()(plain_step) for _ in range(4)]
    for index in range(4):
        torch.manual_seed(index)
        decorated[index](model, index)
        torch.manual_seed(index)
        plain_step(expected_of, index)
    assert_equal([p.grad for p in expected_of.parameters()], [p.grad for p in model.parameters()])
    assert session.report().num_steps == 4
    assert session.usage().disk_bytes > 0


def test_a_generator_or_coroutine_cannot_be_decorated_with_a_step(sessions: Callable[..., Session]) -> None:
    session = sessions(mlp())

    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    async def both() -> Any:
        yield 1

    for function in (generator, coroutine, both):
        with pytest.raises(ConfigError, match=f"before the body of '{function.__name__}' runs.*inside of it"):
            session.step()(function)


def test_a_step_entered_twice_is_an_error_that_harms_neither(sessions: Callable[..., Session]) -> None:
    model = mlp()
    session = sessions(model)
    context = session.step()
    with context:
        for again in (context, session.step()):
            with pytest.raises(ConfigError, match="already in a step: leave it"), again:
                pass
        plain_step(model, 0)
    with context:
        plain_step(model, 1)


def test_two_threads_that_enter_a_step_at_once_get_one_step_and_one_error(sessions: Callable[..., Session]) -> None:
    model = mlp()
    session = sessions(model)
    for _ in range(5):
        together = threading.Barrier(2)
        inside = threading.Barrier(2)
        met: list[str] = []

        def enter(together: threading.Barrier = together, inside: threading.Barrier = inside, met: Any = met) -> None:
            together.wait(10)
            try:
                with session.step():
                    met.append("entered")
                    inside.wait(10)
            except ConfigError:
                met.append("refused")
                inside.wait(10)

        threads = [threading.Thread(target=enter) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(met) == ["entered", "refused"]


def test_a_step_left_in_another_thread_is_an_error_until_its_own_leaves_it(sessions: Callable[..., Session]) -> None:
    model = mlp()
    session = sessions(model)
    context = session.step()
    entered, leave = threading.Event(), threading.Event()

    def enter() -> None:
        context.__enter__()
        entered.set()
        leave.wait(30)
        context.__exit__(None, None, None)

    thread = threading.Thread(target=enter)
    thread.start()
    assert entered.wait(30)
    with pytest.raises(ConfigError, match=r"entered in another thread, .* leave it there"):
        context.__exit__(None, None, None)
    with pytest.raises(ConfigError, match="already in a step"), session.step():
        pass
    leave.set()
    thread.join()
    with session.step():
        plain_step(model, 0)


def test_a_step_that_is_dropped_without_being_left_is_over(sessions: Callable[..., Session]) -> None:
    model = mlp()
    session = sessions(model)
    context = session.step()
    context.__enter__()
    del context
    gc.collect()
    for index in range(3):
        with session.step():
            plain_step(model, index)
    assert session.usage().disk_bytes > 0


def test_a_step_that_is_made_and_not_entered_is_warned_of_once(sessions: Callable[..., Session]) -> None:
    session = sessions(mlp())
    session.step()
    session.step()
    message = r"storm.step\(\) was called three times, and no step was entered.* Write `with storm.step\(\):`"
    with pytest.warns(TorchstormWarning, match=message) as caught:
        session.step()
    assert caught[0].filename == __file__
    for _ in range(5):
        session.step()


def test_a_session_closed_within_its_step_says_so(sessions: Callable[..., Session]) -> None:
    model = mlp()
    session = sessions(model)
    message = r"closed within its own step \(closed by its user\): close it after the step"

    def close_before(step: Callable[[], object]) -> None:
        session.close()
        step()

    with pytest.raises(StorageError, match=message), session.step():
        close_before(lambda: plain_step(model, 0))
    session = sessions(model)
    with pytest.raises(StorageError, match=message), session.step():
        close_before(loss_of(model).backward)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"is closed \(closed by its user\); create a new one"), session.step():
            pass
    with pytest.raises(StorageError, match="create a new one"):
        session.run(lambda x: (model(x).sum(), 1), batch())


def test_what_run_cannot_call_is_refused(sessions: Callable[..., Session]) -> None:
    model = mlp()
    session = sessions(model)
    with pytest.raises(ConfigError, match=r"run\(fn, batch\) needs a function .* but was given Tensor"):
        session.run(batch(), lambda x: (model(x).sum(), 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="already in a step"), session.step():
        session.run(lambda x: (model(x).sum(), 1), batch())


# ---------------------------------------------------------------------- what steps do


def test_three_steps_without_a_backward_are_warned_of_once(sessions: Callable[..., Session]) -> None:
    model = mlp()
    session = sessions(model)

    def forward_only() -> None:
        with session.step():
            loss_of(model)

    forward_only()
    forward_only()
    with pytest.warns(TorchstormWarning, match=r"Three steps .* no backward.* Call loss.backward\(\) inside") as caught:
        forward_only()
    assert caught[0].filename == __file__
    for _ in range(6):
        forward_only()


def test_two_steps_without_a_backward_now_and_then_are_not_warned_of(sessions: Callable[..., Session]) -> None:
    model = mlp()
    session = sessions(model)
    for index in range(8):
        with session.step():
            loss = loss_of(model)
            if index % 3 == 2:
                loss.backward()


def test_steps_without_gradients_are_not_warned_of(sessions: Callable[..., Session]) -> None:
    model = mlp()
    session = sessions(model)
    for _ in range(4):
        with session.step(), torch.no_grad():
            loss_of(model)
        with torch.inference_mode(), session.step():
            loss_of(model)


@pytest.mark.parametrize("where", ["forward before the step", "hooks of another kind", "in another thread"])
def test_steps_that_save_nothing_and_make_gradients_are_warned_of_once(
    where: str, sessions: Callable[..., Session]
) -> None:
    model = mlp()
    session = sessions(model)

    def step() -> None:
        if where == "forward before the step":
            loss = loss_of(model)
            with session.step():
                loss.backward()
        elif where == "hooks of another kind":
            with session.step(), torch.autograd.graph.save_on_cpu():
                plain_step(model, 0)
        else:
            with session.step():
                thread = threading.Thread(target=plain_step, args=(model, 0))
                thread.start()
                thread.join()

    step()
    step()
    with pytest.warns(TorchstormWarning, match=r"nothing was saved through this Session.* Run the forward pass inside"):
        step()
    for _ in range(4):
        step()


@pytest.mark.parametrize("other", ["another model", "a copy"])
def test_steps_of_another_model_are_warned_of_once_and_exact(other: str, sessions: Callable[..., Session]) -> None:
    model = mlp()
    session = sessions(model)
    others = copy.deepcopy(model) if other == "a copy" else mlp()
    expected_of = copy.deepcopy(others)

    def step() -> None:
        torch.manual_seed(5)
        with session.step():
            plain_step(others, 0)
        torch.manual_seed(5)
        plain_step(expected_of, 0)

    step()
    step()
    with pytest.warns(TorchstormWarning, match=r"model was not called.* make a Session for the model"):
        step()
    for _ in range(3):
        step()
    assert session.usage().disk_bytes > 0
    assert_equal([p.grad for p in expected_of.parameters()], [p.grad for p in others.parameters()])


def test_parts_of_a_model_that_are_called_by_themselves_are_not_warned_of(sessions: Callable[..., Session]) -> None:
    parts = nn.ModuleList([mlp(), mlp()])
    session = sessions(parts)
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    for _ in range(4):
        with session.step():
            parts[1](parts[0](batch())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    whole = nn.Sequential(mlp(), mlp())
    session = sessions(whole)
    for _ in range(4):
        with session.step():
            whole[1](whole[0](batch())).square().mean().backward()


def test_a_warning_that_is_an_error_leaves_the_session_as_it_would_be(sessions: Callable[..., Session]) -> None:
    model = mlp()
    session = sessions(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in range(3):
            with pytest.raises(TorchstormWarning) if index == 2 else contextlib.nullcontext(), session.step():
                loss_of(model)
    for index in range(3):
        with session.step():
            plain_step(model, index)
    assert session.usage().disk_bytes > 0


# ---------------------------------------------------------------------- what is exact, and stays so


def gradients_of(
    session_of: Callable[[nn.Module], Session] | None, step: Callable[[nn.Module, int], Any] = plain_step
) -> list[torch.Tensor]:
    """Of four steps of a fresh model."""
    outcome, session = train(mlp, step, (lambda model, _: session_of(model)) if session_of else None)
    if session is not None:
        assert session.usage().disk_bytes > 0 or session.report().highest.disk_bytes > 0  # type: ignore[union-attr]
    return [gradient for each in outcome.gradients for gradient in each.values() if gradient is not None]


def assert_equal(expected: list[Any], found: list[Any]) -> None:
    assert expected
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def assert_exact(
    session_of: Callable[[nn.Module], Session], step: Callable[[nn.Module, int], Any] = plain_step
) -> None:
    assert_equal(gradients_of(None, step), gradients_of(session_of, step))


def two_forwards(model: nn.Module, index: int) -> torch.Tensor:
    loss = loss_of(model) + loss_of(model)
    loss.backward()
    return loss


def eval_in_between(model: nn.Module, index: int) -> torch.Tensor:
    hidden = model[:8](batch())
    model.eval()
    with torch.no_grad():
        model(batch())
    with torch.inference_mode():
        model(batch())
    model.train()
    loss = model[8:](hidden).square().mean()
    loss.backward()
    return loss


def in_a_thread(model: nn.Module, index: int) -> torch.Tensor:
    losses: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: losses.append(loss_of(model)))
    thread.start()
    thread.join()
    loss = losses[0] + loss_of(model)
    loss.backward()
    return loss


def zeroed_and_trained_within(model: nn.Module, index: int) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    plain_step(model, index)
    optimizer.step()
    optimizer.zero_grad()
    return plain_step(model, index)


def backward_through_it_twice(model: nn.Module, index: int) -> torch.Tensor:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    return loss


def generated(model: nn.Module, index: int) -> torch.Tensor:
    def outputs() -> Iterator[torch.Tensor]:
        x = batch()
        for layer in model.children():
            x = layer(x)
            yield x.square().mean()

    loss = torch.stack(list(outputs())).sum()
    loss.backward()
    return loss


def under_defaults_of_others(model: nn.Module, index: int) -> torch.Tensor:
    x = batch()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            loss = model(x).square().mean()
            loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    return loss


def under_anomaly_detection(model: nn.Module, index: int) -> torch.Tensor:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        return plain_step(model, index)


EXACT = {
    "two forwards and one backward": two_forwards,
    "eval and no_grad in between": eval_in_between,
    "a part of the forward in a thread": in_a_thread,
    "gradients zeroed and weights trained within": zeroed_and_trained_within,
    "backward twice": backward_through_it_twice,
    "a model that yields": generated,
    "under another default type and device": under_defaults_of_others,
    "under anomaly detection": under_anomaly_detection,
}


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("name", EXACT)
def test_what_a_step_does_is_exact(name: str, sessions: Callable[..., Session]) -> None:
    assert_exact(sessions, EXACT[name])


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "device", "default type"])
def test_a_session_made_under_a_mode_works_outside_of_it(how: str, sessions: Callable[..., Session]) -> None:
    def session_of(model: nn.Module) -> Session:
        if how == "default type":
            torch.set_default_dtype(torch.float64)
            try:
                return sessions(model, check=True)
            finally:
                torch.set_default_dtype(torch.float32)
        modes = {
            "no_grad": torch.no_grad,
            "inference_mode": torch.inference_mode,
            "device": lambda: torch.device("meta"),
        }
        with modes[how]():
            return sessions(model, check=True)

    assert_exact(session_of)


def test_a_step_in_a_thread_is_exact(sessions: Callable[..., Session]) -> None:
    expected = gradients_of(None)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(gradients_of(sessions)))
    thread.start()
    thread.join()
    assert_equal(expected, found)


def test_backward_after_the_step_in_another_thread_is_exact(sessions: Callable[..., Session]) -> None:
    def run(session: Session | None, model: nn.Module) -> list[torch.Tensor]:
        for index in range(4):
            torch.manual_seed(index)
            with session.step() if session is not None else contextlib.nullcontext():
                loss = loss_of(model)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model = mlp()
    other = copy.deepcopy(model)
    session = sessions(model)
    assert_equal(run(None, other), run(session, model))
    assert session.report().highest.disk_bytes > 0  # type: ignore[union-attr]


def test_two_sessions_of_one_model_nested_are_exact_and_the_outer_one_says_that_it_keeps_nothing(
    sessions: Callable[..., Session],
) -> None:
    expected_of = mlp()
    model = copy.deepcopy(expected_of)
    outer, inner = sessions(model), sessions(model)
    told = pytest.warns(TorchstormWarning, match="neither within another Session's step")
    for index in range(5):
        torch.manual_seed(index)
        with told if index == 2 else contextlib.nullcontext(), outer.step(), inner.step():
            plain_step(model, index)
        torch.manual_seed(index)
        plain_step(expected_of, index)
    assert inner.usage().disk_bytes > 0
    assert_equal([p.grad for p in expected_of.parameters()], [p.grad for p in model.parameters()])
