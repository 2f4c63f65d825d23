"""What autograd keeps outside the budget is in the report, with its name and its bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from torchstorm.offload.session import Session

WIDTH, ROWS, NUM_LAYERS = 64, 1024, 8
LAYER_BYTES = 4 * WIDTH * ROWS


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(NUM_LAYERS):
            x = torch.tanh(self.layer(x))
        return x


def jagged() -> torch.Tensor:
    parts = [torch.randn(ROWS // 4, WIDTH), torch.randn(ROWS * 3 // 4, WIDTH)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def run(model: nn.Module, step: Callable[[], torch.Tensor], num_steps: int = 1) -> Session:
    session = Session(model, unlimited=True)
    for _ in range(num_steps):
        with session.step():
            step().backward()
    return session


def kept_by_autograd(step: Callable[[], torch.Tensor]) -> int:
    """Bytes of all storages that a step's forward saves but those of weights, without a Session."""
    found: dict[int, int] = {}
    alive = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            parts = [tensor]
            if tensor.layout == torch.jagged:
                parts = [tensor._values, tensor._offsets]  # type: ignore[attr-defined]
            for part in parts:
                storage = part.untyped_storage()
                found[storage._cdata] = storage.nbytes()
                alive.append(storage)
        return tensor

    with saved_tensors_hooks(see, lambda tensor: tensor):
        step()
    return sum(found.values())


def test_a_chain_on_jagged_nested_tensors_is_told_whole() -> None:
    model, nested = Chain(), jagged()

    def step() -> torch.Tensor:
        return model(nested).values().square().sum()

    expected = kept_by_autograd(step)
    assert expected >= NUM_LAYERS * LAYER_BYTES
    for num_steps in (1, 3):
        session = run(model, step, num_steps)
        told = session._shared.saved.outside.peak_bytes["NestedTensor"]
        assert told == expected
        # Of the last one `square` saves the values as a plain tensor: those are within the budget, too.
        assert session.usage().ram_bytes == LAYER_BYTES
        assert f"outside the budget: {told / 2**20:.2f} MiB of NestedTensor" in str(session.report())


def test_what_a_checkpoint_computes_again_is_told_one_segment_at_a_time() -> None:
    model, x = Chain(), torch.randn(ROWS, WIDTH)

    def step() -> torch.Tensor:
        y = x
        for _ in range(4):
            y = checkpoint(model, y, use_reentrant=False)
        return y.sum()

    session = run(model, step, 3)
    (name,) = session._shared.saved.outside.peak_bytes
    assert "torch.utils.checkpoint" in name
    # Of a segment, what each tanh returned; the segment's own input is saved in forward, within the budget.
    assert session._shared.saved.outside.peak_bytes[name] == NUM_LAYERS * LAYER_BYTES
    assert session.usage().ram_bytes == 4 * LAYER_BYTES
    assert "2.00 MiB of tensors that torch.utils.checkpoint" in str(session.report())


def test_gradients_through_checkpoints_are_those_without_a_session() -> None:
    model, x = Chain(), torch.randn(ROWS, WIDTH)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert model.layer.weight.grad is not None
    expected = model.layer.weight.grad.clone()
    model.zero_grad()
    run(model, lambda: checkpoint(model, x, use_reentrant=False).sum())
    assert torch.equal(model.layer.weight.grad, expected)


def test_a_wrapper_counts_all_that_it_wraps_and_what_was_let_go_no_more() -> None:
    model = nn.Linear(WIDTH, WIDTH)

    def step() -> torch.Tensor:
        x = model(torch.randn(ROWS, WIDTH))
        one, other = TwoTensor(x.detach(), x.detach() * 2).requires_grad_().sin().sum().backward(), x
        assert one is None
        return other.sum()

    session = run(model, step, 4)
    outside = session._shared.saved.outside
    assert outside.peak_bytes["TwoTensor"] == 2 * LAYER_BYTES
    gc.collect()
    with session.step():
        step().backward()
    assert outside.peak_bytes["TwoTensor"] == 2 * LAYER_BYTES


def test_sparse_tensors_are_told_by_their_layout() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    matrix = torch.eye(ROWS).to_sparse()
    session = run(model, lambda: torch.sparse.mm(matrix, model(torch.randn(ROWS, WIDTH))).sum())
    assert session._shared.saved.outside.peak_bytes == {"torch.sparse_coo tensors": ROWS * (2 * 8 + 4)}


@pytest.mark.parametrize("num_steps", [1, 2])
def test_of_plain_steps_nothing_is_outside(num_steps: int) -> None:
    model, x = Chain(), torch.randn(ROWS, WIDTH)
    session = run(model, lambda: model(x).sum(), num_steps)
    assert session._shared.saved.outside.peak_bytes == {}
    assert "outside" not in str(session.report())


def test_an_empty_tensor_is_no_note_of_the_report() -> None:
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(torch.empty(0))
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> torch.Tensor:
            assert ctx.saved_tensors[0].numel() == 0  # type: ignore[attr-defined]
            return grads[0]

    model, x = Chain(), torch.randn(ROWS, WIDTH)
    session = run(model, lambda: Identity.apply(model(x)).sum())
    assert "outside" not in str(session.report())
