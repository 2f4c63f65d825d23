"""linear on a GPU: every variant right by the one tolerance rule, the same bits twice, nothing left unwritten."""

from __future__ import annotations

import pytest
import torch

from close import assert_all_close, assert_close
from kernels.mlstm_on_gpu import nan_wherever_nothing_is_written
from kernels.test_linear import ACTIVATIONS, draw, results
from torchstorm.errors import DeviceError, ShapeError
from torchstorm.kernels import linear, variants
from torchstorm.kernels.linear.function import LADDER, Activation
from torchstorm.kernels.linear.op import linear_backward, linear_forward
from torchstorm.kernels.linear.wgmma import FIRST_ROWS
from torchstorm.kernels.variants import available

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1, 1, 1), (37, 24, 40), (130, 65, 257), (300, 512, 264))  # few enough for ReLU to find no z near 0


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    nan_wherever_nothing_is_written(monkeypatch)


def here(dtype: torch.dtype) -> list[str]:
    return [variant.name for variant in available(LADDER, torch.device("cuda"), dtype)]


# What an activation is made of is float32 whatever the dtype: each in one, and one in each.
@pytest.mark.parametrize(
    ("dtype", "activation"),
    [(torch.bfloat16, activation) for activation in ACTIVATIONS]
    + [(dtype, "gelu") for dtype in DTYPES if dtype != torch.bfloat16],
)
@pytest.mark.parametrize("variant", [name for name in variants("linear") if name != "mixed"] + ["auto"])
def test_no_worse_than_pytorch(variant: str, dtype: torch.dtype, activation: Activation | None) -> None:
    if variant not in (*here(dtype), "auto"):
        with pytest.raises(DeviceError, match=f"variant='{variant}' of linear"):
            linear(**{name: t.cuda() for name, t in draw(8, 8, 8, dtype).items()}, variant=variant)
        return
    for M, K, N in SHAPES:
        for bias in (True, False):
            tensors = {name: t.cuda() for name, t in draw(M, K, N, dtype, bias=bias).items()}
            if variant == "persistent" and (K % 8 or N % 8):
                with pytest.raises(ShapeError, match="'persistent' needs K and N"):
                    linear(**tensors, variant=variant)
                continue
            found = results(tensors, activation, variant)
            again = results(tensors, activation, variant)
            for name, t in found.items():
                assert torch.equal(t, again[name]), f"{name} differs from run to run"
            truth = results(tensors, activation, None, torch.float64)
            theirs = results(tensors, activation, None)
            # Triton's erf and exp have errors of a few units in fp32's last place.
            floor = max(torch.finfo(dtype).eps, 16 * torch.finfo(torch.float32).eps)
            assert_all_close(found, truth, theirs, floor=floor)
            with torch.no_grad():
                alone = linear(**tensors, activation=activation, variant=variant)
            assert_close(alone, truth["y"], theirs["y"], floor=floor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_idle_warps_do_beside_many_tiles(activation: Activation | None, dtype: torch.dtype) -> None:
    """Rows and columns that are no whole tiles, dz of rows beyond the first, more tiles than blocks."""
    if "wgmma" not in here(dtype):
        with pytest.raises(DeviceError, match="variant='wgmma' of linear"):
            linear(**{name: t.cuda() for name, t in draw(8, 8, 8, dtype).items()}, variant="wgmma")
        return
    for M, K, N in ((FIRST_ROWS + 130, 520, 1032), (2 * FIRST_ROWS, 512, 2048), (FIRST_ROWS + 1, 72, 24)):
        tensors = {name: t.cuda() for name, t in draw(M, K, N, dtype).items()}
        if activation == "relu":  # away from 0, where a rounding more or less makes another gradient
            tensors["bias"] = torch.where(tensors["bias"] > 0, 8.0, -8.0).to(dtype)
        found = results(tensors, activation, "wgmma")
        again = results(tensors, activation, "wgmma")
        assert all(torch.equal(t, again[name]) for name, t in found.items())
        truth = results(tensors, activation, None, torch.float64)
        theirs = results(tensors, activation, None)
        assert_all_close(found, truth, theirs, floor=torch.finfo(dtype).eps)
        with torch.no_grad():
            assert torch.equal(linear(**tensors, activation=activation, variant="wgmma"), found["y"])


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mixed(activation: Activation | None, x_dtype: torch.dtype) -> None:
    tensors = {name: t.cuda() for name, t in draw(1000, 256, 384).items()}
    tensors["x"] = tensors["x"].to(x_dtype)
    found = results(tensors, activation, "mixed")
    assert found["d_weight"].dtype == torch.float32
    assert found["y"].dtype == x_dtype
    truth = results(tensors, activation, None, torch.float64)
    theirs = results(tensors, activation, None, torch.bfloat16)
    assert_all_close(found, truth, theirs, floor=torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("variant", ["naive", "fused", "cublaslt"])
def test_no_rows_no_features_no_outputs(variant: str) -> None:
    for M, K, N in ((0, 8, 8), (8, 0, 8), (8, 8, 0)):
        tensors = {name: t.cuda() for name, t in draw(M, K, N).items()}
        torch.testing.assert_close(results(tensors, "gelu", variant), results(tensors, "gelu", None))


@pytest.mark.parametrize("variant", ["naive", "fused", "persistent", "cublaslt", "wgmma"])
def test_any_strides(variant: str) -> None:
    tensors = {name: t.cuda() for name, t in draw(128, 64, 256, torch.bfloat16).items()}
    plain = results(tensors, "silu", variant)
    other = tensors | {
        "x": tensors["x"].mT.contiguous().mT,
        "weight": torch.cat([tensors["weight"]] * 2, 1)[:, : tensors["weight"].shape[1]],
    }
    assert_all_close(results(other, "silu", variant), {name: t.double() for name, t in plain.items()})


def test_nan_and_infinity_pass_as_in_pytorch() -> None:
    x = torch.tensor([[float("nan")], [float("inf")], [-float("inf")], [1e30], [-1e30], [0.0]], device="cuda")
    for activation in ACTIVATIONS:
        tensors = {"x": x, "weight": torch.ones(1, 1, device="cuda"), "bias": torch.zeros(1, device="cuda")}
        for variant in ("naive", "fused", "cublaslt"):
            found, theirs = (results(tensors, activation, name) for name in (variant, None))
            for name in ("y", "d_x"):
                mine, other = found[name].isnan(), theirs[name].isnan()
                assert torch.equal(mine[~x.isfinite()], other[~x.isfinite()]), (activation, variant, name)
                # PyTorch's gradient of tanh GELU is NaN from where x^3 overflows, and ours 0 or dy.
                assert not (mine & ~other).any(), (activation, variant, name)


@pytest.mark.parametrize("variant", ["fused", "cublaslt"])
def test_opcheck(variant: str) -> None:
    leaves = [t.cuda().requires_grad_() for t in draw(16, 24, 32).values()]
    torch.library.opcheck(linear_forward, (*leaves, "gelu", True, variant))
    given = [torch.randn(16, 32, device="cuda"), *(t.detach() for t in leaves), torch.randn(16, 32, device="cuda")]
    torch.library.opcheck(linear_backward, (*given, "gelu", True, True, True, variant))


def test_compiled_with_inductor_without_a_break() -> None:
    leaves = [t.cuda().requires_grad_() for t in draw(64, 48, 96, torch.bfloat16).values()]
    compiled = torch.compile(lambda *given: linear(*given, activation="gelu", variant="cublaslt") * 2, fullgraph=True)
    found, expected = compiled(*leaves), linear(*leaves, activation="gelu", variant="cublaslt") * 2
    assert torch.equal(found, expected)
    for one, other in zip(*(torch.autograd.grad(y.sum(), leaves) for y in (found, expected)), strict=True):
        assert torch.equal(one, other)


def test_on_a_cpu_and_on_a_gpu() -> None:
    tensors = draw(100, 64, 96)
    on_cpu = results(tensors, "gelu", "auto")
    on_gpu = results({name: t.cuda() for name, t in tensors.items()}, "gelu", "auto")
    torch.testing.assert_close({name: t.cpu() for name, t in on_gpu.items()}, on_cpu, rtol=1e-3, atol=1e-4)


def test_gradients_of_gradients() -> None:
    leaves = [t.cuda().requires_grad_() for t in draw(3, 4, 5, torch.float32).values()]
    found = []
    for variant in ("cublaslt", "torch"):
        (dx,) = torch.autograd.grad(
            linear(*leaves, activation="gelu", variant=variant).square().sum(), leaves[0], create_graph=True
        )
        found.append(torch.autograd.grad(dx.square().sum(), leaves))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_auto_takes_rows_that_begin_anywhere() -> None:
    """Large enough to be ours: x's rows begin at odd multiples of 2 bytes, and TMA needs 16."""
    for M, N in ((4096, 4096), (16384, 8192)):  # the second is wgmma's, if not for where rows begin
        x = torch.randn(M, 1 + 4096, device="cuda", dtype=torch.bfloat16)[:, 1:].detach().requires_grad_()
        weight = torch.randn(N, 4096, device="cuda", dtype=torch.bfloat16) / 64
        y = linear(x, weight, activation="gelu")
        same = x.detach().contiguous().requires_grad_()
        assert torch.equal(y, linear(same, weight, activation="gelu", variant="persistent"))
        y.sum().backward()
