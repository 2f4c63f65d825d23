"""Models and steps that ask for more than plain tensors: exact within a budget, or refused; never quietly wrong."""

from __future__ import annotations

import copy
import gc
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import forked
from offload.steps import Step, assert_exact_within, saved_bytes
from torchstorm.errors import UnsupportedError
from torchstorm.offload.session import Session
from torchstorm.plan import search

WIDTH, ROWS = 64, 512


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models this small only lose by more; the root conftest puts it back."""
    torch.set_num_threads(1)


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS, WIDTH)))


def mlp(num_blocks: int = 4) -> nn.Sequential:
    blocks = [(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(num_blocks)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


def square(output: torch.Tensor) -> torch.Tensor:
    loss = output.square().mean()
    loss.backward()
    return loss


def plain_step(model: nn.Module, index: int) -> torch.Tensor:
    return square(model(batch()))


# ---------------------------------------------------------------------- recurrent models


class Unrolled(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(x.shape[1], WIDTH)
        state: Any = (hidden, hidden) if isinstance(self.cell, nn.LSTMCell) else hidden
        for step in x:
            state = self.cell(self.before(step), state)
        return state[0] if isinstance(state, tuple) else state


def unrolled_step(model: nn.Module, index: int) -> torch.Tensor:
    return square(model(batch(12, 128, WIDTH)))


def recurrent_step(model: nn.Module, index: int) -> torch.Tensor:
    return square(model(batch(12, 128, WIDTH))[0])


def packed_step(model: nn.Module, index: int) -> torch.Tensor:
    packed = nn.utils.rnn.pack_sequence([batch(length, WIDTH) for length in (100, 83, 50, 18)])
    return square(model(packed)[0].data)


class GatesOfOneBuffer(nn.Module):
    """What a recurrent cell does inside: chunks of one buffer with a version counter each, changed in place in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            gate, value = layer(x).unsafe_chunk(2, -1)
            x = x + gate.sigmoid_() * value.tanh_()
        return x


def rectified() -> nn.Module:
    return nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.RReLU())))


def large_step(model: nn.Module, index: int) -> torch.Tensor:
    return square(model(batch(4096, WIDTH)))


# ---------------------------------------------------------------------- odd tensors


class OddShapes(nn.Module):
    """Broadcast tensors without strides, empty ones, scalars, booleans and integers are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        mean = x.mean(0, keepdim=True).expand(ROWS, WIDTH)
        y = torch.where(x > 0, x * mean, x * x.mean()) + torch.gather(x, 1, x.argsort(-1)) * mean
        return torch.cat([y, x[:0] * 2]) * x.amax(dim=1, keepdim=True).expand(ROWS, WIDTH)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / 16) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.cfloat)
        for weight in self.weights:
            x = (x @ weight) * torch.sgn(x).conj() + x.conj() * 0.1
        return x.abs()


def overlapping_views_step(model: nn.Module, index: int) -> torch.Tensor:
    hidden = model[:4](batch())
    strided = torch.cat([hidden.flatten()[start::7].square() for start in range(7)])
    windows = torch.sin(hidden.unfold(0, 8, 4).transpose(-1, 1))
    rows = hidden.as_strided((ROWS // 2, WIDTH), (2 * WIDTH, 1)).square()
    bits = hidden.view(torch.int32).bitwise_and(1).float()
    return square(strided.mean() * windows.mean() * rows * bits.mean() + model(hidden)[: ROWS // 2])


def dtypes_step(model: nn.Module, index: int) -> torch.Tensor:
    hidden = model(batch())
    return square(
        torch.cat([torch.tanh(hidden.to(kind)).float() for kind in (torch.double, torch.half, torch.bfloat16)])
    )


class Labelled(torch.Tensor):
    pass


def subclass_step(model: nn.Module, index: int) -> torch.Tensor:
    hidden = torch.sin(model(batch()).as_subclass(Labelled) * 2)
    return square(hidden.as_subclass(torch.Tensor) * model(batch()))


def sparse_step(model: nn.Module, index: int) -> torch.Tensor:
    return square(torch.sparse.mm(torch.randn(ROWS, ROWS).relu_().to_sparse(), model(batch())) * 0.01)


def jagged_step(model: nn.Module, index: int) -> torch.Tensor:
    parts = model(batch()).split([100, 12, 200, 200])
    nested = torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)
    return square(torch.tanh(F.linear(nested, model[0].weight)).values())


def nested_step(model: nn.Module, index: int) -> torch.Tensor:
    parts = torch.tanh(model(batch())).split([100, 12, 200, 200])
    nested = torch.nested.as_nested_tensor(list(parts))
    return square(torch.nested.to_padded_tensor(F.linear(nested, model[0].weight), 0.0))


# ---------------------------------------------------------------------- odd autograd


def forward_mode_step(model: nn.Module, index: int) -> torch.Tensor:
    with forward_ad.dual_level():
        output, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(batch(), batch())))
        loss = output.square().mean() + tangent.square().mean()
        loss.backward()
    return loss.detach()


def vmap_step(model: nn.Module, index: int) -> torch.Tensor:
    mapped = torch.vmap(lambda x: torch.tanh(x @ model[0].weight.t()).sum(-1))(batch(8, WIDTH, WIDTH))
    return square(mapped) + plain_step(model, index).detach()


def batched_gradients_step(model: nn.Module, index: int) -> torch.Tensor:
    x = batch().requires_grad_()
    loss = model(x).square().mean()
    losses = torch.stack([loss * factor for factor in (1, 2, 3)])
    (gradients,) = torch.autograd.grad(losses, x, torch.eye(3), is_grads_batched=True, retain_graph=True)
    losses.sum().backward()
    return losses.sum() + gradients.mean()


def third_order_step(model: nn.Module, index: int) -> torch.Tensor:
    x = batch().requires_grad_()
    (first,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return square(second * 1e-2 + first)


def hooks_step(model: nn.Module, index: int) -> torch.Tensor:
    def shrink(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.9)

    hidden = model[:8](batch())
    hidden.register_hook(lambda gradient: gradient * 0.5)
    assert hidden.grad_fn is not None
    hidden.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
    hook = model[2].weight.register_post_accumulate_grad_hook(shrink)
    loss = square(model[8:](hidden))
    hook.remove()
    return loss


def optimizer_in_backward_step(model: nn.Module, index: int) -> torch.Tensor:
    def descend(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.01)

    hooks = [parameter.register_post_accumulate_grad_hook(descend) for parameter in model.parameters()]
    loss = plain_step(model, index)
    for hook in hooks:
        hook.remove()
    return loss


def anomaly_step(model: nn.Module, index: int) -> torch.Tensor:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        return plain_step(model, index)


def backward_in_a_thread_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(batch()).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return loss


def backwards_in_two_threads_step(model: nn.Module, index: int) -> torch.Tensor:
    losses = [model(batch()).square().mean() for _ in range(2)]  # a sum of two does not depend on the order
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return losses[0] + losses[1]


def own_hooks_step(model: nn.Module, index: int) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        hidden = model[:8](batch())
    return square(model[8:](hidden))


def inference_step(model: nn.Module, index: int) -> torch.Tensor:
    with torch.inference_mode():
        model(batch())
    return plain_step(model, index)


def derived_weights_step(model: nn.Module, index: int) -> torch.Tensor:
    weights = {name: parameter * 0.9 for name, parameter in model.named_parameters()}
    return square(torch.func.functional_call(model, weights, (batch(),)))


def weights_change_in_the_step(model: nn.Module, index: int) -> torch.Tensor:
    first = plain_step(model, index)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.999)
    return first + plain_step(model, index)


def deepcopy_step(model: nn.Module, index: int) -> torch.Tensor:
    hidden = model[:8](batch())
    other = copy.deepcopy(model)
    return square(model[8:](hidden)) + square(other(batch())).detach()


class ReturnsWhatItSaved(torch.autograd.Function):
    """Fused losses compute the gradient in forward, save it, and return the saved tensor itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x * weight).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return None, x


class GradientsAreSavedTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.weight = nn.Parameter(torch.ones(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        h = x.detach() * 2
        losses = [ReturnsWhatItSaved.apply(each, self.weight) for each in (h, h * 3, h)]
        return sum(losses, x.square().mean())


def gradients_are_saved_tensors_step(model: nn.Module, index: int) -> torch.Tensor:
    for _ in range(2):  # the second gradient is added to the first one in place
        loss = model(batch())
        loss.backward()
    return loss


CASES: dict[str, tuple[Callable[[], nn.Module], Step, float]] = {
    "LSTM cell": (lambda: Unrolled(nn.LSTMCell), unrolled_step, 0.5),
    "GRU cell": (lambda: Unrolled(nn.GRUCell), unrolled_step, 0.5),
    "RNN cell": (lambda: Unrolled(nn.RNNCell), unrolled_step, 0.5),
    "GRU": (lambda: nn.GRU(WIDTH, WIDTH, num_layers=2), recurrent_step, 0.6),
    "packed LSTM": (lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2), packed_step, 0.85),
    "gates of one buffer": (GatesOfOneBuffer, plain_step, 0.5),
    "gates of one large buffer": (GatesOfOneBuffer, large_step, 0.5),
    "noise drawn after it was saved": (rectified, plain_step, 0.5),
    "much noise drawn after it was saved": (rectified, large_step, 0.5),
    "broadcast, empty and 0-dim tensors": (OddShapes, plain_step, 0.5),
    "complex weights": (Complex, plain_step, 0.5),
    "overlapping views": (mlp, overlapping_views_step, 0.7),
    "several dtypes": (mlp, dtypes_step, 0.5),
    "a tensor subclass in the middle": (mlp, subclass_step, 0.5),
    "a sparse operand": (mlp, sparse_step, 0.5),
    "jagged tensors": (mlp, jagged_step, 0.5),
    "nested tensors": (mlp, nested_step, 0.5),
    "forward-mode AD": (mlp, forward_mode_step, 0.5),
    "vmap": (mlp, vmap_step, 0.5),
    "batched gradients": (mlp, batched_gradients_step, 0.5),
    "third derivatives": (lambda: mlp(2), third_order_step, 0.7),
    "gradient hooks": (mlp, hooks_step, 0.5),
    "an optimizer in backward": (mlp, optimizer_in_backward_step, 0.5),
    "anomaly detection": (mlp, anomaly_step, 0.5),
    "backward in a thread": (mlp, backward_in_a_thread_step, 0.5),
    "backwards in two threads": (mlp, backwards_in_two_threads_step, 0.6),
    "saved-tensor hooks of its own": (mlp, own_hooks_step, 0.8),
    "inference mode in between": (mlp, inference_step, 0.5),
    "derived weights": (mlp, derived_weights_step, 0.5),
    "weights that change in the step": (mlp, weights_change_in_the_step, 0.5),
    "a deep copy of the model": (mlp, deepcopy_step, 0.5),
    "gradients that are saved tensors": (GradientsAreSavedTensors, gradients_are_saved_tensors_step, 0.5),
}

# Zero tangents have no memory to read; a deep copy of a weak reference to a storage would free it twice.
IN_A_CHILD = ["forward-mode AD", "a deep copy of the model"]

# Said by PyTorch of what these cases do on purpose.
THIRD_PARTY = [
    "ignore:Anomaly Detection has been enabled:UserWarning",
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # by torch.compile, of any block's input
    "ignore:Sparse CSR tensor support is in beta state:UserWarning",
]


@pytest.mark.filterwarnings(*THIRD_PARTY)
@pytest.mark.parametrize("name", [name for name in CASES if name not in IN_A_CHILD])
def test_an_odd_model_trains_to_the_same_bits(name: str, tmp_path: Path) -> None:
    make, step, share = CASES[name]
    assert_exact_within(make, step, tmp_path, share=share)


@pytest.mark.parametrize("name", ["GRU cell", "gates of one large buffer"])
def test_a_check_takes_parts_that_change_while_the_others_are_written_for_no_fault(name: str, tmp_path: Path) -> None:
    make, step, share = CASES[name]
    assert_exact_within(make, step, tmp_path, share=share, recompute=False, check=True, num_steps=6)


def run_in_child(spill: str) -> None:
    torch.set_num_threads(1)
    search._STEPS = 2  # as `short_search` has it, for another process
    for name in IN_A_CHILD:
        print(name)  # shown where it ends the process
        torch.manual_seed(0)
        make, step, share = CASES[name]
        assert_exact_within(make, step, Path(spill), share=share, recompute=False)
        # What was copied or freed wrongly shows when it is all freed again.
        gc.collect()


def test_an_odd_model_that_could_take_the_process_along_trains_to_the_same_bits(tmp_path: Path) -> None:
    """In a child: a mistake with a tensor that has no memory, or with a reference to a storage, is no exception."""
    code = f"from offload.test_odd_models import run_in_child; run_in_child({str(tmp_path)!r})"
    path = os.pathsep.join(sys.path)  # where this module is found
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}.split({os.pathsep!r}); {code}"]
    done = forked.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------------- torch.compile


class CompiledBlocks(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        torch.compiler.reset()
        self.blocks = nn.ModuleList(torch.compile(mlp(1), backend=backend) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.no_cover
@pytest.mark.filterwarnings(*THIRD_PARTY)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks_train_to_the_same_bits(backend: str, tmp_path: Path) -> None:
    assert_exact_within(lambda: CompiledBlocks(backend), plain_step, tmp_path, share=0.6)


@pytest.mark.parametrize("how", ["torch.compile(model)", "model.compile()"])
def test_a_model_that_was_compiled_whole_is_refused_and_the_way_out_named(how: str) -> None:
    model = mlp()
    if how == "torch.compile(model)":
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    with pytest.raises(UnsupportedError, match=r"Sequential was compiled as a whole.*storm\.compile\(model\)"):
        Session(model, ram="1MiB")


# ---------------------------------------------------------------------- autograd's guard


class ChangesItsSaved(torch.autograd.Function):
    """Its backward changes in place what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        x.zero_()
        return gradient * 2


@pytest.mark.parametrize("rows", [ROWS, 8 * ROWS], ids=["moved with others", "moved alone"])
def test_a_saved_tensor_that_backward_changes_raises_for_the_next_who_needs_it(rows: int, tmp_path: Path) -> None:
    """Without a Session autograd raises. With one it must raise as well, or give what there was before the change."""
    torch.manual_seed(0)
    first, last = mlp(2), mlp(6)
    model = nn.Sequential(first, last)

    def expected_gradients(x: torch.Tensor) -> list[torch.Tensor]:
        hidden = first(x) * 1
        return list(torch.autograd.grad(last(torch.sin(hidden) + hidden * 2).square().mean(), [*model.parameters()]))

    x = batch(rows, WIDTH)
    # Of two nodes the one made last runs first: it changes what the other has saved, too.
    with pytest.raises(RuntimeError, match="inplace operation"):
        wrong_order(first, last, x).backward()
    expected = expected_gradients(x)
    limit = 2 * 2**20 * rows // ROWS
    with Session(model, ram=limit, disk=str(tmp_path)) as session:
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = None
            try:
                with session.step():
                    wrong_order(first, last, x).backward()
            except RuntimeError as error:
                if "inplace operation" not in str(error):
                    raise
            else:
                found = [parameter.grad for parameter in model.parameters()]
                assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(expected, found, strict=True))
        assert session._shared.residency.moved_bytes > 0, "nothing moved, so nothing was tested"


def wrong_order(first: nn.Module, last: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = first(x) * 1
    sine = torch.sin(hidden)
    return last(sine + ChangesItsSaved.apply(hidden)).square().mean()


# ---------------------------------------------------------------------- what is the user's


DATASET = 100_000


@dataclass
class Batch:
    x: torch.Tensor


class TakesABatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp()

    def forward(self, given: Batch) -> torch.Tensor:
        return self.encoder(given.x)


@pytest.mark.parametrize("how", ["a tensor", "a dataclass", "a submodule called by itself"])
def test_a_slice_of_a_large_data_set_is_neither_moved_nor_counted_whole(how: str, tmp_path: Path) -> None:
    data = torch.randn(DATASET, WIDTH)  # 24 MiB, of which a step sees 128 KiB

    def step(model: nn.Module, index: int) -> torch.Tensor:
        x = data[index * ROWS : (index + 1) * ROWS]
        if how == "a submodule called by itself":
            return square(model.encoder(x))
        return square(model(Batch(x) if how == "a dataclass" else x))

    make = mlp if how == "a tensor" else TakesABatch
    kept = data.clone()
    assert saved_bytes(make, step) < data.nbytes // 2
    session = assert_exact_within(make, step, tmp_path, share=0.5)
    assert session.report().moved_bytes < data.nbytes // 2
    assert torch.equal(data, kept)


@pytest.mark.no_cover
def test_data_loader_workers_that_are_forked_in_a_step_do_not_touch_it(tmp_path: Path) -> None:
    """A forked child has the parent's Session; what it frees must not free or overwrite anything of the parent's."""
    torch.manual_seed(0)
    model, x = mlp(), batch()
    model(x).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    budget = int(saved_bytes(mlp, plain_step) * 0.5)
    with Session(model, ram=budget, disk=str(tmp_path), check=True) as session:
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = None
            with session.step():
                loss = model(x).square().mean()
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        del loss
                        gc.collect()
                        code = 0
                    finally:
                        os._exit(code)
                _, status = os.waitpid(child, 0)
                assert os.waitstatus_to_exitcode(status) == 0
                assert len(list(tmp_path.iterdir())) == 1
                loss.backward()
            found = [parameter.grad for parameter in model.parameters()]
            assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_graphs_of_earlier_steps_are_run_later_to_the_same_bits(tmp_path: Path) -> None:
    def run(session: Session | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = mlp()
        waiting: list[torch.Tensor] = []
        results = []
        for index in range(6):
            torch.manual_seed(index)
            if session is None:
                waiting.append(model(batch()).square().mean())
                for loss in waiting if index % 2 else []:
                    loss.backward()
            else:
                with session.step():
                    waiting.append(model(batch()).square().mean())
                    for loss in waiting if index % 2 else []:
                        loss.backward()
            if index % 2:
                waiting.clear()
                results += [parameter.grad.clone() for parameter in model.parameters()]
                model.zero_grad()
        return results

    expected = run(None)
    with Session(mlp(), ram=int(saved_bytes(mlp, plain_step) * 0.8), disk=str(tmp_path)) as session:
        found = run(session)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_sparse_embedding_gradients_are_the_same(tmp_path: Path) -> None:
    def run(session_of: Callable[[nn.Module], Session] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(1000, WIDTH, sparse=True), mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = session_of(model) if session_of else None
        gradients = []
        for index in range(4):
            torch.manual_seed(index)
            tokens = torch.randint(0, 1000, (ROWS,))
            if session is None:
                square(model(tokens))
            else:
                with session.step():
                    square(model(tokens))
            assert model[0].weight.grad.is_sparse
            gradients.append(model[0].weight.grad.coalesce().values().clone())
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            session.close()
        return gradients

    budget = int(saved_bytes(mlp, plain_step) * 0.6)
    expected, found = run(None), run(lambda model: Session(model, ram=budget, disk=str(tmp_path)))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_lazy_modules_are_exact_from_their_first_step_on(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(WIDTH), mlp())

    def run(session_of: Callable[[nn.Module], Session] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = make()
        session = session_of(model) if session_of else None
        gradients = []
        for index in range(4):
            torch.manual_seed(index)
            if session is None:
                square(model(batch()))
            else:
                with session.step():
                    square(model(batch()))
            gradients += [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
        if session is not None:
            session.close()
        return gradients

    budget = int(saved_bytes(mlp, plain_step) * 0.6)
    expected, found = run(None), run(lambda model: Session(model, ram=budget, disk=str(tmp_path)))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
