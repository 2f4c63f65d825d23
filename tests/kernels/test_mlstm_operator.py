"""The mLSTM's operators keep PyTorch's rules: schemas, shapes without data, compilation, gradients of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from kernels.mlstm_runs import draw
from torchstorm.kernels import MLSTMState, mlstm, mlstm_step
from torchstorm.kernels.mlstm.op import mlstm_backward, mlstm_forward
from torchstorm.kernels.mlstm.reference import Gate

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
DYNAMIC = "test_aot_dispatch_dynamic"


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("gate", "lengths", "state"),
    [
        pytest.param("exp", None, True, id="batch, state"),
        pytest.param("exp", [1, 0, 3], False, id="packed"),
        pytest.param("sigmoid", [1, 0, 3], True, id="sigmoid, packed, state"),
        pytest.param("sigmoid", None, False, id="sigmoid, batch"),
    ],
)
def test_opcheck(gate: str, lengths: list[int] | None, state: bool) -> None:
    inputs = draw(1 if lengths else 2, 2, 4, 2, 3, state=state, lengths=lengths)
    tensors = [x.requires_grad_() for x in (*inputs[:5], *(inputs.state or ()))]  # type: ignore[misc]
    start = [*tensors[5:], None, None, None][:3]
    if gate == "sigmoid":
        start[1:] = None, None
    options = (*start, inputs.cu_seqlens, 4, gate, "chunkwise")
    torch.library.opcheck(mlstm_forward, (*tensors[:5], *options), test_utils=(*CHECKS, DYNAMIC))
    with torch.no_grad():
        h, C, n, m, *saved = mlstm_forward(*tensors[:5], *options)
    grads = [x.clone().requires_grad_() for x in (h, C, n, m)]
    arguments = (*grads, *tensors[:5], *start, inputs.cu_seqlens, h, *saved, C, n, m, 4, gate, "chunkwise")
    torch.library.opcheck(mlstm_backward, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("lengths", [None, [2, 4]], ids=["batch", "packed"])
def test_gradients_of_gradients(gate: str, lengths: list[int] | None) -> None:
    inputs = draw(1, 2, 6, 2, 3, dtype=torch.float64, lengths=lengths)
    tensors = [x.requires_grad_() for x in (*inputs[:5], *inputs.state)]  # type: ignore[misc]

    def compute(*x: Tensor) -> tuple[Tensor, ...]:
        state = MLSTMState(*x[5:])
        options = {"initial_state": state, "cu_seqlens": inputs.cu_seqlens, "gate": gate, "chunk": 3}
        h, end = mlstm(*x[:5], return_state=True, **options)  # type: ignore[call-overload]
        return (h, *end) if gate == "exp" else (h, end.C)

    assert torch.autograd.gradcheck(compute, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(compute, tensors, fast_mode=True)


def test_third_derivatives_are_those_of_the_definition() -> None:
    inputs = draw(1, 1, 5, 2, 2, dtype=torch.float64, state=False)
    found = []
    for variant in ("chunkwise", "quadratic"):
        q, k, *rest = (x.clone().requires_grad_() for x in inputs[:5])  # type: ignore[union-attr]
        value = mlstm(q, k, *rest, variant=variant).square().sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, k, create_graph=True)
            value = (grad * inputs.q).sum()
        found.append(value.detach())
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_the_gradients_of_a_final_state_alone(gate: Gate) -> None:
    inputs = draw(1, 2, 10, 4, 6, dtype=torch.float64, state=False)
    found = []
    for variant in ("chunkwise", "recurrent"):
        x = [y.clone().requires_grad_() for y in inputs[:5]]  # type: ignore[union-attr]
        _, state = mlstm(*x, variant=variant, gate=gate, chunk=4 if variant == "chunkwise" else None, return_state=True)
        found.append(torch.autograd.grad(state.C.sum(), x, materialize_grads=True))
    torch.testing.assert_close(found[0], found[1])


def test_an_input_that_needs_no_gradient_and_one_given_twice() -> None:
    inputs = draw(1, 2, 10, 4, 4, dtype=torch.float64, state=False)
    found = []
    for variant in ("chunkwise", "recurrent"):
        x = inputs.q.clone().requires_grad_()
        gate = inputs.i.clone().requires_grad_()
        mlstm(x, x, x.detach(), gate, gate, variant=variant).sum().backward()
        found.append((x.grad, gate.grad))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.no_cover
def test_compiled_without_a_break_and_not_again_for_another_batch_or_length() -> None:
    torch.compiler.reset()
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")

    def compute(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        h, end = mlstm(q, k, v, i, f, initial_state=MLSTMState(*state), return_state=True)
        step, end = mlstm_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], i[:, :, 0], f[:, :, 0], end)
        return h, step, *end

    compiled = torch.compile(compute, backend=counter, fullgraph=True)
    for B, S in ((2, 10), (3, 33), (7, 200)):
        inputs = draw(B, 2, S, 4, 6)
        found = []
        for run in (compiled, compute):
            x = [y.clone().requires_grad_() for y in (*inputs[:5], *inputs.state)]  # type: ignore[union-attr,misc]
            out = run(*x)
            found.append((out, torch.autograd.grad([y.sum() for y in out], x)))
        torch.testing.assert_close(found[0], found[1])
    assert counter.frame_count <= 2  # the first shape, then any
    assert not counters["graph_break"]
    torch.compiler.reset()


@pytest.mark.no_cover
def test_packed_sequences_compile_too() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mlstm, backend=counter, fullgraph=True)
    for lengths in ([5, 7], [3, 0, 10], [20, 1, 1, 4]):
        inputs = draw(1, 2, sum(lengths), 4, 6, lengths=lengths, state=False)
        x = [y.requires_grad_() for y in inputs[:5]]  # type: ignore[union-attr]
        found = compiled(*x, cu_seqlens=inputs.cu_seqlens)
        found.sum().backward()
        torch.testing.assert_close(found, mlstm(*x, cu_seqlens=inputs.cu_seqlens))
    assert counter.frame_count <= 2
    torch.compiler.reset()


def test_shapes_are_known_without_data() -> None:
    inputs = draw(2, 3, 10, 4, 6, dtype=torch.bfloat16)
    q, k, v, i, f = (x.to("meta") for x in inputs[:5])  # type: ignore[union-attr]
    h, state = mlstm(q, k, v, i, f, return_state=True)
    assert (h.shape, h.dtype, h.device.type) == ((2, 3, 10, 6), torch.bfloat16, "meta")
    assert [tuple(x.shape) for x in state] == [(2, 3, 4, 6), (2, 3, 4), (2, 3)]
