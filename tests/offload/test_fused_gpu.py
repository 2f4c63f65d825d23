"""On a GPU: pointwise operations that run again in one kernel give the bits of PyTorch's own kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from torchstorm import nvrtc
from torchstorm.offload.recompute import compared, pointwise
from torchstorm.offload.recompute.compared import Example, Kernel, is_exact
from torchstorm.offload.recompute.geometry import Geometry, Look
from torchstorm.offload.recompute.groups import Group
from torchstorm.offload.recompute.pointwise import Input, Operand, Operation
from torchstorm.offload.session import Session

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
FIRST, SECOND = Operand("input", 0), Operand("input", 1)
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "abs": (torch.abs, (FIRST,), {}),
    "cos": (torch.cos, (FIRST,), {}),
    "exp": (torch.exp, (FIRST,), {}),
    "gelu": (torch.nn.functional.gelu, (FIRST,), {}),
    "gelu tanh": (torch.nn.functional.gelu, (FIRST,), {"approximate": "tanh"}),
    "neg": (torch.neg, (FIRST,), {}),
    "reciprocal": (torch.reciprocal, (FIRST,), {}),
    "rsqrt": (torch.rsqrt, (FIRST,), {}),
    "sigmoid": (torch.sigmoid, (FIRST,), {}),
    "silu": (torch.nn.functional.silu, (FIRST,), {}),
    "sin": (torch.sin, (FIRST,), {}),
    "sqrt": (torch.sqrt, (FIRST,), {}),
    "square": (torch.square, (FIRST,), {}),
    "tanh": (torch.tanh, (FIRST,), {}),
    "pow 2": (torch.pow, (FIRST, 2), {}),
    "pow 3.0": (torch.pow, (FIRST, 3.0), {}),
    "add": (torch.add, (FIRST, SECOND), {}),
    "sub": (torch.sub, (FIRST, SECOND), {}),
    "mul": (torch.mul, (FIRST, SECOND), {}),
    "div": (torch.div, (FIRST, SECOND), {}),
    "add 1.7": (torch.add, (FIRST, 1.7), {}),
    "sub 1.7": (torch.sub, (FIRST, 1.7), {}),
    "mul 0.044715": (torch.mul, (FIRST, 0.044715), {}),
    "to float32": (torch.Tensor.to, (FIRST, torch.float32), {}),
    "to bfloat16": (torch.Tensor.to, (FIRST, torch.bfloat16), {}),
    "to float16": (torch.Tensor.to, (FIRST, torch.float16), {}),
}


def kernel_of(name: str, dtype: torch.dtype, stride: tuple[int, ...]) -> Kernel:
    """One operation on the dtype, whose second operand lies by these strides."""
    func, args, kwargs = FUNCTIONS[name]
    size = (256, 512)
    given = torch.ones(size, dtype=dtype, device=GPU)
    result = Look.of(func(*(given if isinstance(one, Operand) else one for one in args), **kwargs))
    assert result is not None
    looks = (Look(dtype, size, (512, 1)), Look(dtype, size, stride))[: sum(isinstance(one, Operand) for one in args)]
    geometry = Geometry.of(result, looks, [0] * len(looks))
    assert geometry is not None
    numbers = tuple(float(one) for one in args if isinstance(one, int | float))
    known = pointwise.formula_of(func.__name__, numbers, kwargs.get("approximate", "none"))
    assert known is not None
    name, num_operands = known
    used = [float(one) for one in args[:num_operands] if not isinstance(one, Operand)]
    operands = [one if isinstance(one, Operand) else Operand("number", 0) for one in args[:num_operands]]
    args = (*operands, *args[num_operands:])
    inputs = tuple(Input(dtype, step[-1] if step[-1] in (0, 1) else 2) for step in geometry.steps)
    code = pointwise.source_of(
        (Operation(name, tuple(operands), result.dtype),),
        inputs,
        (0,),
        num_numbers=len(used),
        num_dims=len(geometry.sizes),
        width=geometry.width,
    )
    example = Example(
        calls=((func, args, kwargs),),
        results=(result,),
        looks=looks,
        outputs=(0,),
        numbers=tuple(used),
        inputs=inputs,
        num_dims=len(geometry.sizes),
        width=geometry.width,
    )
    return Kernel(nvrtc.Source(kernel=pointwise.KERNEL, code=code), GPU, example)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_operation_gives_pytorchs_bits(name: str, dtype: torch.dtype) -> None:
    if dtype is getattr(torch, name.removeprefix("to "), None):
        name = "neg"  # there is nothing to convert
    assert is_exact(kernel_of(name, dtype, (512, 1)))


@pytest.mark.parametrize("stride", [(0, 1), (1, 0), (1024, 1), (1, 256)])
def test_an_input_may_lie_in_any_way(stride: tuple[int, ...]) -> None:
    assert is_exact(kernel_of("mul", torch.bfloat16, stride))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=512, n_positions=512)),
    "Llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512},
            **{"num_attention_heads": 4, "num_key_value_heads": 2},
        )
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_to_the_same_bits_by_kernels_that_were_compared(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Group] = []
    run = Group.run

    def noted(self: Group, there: Any) -> Any:
        ran.append(self)
        return run(self, there)

    monkeypatch.setattr(Group, "run", noted)
    torch.manual_seed(0)
    model = MODELS[name]().to(GPU, torch.bfloat16)
    tokens = torch.randint(512, (8, 512), device=GPU)

    def step(seed: int, session: Session | None) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(seed)
        with session.step() if session is not None else torch.enable_grad():
            model(input_ids=tokens, labels=tokens).loss.backward()
        return [one.grad.clone() for one in model.parameters() if one.grad is not None]

    monkeypatch.setenv("TORCHSTORM_PLAN_NOW", "1")
    torch.use_deterministic_algorithms(True)
    try:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        expected = step(0, None)
        budget = before + (torch.cuda.max_memory_allocated() - before) * 6 // 10
        with Session(model, vram=budget, ram="256KiB") as session:
            for index in range(60):
                found, without = step(index % 3, session), expected if index % 3 == 0 else step(index % 3, None)
                assert all(map(torch.equal, found, without))
                if len(ran) > 8:
                    break
                time.sleep(0.05)  # the compiler runs beside
            assert session.usage().vram_bytes <= budget
    finally:
        torch.use_deterministic_algorithms(False)
    assert ran
    assert any(kernel.is_exact for kernel in compared._kernels.values())
