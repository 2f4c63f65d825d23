"""Matrix products on a GPU: every rung right by the one tolerance rule, the same bits twice, nothing left unwritten."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from kernels.matmul_runs import SHAPES, assert_right, draw, strided
from torchstorm.errors import ConfigError, DeviceError
from torchstorm.kernels import matmul
from torchstorm.kernels.matmul.ladder import MATMUL
from torchstorm.kernels.matmul.wgmma import Config, matmul_wgmma, why_not
from torchstorm.kernels.variants import available

pytestmark = pytest.mark.gpu
RUNGS = [
    (variant.name, dtype)
    for variant in MATMUL
    for dtype in variant.dtypes or (torch.float32, torch.bfloat16, torch.float64)
    if "cuda" in variant.devices
    and (variant.name, dtype) != ("tensor-cores", torch.float32)
    and (variant.name != "cutlass" or find_spec("cutlass_library"))
]
IDS = [f"{name}-{str(dtype).removeprefix('torch.')}" for name, dtype in RUNGS]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = Tensor.new_empty
    monkeypatch.setattr(
        Tensor, "new_empty", lambda x, *size, **options: new_empty(x, *size, **options).fill_(torch.nan)
    )


def needs(variant: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    if variant not in [each.name for each in available(MATMUL, device, dtype)]:
        pytest.skip(f"{variant} does not run here")


@pytest.mark.parametrize(("variant", "dtype"), RUNGS, ids=IDS)
def test_sizes(variant: str, dtype: torch.dtype) -> None:
    needs(variant, dtype)
    more = {
        "tiles": ((512, 256), (256, 768)),
        "tiles and a bit": ((3, 300, 328), (3, 328, 264)),
        "fours": ((132, 72), (72, 140)),
    }
    for name, shapes in (SHAPES | more).items():
        print(name)  # shown where one fails
        assert_right(*draw(shapes, dtype, "cuda"), variant)


@pytest.mark.parametrize(("variant", "dtype"), RUNGS, ids=IDS)
@pytest.mark.parametrize("how", ["transposed", "sliced", "offset", "permuted"])
def test_strides(how: str, variant: str, dtype: torch.dtype) -> None:
    needs(variant, dtype)
    for shapes in (((3, 136, 72), (3, 72, 200)), ((3, 137, 53), (3, 53, 29))):
        a, b = draw(shapes, dtype, "cuda")
        assert_right(strided(a, how), b, variant)
        assert_right(a, strided(b, how), variant)
        assert_right(strided(a, how), strided(b, how), variant)


@pytest.mark.parametrize(("variant", "dtype"), RUNGS, ids=IDS)
def test_expanded_operands_padded_rows_and_many_batch_dimensions(variant: str, dtype: torch.dtype) -> None:
    needs(variant, dtype)

    def random(*size: int) -> Tensor:
        return torch.randn(size, device="cuda").to(dtype)

    assert_right(random(1, 64).expand(136, 64), random(64, 1).expand(64, 72), variant)
    assert_right(random(136, 80)[:, :70], random(70, 80)[:, :72], variant)
    a = random(2, 4, 3, 72, 40).transpose(0, 2)
    assert_right(a, random(3, 1, 2, 40, 64).expand(3, 4, 2, 40, 64), variant)


@pytest.mark.parametrize(("variant", "dtype"), RUNGS, ids=IDS)
def test_large(variant: str, dtype: torch.dtype) -> None:
    needs(variant, dtype)
    for M, N, K in ((2048, 2048, 2048), (4100, 2056, 1032)):
        assert_right(*draw(((M, K), (K, N)), dtype, "cuda"), variant)


@pytest.mark.parametrize("variant", ["naive", "coarsened", "tensor-cores"])
def test_more_batches_than_a_grid_has_rows(variant: str) -> None:
    a, b = draw(((70000, 3, 8), (70000, 8, 5)), torch.float16, "cuda")
    assert_right(a, b, variant)


@pytest.mark.parametrize(("variant", "dtype"), RUNGS, ids=IDS)
def test_nan_and_infinity_go_where_pytorch_lets_them_go(variant: str, dtype: torch.dtype) -> None:
    needs(variant, dtype)
    a, b = draw(((136, 72), (72, 200)), dtype, "cuda")
    a[1, 3], a[2, 71], b[0, 4], b[71, 199] = torch.nan, torch.inf, -torch.inf, torch.inf
    a[5] = 0
    mine, theirs = matmul(a, b, variant=variant), a @ b
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(test(mine), test(theirs))


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(("tile_n", "stages"), [(256, 4), (256, 3), (128, 6)])
def test_every_configuration_of_wgmma(tile_n: int, stages: int, cluster: int) -> None:
    needs("wgmma", torch.bfloat16)
    config = Config(tile_n=tile_n, stages=stages, cluster=cluster)
    for turned in (False, True):
        a, b = draw(((2, 1000, 520), (2, 520, 1304)), torch.bfloat16, "cuda")
        if turned:
            a, b = strided(a, "transposed"), strided(b, "transposed")
        assert not why_not(a, b)
        error = (matmul_wgmma(a, b, config=config).double() - a.double() @ b.double()).norm()
        theirs = ((a @ b).double() - a.double() @ b.double()).norm()
        assert error <= 2 * theirs


def test_tf32_only_where_it_is_allowed() -> None:
    a, b = draw(((136, 72), (72, 200)), torch.float32, "cuda")
    with pytest.raises(ConfigError, match="tf32"):
        matmul(a, b, variant="tensor-cores")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for turned in (False, True):
            x, y = (strided(z, "transposed") if turned else z for z in (a, b))
            found = matmul(x, y, variant="tensor-cores")
            torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=2e-3, atol=2e-2)
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_same_as_on_a_cpu() -> None:
    a, b = draw(((2, 65, 130), (130, 67)), torch.float32)
    there = matmul(a.cuda(), b.cuda(), variant="naive").cpu()
    torch.testing.assert_close(there, matmul(a, b, variant="naive"), rtol=1e-5, atol=1e-5)


def test_gradients_of_gradients_and_on_another_stream() -> None:
    a, b = (x.requires_grad_() for x in draw(((3, 4), (4, 5)), torch.float64, "cuda"))
    assert torch.autograd.gradgradcheck(matmul, (a, b))
    with torch.cuda.stream(torch.cuda.Stream()):
        x, y = draw(((1000, 3000), (3000, 1000)), torch.float32, "cuda")
        z = matmul(x, y, variant="coarsened") + 1
    torch.cuda.synchronize()
    torch.testing.assert_close(z, x @ y + 1, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("variant", ["coarsened", "tensor-cores", "wgmma"])
def test_captured_in_a_graph(variant: str) -> None:
    needs(variant, torch.bfloat16)
    a, b = draw(((264, 520), (520, 264)), torch.bfloat16, "cuda")
    matmul(a, b, variant=variant)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = matmul(a, b, variant=variant)
    a.copy_(torch.randn_like(a))
    graph.replay()
    assert torch.equal(c, matmul(a, b, variant=variant))


def test_compiled_without_a_break() -> None:
    torch.compiler.reset()
    a, b = draw(((264, 520), (520, 264)), torch.bfloat16, "cuda")
    for variant in ("coarsened", "auto"):
        compiled = torch.compile(lambda x, y, by=variant: matmul(x.relu(), y, variant=by).relu(), fullgraph=True)
        torch.testing.assert_close(compiled(a, b), matmul(a.relu(), b, variant=variant).relu())
    torch.compiler.reset()


def test_what_a_rung_does_not_take_is_reported() -> None:
    a, b = draw(((3, 4), (4, 5)), torch.float64, "cuda")
    with pytest.raises(
        DeviceError, match=r"takes float32, float16, bfloat16, not torch.float64\. Here there are 'cublas'"
    ):
        matmul(a, b, variant="naive")
    with pytest.raises(DeviceError, match="it runs on cpu, not on cuda"):
        matmul(a, b, variant="parallel")
