"""Losses, gradients, weights and buffers are the same with a Session as without, whatever the model does."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload.steps import Step, assert_exact_within, assert_same, saved_bytes, train
from torchstorm.offload.session import Session

WIDTH, ROWS = 64, 256


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS, WIDTH)))


def mlp(*, dropout: float = 0.0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        ]
    return nn.Sequential(*layers)


def square(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(batch()).square().mean()
    loss.backward()
    return loss


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.body = mlp()
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


class Attention(nn.Module):
    """q, k and v are strided views of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in qkv(x).chunk(3, dim=-1))
            x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        assert torch.equal(x * x, y)
        return 2 * x * grad


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Square.apply(torch.tanh(layer(x)))
        return x


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(dropout=0.2) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = mlp_first(self.blocks[0], x)
        return checkpoint(self.blocks[1], x, use_reentrant=self.reentrant)


def mlp_first(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            y.add_(1)[:, : WIDTH // 2].mul_(0.5)  # none of these saves what it changes
            y.relu_()  # saves its own result, after the change
            x = x + torch.sin(y) * 0.1
        return x


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 16, 16)
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for o in widths[1:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)), inplace=True)
        return F.max_pool2d(x, 2)


class Spectral(nn.Module):
    """Complex, conjugated and broadcast tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            z = torch.fft.rfft(layer(x))
            x = x + torch.fft.irfft(z * z.conj() * 0.01, n=WIDTH) + layer.bias.expand(ROWS, WIDTH) * x
        return x


def tied_step(model: nn.Module, index: int) -> torch.Tensor:
    tokens = torch.randint(0, 50, (ROWS,))
    loss = F.cross_entropy(model(tokens), tokens)
    loss.backward()
    return loss


def twice_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(model(batch())).square().mean() + model(batch()).mean()
    loss.backward()
    return loss


def eval_between_step(model: nn.Module, index: int) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        before = model(batch()).mean()
    model.train()
    loss = model(batch()).square().mean() + before
    loss.backward()
    return loss


def accumulation_step(model: nn.Module, index: int) -> torch.Tensor:
    total = torch.zeros(())
    for _ in range(3):
        loss = model(batch()).square().mean() / 3
        loss.backward()
        total = total + loss.detach()
    return total


def autocast_step(model: nn.Module, index: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch()).float().square().mean()
    loss.backward()
    return loss


def double_backward_step(model: nn.Module, index: int) -> torch.Tensor:
    x = batch().requires_grad_()
    (gradient,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
    loss = (gradient.norm(dim=-1) - 1).square().mean()
    loss.backward()
    return loss


def subset_step(model: nn.Module, index: int) -> torch.Tensor:
    x = batch()
    used, _unused = model[:10](x).square().mean(), model(x).mean()
    used.backward()
    return used


def retain_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = torch.tanh(model(batch())).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def retain_and_go_on_step(model: nn.Module, index: int) -> torch.Tensor:
    kept = torch.tanh(model(batch())).square().mean()
    kept.backward(retain_graph=True)
    other = model(batch()).square().mean()
    other.backward()
    kept.backward()
    return kept + other.detach()


def changing_length_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(batch((ROWS, ROWS // 2, 2 * ROWS)[index % 3], WIDTH)).square().mean()
    loss.backward()
    return loss


def branching_step(model: nn.Module, index: int) -> torch.Tensor:
    x = model[:10](batch())
    loss = (model[10:](x) if index % 2 else torch.tanh(torch.sigmoid(x)) * x).square().mean()
    loss.backward()
    return loss


def image_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(batch(8, 3, 32, 32)).square().mean()
    loss.backward()
    return loss


def sequence_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(batch(4, 128, WIDTH)).square().mean()
    loss.backward()
    return loss


def lstm_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(batch(4, 64, WIDTH))[0].square().mean()
    loss.backward()
    return loss


CASES: dict[str, tuple[Callable[[], nn.Module], Step, float]] = {
    "plain": (mlp, square, 0.3),
    "dropout": (lambda: mlp(dropout=0.3), square, 0.3),
    "tied weights": (Tied, tied_step, 0.4),
    "views of one buffer": (Attention, sequence_step, 0.5),
    "a module called twice": (mlp, twice_step, 0.3),
    "eval in between": (lambda: mlp(dropout=0.3), eval_between_step, 0.4),
    "gradient accumulation": (mlp, accumulation_step, 0.5),
    "autocast": (mlp, autocast_step, 0.6),
    "custom Function": (Custom, square, 0.5),
    "double backward": (mlp, double_backward_step, 0.5),
    "checkpoint": (lambda: Checkpointed(False), square, 0.5),
    "reentrant checkpoint": (lambda: Checkpointed(True), square, 0.5),
    "in-place operations": (InPlace, square, 0.5),
    "batch norm and in-place relu": (ConvNet, image_step, 0.6),
    "complex and conjugate": (Spectral, square, 0.5),
    "a subset of outputs": (mlp, subset_step, 0.4),
    "retain_graph": (mlp, retain_step, 0.4),
    "retain_graph and a second graph": (mlp, retain_and_go_on_step, 0.5),
    "changing lengths": (mlp, changing_length_step, 0.6),
    "changing branches": (mlp, branching_step, 0.6),
    "lstm": (lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.2), lstm_step, 0.7),
    "transformer encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True), 3),
        sequence_step,
        0.4,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_session_changes_no_bit(name: str, tmp_path: Path) -> None:
    make, step, share = CASES[name]
    assert_exact_within(make, step, tmp_path, share=share, num_steps=6)


@pytest.mark.no_cover
@pytest.mark.parametrize("name", ["plain", "retain_graph", "double backward", "views of one buffer"])
def test_check_mode_changes_no_bit(name: str, tmp_path: Path) -> None:
    make, step, share = CASES[name]
    assert_exact_within(make, step, tmp_path, share=share, check=True)


@pytest.mark.parametrize("name", ["dropout", "tied weights", "batch norm and in-place relu"])
def test_an_unlimited_session_changes_no_bit_and_moves_nothing(name: str) -> None:
    make, step, _ = CASES[name]
    expected, _ = train(make, step, None)
    found, session = train(make, step, lambda model, optimizer: Session(model, unlimited=True))
    assert session is not None
    assert_same(expected, found)
    assert session.usage().disk_bytes == 0


@pytest.mark.no_cover
def test_two_sessions_in_one_process_do_not_mix(tmp_path: Path) -> None:
    budget = int(saved_bytes(mlp, square) * 0.5)

    def alternate(with_sessions: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        models = [mlp(dropout=0.1), mlp()]
        sessions = [Session(model, ram=budget, disk=str(tmp_path)) for model in models] if with_sessions else []
        for index in range(4):
            torch.manual_seed(index)
            # The second model's step lies between the first one's forward and backward.
            if with_sessions:
                with sessions[0].step():
                    loss = models[0](batch()).square().mean()
                    with sessions[1].step():
                        models[1](batch()).square().mean().backward()
                    loss.backward()
            else:
                loss = models[0](batch()).square().mean()
                models[1](batch()).square().mean().backward()
                loss.backward()
        for session in sessions:
            report = session.report()
            assert report.highest is not None
            assert report.highest.ram_bytes <= budget
            session.close()
        return [p.grad for model in models for p in model.parameters() if p.grad is not None]

    for one, other in zip(alternate(False), alternate(True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_after_an_exception_is_right(where: str, tmp_path: Path) -> None:
    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise KeyError("on purpose")

    def broken_step(model: nn.Module, where: str) -> None:
        x = model[:8](batch())
        if where == "forward":
            raise KeyError("on purpose")
        x.register_hook(fail)
        model[8:](x).mean().backward()

    def step(model: nn.Module, index: int) -> torch.Tensor:
        return square(model, index)

    expected, _ = train(mlp, step, None)
    budget = int(saved_bytes(mlp, step) * 0.4)
    torch.manual_seed(1)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = Session(model, ram=budget, disk=str(tmp_path), optimizer=optimizer)
    losses = []
    for index in range(4):
        if index in (0, 2):
            with pytest.raises(KeyError, match="on purpose"), session.step():
                broken_step(model, where)
            optimizer.zero_grad()
        torch.manual_seed(100 + index)
        with session.step():
            losses.append(square(model, index).detach())
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(expected.losses, losses, strict=True))
    session.close()


def test_backward_outside_the_step_is_right(tmp_path: Path) -> None:
    budget = int(saved_bytes(mlp, square) * 0.4)
    torch.manual_seed(0)
    model, x = mlp(), batch()
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with Session(model, ram=budget, disk=str(tmp_path)) as session:
        for _ in range(3):
            model.zero_grad()
            with session.step():
                loss = model(x).square().mean()
            loss.backward()
            found = [p.grad for p in model.parameters()]
            assert all(
                other is not None and torch.equal(one, other) for one, other in zip(expected, found, strict=True)
            )


class ChangesWhatItSaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.layer(x))  # saves y
        y.add_(1)
        return y


def test_a_kept_tensor_changed_in_place_raises_as_without_a_session() -> None:
    model = ChangesWhatItSaved()
    message = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message):
        square(model, 0)
    with Session(model, ram="8MiB") as session:
        for _ in range(3):
            with pytest.raises(RuntimeError, match=message), session.step():
                square(model, 0)


@pytest.mark.parametrize("rows", [ROWS, 16 * ROWS], ids=["copied with others", "copied alone"])
def test_a_moved_tensor_changed_in_place_gives_the_right_gradient_or_raises(rows: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = ChangesWhatItSaved(), batch(rows, WIDTH)
    y = torch.sigmoid(model.layer(x)) + 1
    (expected,) = torch.autograd.grad(y.square().mean(), model.layer.weight)
    outcomes = set()
    with Session(model, ram="16MiB", disk=str(tmp_path)) as session:
        for _ in range(5):
            model.zero_grad()
            try:
                with session.step():
                    model(x).square().mean().backward()
            except RuntimeError as error:
                outcomes.add("raised" if "modified by an inplace operation" in str(error) else str(error))
            else:
                assert model.layer.weight.grad is not None
                assert torch.equal(model.layer.weight.grad, expected)
                outcomes.add("right")
    # Alone, it is changed while its copy is under way, and then it must raise. With others, the first step copied it
    # before the change, and the plan then keeps it, and kept it raises as ever.
    assert outcomes == ({"right", "raised"} if rows == ROWS else {"raised"})


def test_weights_changed_before_backward_raise_as_without_a_session(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with Session(model, ram="8MiB", disk=str(tmp_path)) as session, session.step():
        loss = model(batch()).sum()
        with torch.no_grad():
            model[1].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class TwoViews(torch.autograd.Function):
    """Saves two parts of one storage, each with a version counter of its own, and two views of one part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = (x * 2).unsafe_chunk(2)
        ctx.save_for_backward(first, second, first.view(-1))
        return first + second

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        first, second, flat = ctx.saved_tensors
        return torch.cat((gradient * first, gradient * second + flat.view_as(first)))


def test_what_one_function_saves_of_a_storage_is_counted_once_and_comes_back_exact(tmp_path: Path) -> None:
    def chain(x: torch.Tensor, scales: list[torch.Tensor]) -> torch.Tensor:
        for scale in scales:
            x = TwoViews.apply(torch.cat((x, x)) * scale)
        return x.sum()

    def gradients(session: Session | None) -> list[torch.Tensor]:
        for scale in model:
            scale.grad = None
        with session.step() if session is not None else contextlib.nullcontext():
            chain(x, list(model)).backward()
        return [scale.grad.clone() for scale in model]

    torch.manual_seed(0)
    model = nn.ParameterList(torch.rand(1) for _ in range(6))
    x = torch.randn(64, 1024)
    expected = gradients(None)
    with Session(model, ram="3MiB", disk=str(tmp_path)) as session:
        for _ in range(4):
            for found, wanted in zip(gradients(session), expected, strict=True):
                assert torch.equal(found, wanted)
        plan = session.plan()
        assert session.report().moved_bytes > 0 or plan.recomputes
        assert session.report().num_planned == 2, "the third and the fourth step; the others were measured"
    # Of every link: what is multiplied by the scale, and what TwoViews saves, 512 KiB each.
    assert sum(s.nbytes == 2 * x.nbytes for s in plan.trace.storages) == 2 * len(model)


class Keeps(torch.autograd.Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return None, (gradient * x).sum().reshape(1)


def test_what_two_calls_of_a_function_save_of_one_storage_is_not_taken_for_the_same() -> None:
    """Between them it may have changed by way of a third tensor, whose version counter neither of them has."""
    model = nn.ParameterList([torch.rand(1)])
    x = torch.randn(128, 1024)

    def step() -> torch.Tensor:
        model[0].grad = None
        whole = x.clone()
        first, second = whole.unsafe_chunk(2)
        total = torch.zeros(())
        for part in (first, second):
            total = total + Keeps.apply(part, model[0]).sum()
            whole[64:].add_(1)
        total.backward()
        return model[0].grad.clone()

    expected = step()
    with Session(model, ram="64MiB") as session:
        for _ in range(3):
            with session.step():
                found = step()
            assert torch.equal(found, expected)
        plan = session.plan()
    assert plan is not None
    assert sum(storage.nbytes == x.nbytes for storage in plan.trace.storages) == 2
