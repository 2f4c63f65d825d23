"""linear on a CPU: as right as PyTorch, gradients of gradients, what it keeps, and the rules of operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from close import assert_all_close
from torchstorm.errors import ConfigError, DeviceError, ShapeError
from torchstorm.kernels import linear, variants
from torchstorm.kernels.linear.function import LADDER, Activation
from torchstorm.kernels.linear.op import linear_backward, linear_forward
from torchstorm.kernels.linear.wgmma import FIRST_ROWS, dx_and_sums
from torchstorm.kernels.matmul.wgmma import why_not

ON_CPU = ("fused", "torch")
ACTIVATIONS: tuple[Activation | None, ...] = (None, "relu", "gelu", "gelu_tanh", "silu")
PLAIN: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def draw(M: int, K: int, N: int, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> dict[str, Tensor]:
    tensors = {"x": torch.randn(M, K), "weight": torch.randn(N, K) * max(K, 1) ** -0.5}
    tensors |= {"bias": torch.randn(N)} if bias else {}
    return {name: t.to(dtype) for name, t in tensors.items()}


def results(
    tensors: dict[str, Tensor], activation: Activation | None, variant: str | None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """y and all gradients, for a dy that is the same every time; by PyTorch's own where there is no variant."""
    leaves = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in tensors.items()}
    if variant is None:
        y = PLAIN[activation](F.linear(**{"input" if name == "x" else name: t for name, t in leaves.items()}))
    else:
        y = linear(**leaves, activation=activation, variant=variant)
    dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).sin().view(y.shape).to(y)
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach(), **{f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_worse_than_pytorch(activation: Activation | None, dtype: torch.dtype) -> None:
    tensors = draw(37, 19, 23, dtype)
    truth = results(tensors, activation, None, torch.float64)
    theirs = results(tensors, activation, None)
    for variant in ON_CPU:
        found = results(tensors, activation, variant)
        assert found["y"].dtype == dtype
        assert_all_close(found, truth, theirs)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.sampled_from(ACTIVATIONS), st.booleans(), st.booleans()
)
def test_any_shape(M: int, K: int, N: int, activation: Activation | None, bias: bool, transposed: bool) -> None:
    torch.manual_seed(0)
    tensors = draw(M, K, N, torch.float64, bias=bias)
    expected = results(tensors, activation, None)
    if transposed:
        tensors = {name: t.mT.contiguous().mT if t.dim() == 2 else t for name, t in tensors.items()}
    for variant in ON_CPU:
        torch.testing.assert_close(results(tensors, activation, variant), expected)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_mixed(x_dtype: torch.dtype) -> None:
    """The inputs' rounding to bfloat16 counts as PyTorch's does; the weight's gradient is not rounded again."""
    tensors = draw(64, 32, 48)
    tensors["x"] = tensors["x"].to(x_dtype)
    for activation in ACTIVATIONS:
        found = results(tensors, activation, "mixed")
        truth = results(tensors, activation, None, torch.float64)
        theirs = results(tensors, activation, None, torch.bfloat16)
        assert {name: t.dtype for name, t in found.items()} == {
            "y": x_dtype,
            "d_x": x_dtype,
            "d_weight": torch.float32,
            "d_bias": torch.float32,
        }
        assert_all_close(found, truth, theirs, floor=torch.finfo(torch.bfloat16).eps)
    rounded = {name: t.bfloat16().float() for name, t in tensors.items()}
    exact = results(rounded, None, None, torch.float64)["d_weight"]
    given = results({name: t if name != "x" else t.bfloat16() for name, t in rounded.items()}, None, "mixed")
    assert float((given["d_weight"] - exact).norm() / exact.norm()) < 3e-3  # dy's own rounding
    if x_dtype == torch.bfloat16:
        assert torch.equal(linear(**tensors), linear(**tensors, variant="mixed"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_gradients(activation: Activation | None) -> None:
    leaves = [t.requires_grad_() for t in draw(3, 4, 5, torch.float64).values()]
    for variant in ON_CPU:

        def compute(*given: Tensor, variant: str = variant) -> Tensor:
            return linear(*given, activation=activation, variant=variant)

        assert torch.autograd.gradcheck(compute, leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(compute, leaves, fast_mode=True)


def test_nan_and_infinity_pass_as_in_pytorch() -> None:
    x = torch.tensor([[float("nan")], [float("inf")], [-float("inf")], [1e30], [-1e30], [0.0], [-0.0]])
    for activation in ACTIVATIONS:
        tensors = {"x": x, "weight": torch.ones(1, 1), "bias": torch.zeros(1)}
        found, theirs = (results(tensors, activation, variant) for variant in ("fused", None))
        torch.testing.assert_close(found, theirs, equal_nan=True)


def test_only_gradients_that_are_wanted_are_made() -> None:
    tensors = draw(8, 4, 6)
    for names in (("x",), ("weight",), ("bias",), ("x", "weight")):
        for name, t in tensors.items():
            t.requires_grad_(name in names)
        leaves = [tensors[name] for name in names]
        with FlopCounterMode(display=False) as counter:
            y = linear(**tensors, activation="gelu", variant="fused")
            grads = torch.autograd.grad(y.sum(), leaves)
        assert counter.get_total_flops() == (1 + ("x" in names) + ("weight" in names)) * 2 * 8 * 4 * 6
        theirs = torch.autograd.grad(linear(**tensors, activation="gelu", variant="torch").sum(), leaves)
        torch.testing.assert_close(grads, theirs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_keeps_the_pre_activation_for_gelu_and_silu_the_output_for_relu_and_else_nothing(
    activation: Activation | None,
) -> None:
    tensors = draw(8, 4, 6)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = linear(**leaves, activation=activation, variant="fused")
    large = [t for t in kept if t.shape == y.shape]
    assert len(large) == (activation is not None)
    if activation == "relu":
        assert large[0].data_ptr() == y.data_ptr()
    elif activation is not None:
        torch.testing.assert_close(large[0], F.linear(*(t.detach() for t in leaves.values())))
    with torch.no_grad():
        assert linear_forward(*leaves.values(), activation or "", False, "fused")[1].numel() == 0


def test_leading_dimensions_and_expanded_inputs() -> None:
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(1).expand(5)
    for variant in ON_CPU:
        y = linear(x, weight, bias, activation="silu", variant=variant)
        torch.testing.assert_close(y, F.silu(F.linear(x, weight, bias)))
        assert torch.equal(linear(x[0, 0], weight, variant=variant), F.linear(x[0, 0], weight))
        assert linear(x.expand(7, 2, 3, 4)[:, :, :0], weight, variant=variant).shape == (7, 2, 0, 5)


@pytest.mark.no_cover
@pytest.mark.parametrize("activation", ["", "relu", "gelu", "silu"])
def test_opcheck(activation: str) -> None:
    leaves = [t.requires_grad_() for t in draw(3, 4, 5).values()]
    torch.library.opcheck(linear_forward, (*leaves, activation, True, "fused"))
    kept = torch.randn(3, 5) if activation else torch.empty(0)
    given = torch.randn(3, 5, requires_grad=True), *leaves, kept
    torch.library.opcheck(linear_backward, (*given, activation, True, True, True, "fused"))
    torch.library.opcheck(linear_backward, (*(t.detach() for t in given), activation, True, False, False, "fused"))


@pytest.mark.parametrize("variant", ["fused", "auto"])
def test_compiled_without_a_break_and_not_again_for_other_rows(variant: str) -> None:
    torch.compiler.reset()
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")

    def compute(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear(x, weight, bias, activation="gelu", variant=variant) * 2

    compiled = torch.compile(compute, backend=counter, fullgraph=True)
    for M in (3, 10, 77, 200):
        leaves = [t.requires_grad_() for t in draw(M, 4, 6).values()]
        found, expected = compiled(*leaves), compute(*leaves)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), leaves) for y in (found, expected)))
    assert counter.frame_count <= 2  # the first number of rows, then any
    assert not counters["graph_break"]
    torch.compiler.reset()


def test_same_bits_twice_and_under_autocast() -> None:
    leaves = [t.requires_grad_() for t in draw(70, 16, 50).values()]
    for variant in ON_CPU:
        expected = linear(*leaves, activation="gelu", variant=variant)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = linear(*leaves, activation="gelu", variant=variant)
        assert torch.equal(found, expected)
        for one, other in zip(*(torch.autograd.grad(y.sum(), leaves) for y in (found, expected)), strict=True):
            assert torch.equal(one, other)


def test_shapes_are_known_without_data() -> None:
    tensors = {name: t.to("meta") for name, t in draw(3, 4, 5).items()}
    for variant in ("fused", "mixed", "torch"):
        y = linear(**tensors, activation="gelu", variant=variant)
        assert (y.shape, y.dtype, y.device.type) == ((3, 5), torch.float32, "meta")


def test_errors_say_what_was_given_and_what_there_is() -> None:
    x, weight, bias = draw(3, 4, 5).values()
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ((x, weight.mT), {}, r"x \(3, 4\), weight \(4, 5\).*weight.mT"),
        ((x, weight, bias[:4]), {}, r"bias \(4,\).*must be \(5,\)"),
        ((x, weight.to("meta")), {}, r"x on cpu, weight on meta"),
        ((x.half(), weight), {}, r"x torch.float16, weight torch.float32.*'mixed'"),
        ((x.int(), weight.int()), {}, r"x torch.int32"),
        ((x, weight.bfloat16()), {"variant": "mixed"}, r"x torch.float32, weight torch.bfloat16.*'mixed'"),
    ]
    for arguments, options, message in wrong:
        with pytest.raises(ShapeError, match=message):
            linear(*arguments, **options)
    with pytest.raises(ConfigError, match=r"activation='swish'.*'relu', 'gelu', 'gelu_tanh', 'silu' and None"):
        linear(x, weight, activation=cast(Any, "swish"))
    with pytest.raises(ConfigError, match=r"variant='cutlass', but linear has 'naive', 'fused'.*'torch' and 'auto'"):
        linear(x, weight, variant="cutlass")
    for variant in ("naive", "persistent", "cublaslt", "wgmma"):
        with pytest.raises(DeviceError, match=rf"'{variant}' of linear.*'fused', 'mixed', 'torch' and 'auto'"):
            linear(x, weight, variant=variant)
    with pytest.raises(DeviceError, match=r"takes float32, bfloat16, not torch.float64"):
        linear(x.double(), weight, variant="mixed")
    assert variants("linear") == ("naive", "fused", "persistent", "mixed", "cublaslt", "wgmma", "torch")


def test_a_cpu_needs_no_triton(uninstall: Callable[[str], None]) -> None:
    uninstall("triton")
    x, weight = torch.randn(4, 6), torch.randn(3, 6)
    assert torch.equal(linear(x, weight, variant="fused"), linear(x, weight))
    rounded = linear(x.bfloat16(), weight.bfloat16())
    assert torch.equal(linear(x.bfloat16(), weight), rounded)
    with pytest.raises(
        DeviceError, match=r"'naive' of linear: it runs on cuda, not on cpu\. Here there are 'fused', 'mix"
    ):
        linear(x, weight, variant="naive")


def test_one_column_is_no_row_of_whole_16_bytes() -> None:
    """dz (M, 1) is fit for the copy engine, as M lies without gaps, but not for warps that write 16 bytes of a row."""
    column = torch.ones(FIRST_ROWS + 1, 1, dtype=torch.bfloat16)
    weight = torch.ones(1, 64, dtype=torch.bfloat16)
    assert not why_not(column, weight)
    assert dx_and_sums(column, column, weight, "silu", wants_sums=True) is None


def test_what_came_after_hopper_has_no_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    (found,) = (variant for variant in LADDER if variant.name == "wgmma")
    found = replace(found, needs=())
    assert "exactly (9, 0)" in found.why_not(torch.device("cuda", 0), torch.bfloat16)
