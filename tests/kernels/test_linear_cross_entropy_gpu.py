"""linear_cross_entropy on a GPU: right by the one tolerance rule, the same bits twice, in a fraction of the memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from close import assert_all_close, error_of
from kernels.mlstm_on_gpu import nan_wherever_nothing_is_written
from kernels.test_linear_cross_entropy import draw, results
from torchstorm.kernels import linear_cross_entropy
from torchstorm.kernels.linear_cross_entropy import chunks

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1, 1, 1), (0, 8, 16), (37, 24, 97), (1500, 64, 50257), (2600, 128, 4096))
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"softcap": 5.0, "label_smoothing": 0.1},
    {"reduction": "none", "softcap": 5.0, "label_smoothing": 0.1},
)


@pytest.fixture(autouse=True)
def _poisoned_and_cut_like_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    nan_wherever_nothing_is_written(monkeypatch)
    monkeypatch.setattr(chunks, "LEAST_BYTES", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(chunks, "LEAST_OPERATIONS", {"cpu": 0, "cuda": 0})


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, dtype) for shape in SHAPES for dtype in DTYPES if dtype != torch.float16 or shape in SHAPES[2:4]],
    ids=str,
)
@pytest.mark.parametrize("variant", ["naive", "chunked", "fused"])
def test_no_worse_than_pytorch(shape: tuple[int, int, int], variant: str, dtype: torch.dtype) -> None:
    tensors, target = draw(*shape, dtype, bias=True, ignored=7 if shape[0] != 1 else 2)
    if shape[0] == 1:
        target.zero_()
    tensors, target = {name: t.cuda() for name, t in tensors.items()}, target.cuda()
    for options in OPTIONS:
        found = results(tensors, target, dtype, variant, **options)
        again = results(tensors, target, dtype, variant, **options)
        for name, t in found.items():
            assert torch.equal(t, again[name]) or shape[0] == 0, f"{name} differs from run to run"
        truth = results(tensors, target, torch.float64, None, **options)
        theirs = results(tensors, target, dtype, None, **options)
        if shape[0] == 0 and options.get("reduction", "mean") == "mean":
            assert found.pop("loss").isnan()
            truth.pop("loss"), theirs.pop("loss")
        # Exponentials and logarithms have errors of two units in the last place, where PyTorch's may cancel.
        floor = max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float32).eps)
        # With one class everything cancels: of numbers near 1 nothing is left.
        scales = dict.fromkeys(found, 1.0) if shape[2] == 1 else None
        assert_all_close(found, truth, theirs, floor=floor, scales=scales)


def test_long_sums_of_few_tiles_are_in_fp32() -> None:
    """GPT-2's head: cuBLAS splits such sums, and adding up their parts in bfloat16 had more than twice the error."""
    tensors, target = draw(8192, 768, 50257, torch.bfloat16, ignored=8)
    tensors, target = {name: t.cuda() for name, t in tensors.items()}, target.cuda()
    found = results(tensors, target, torch.bfloat16, "fused")
    truth = results(tensors, target, torch.float64, None)
    for name in ("d_x", "d_weight"):
        error = error_of(found[name], truth[name])
        print(f"{name}: {error:.2e}")
        assert error < 4e-3  # three roundings: of the target's share, of the sum and of what scales it


def test_captured_in_a_cuda_graph() -> None:
    """Nothing waits for the GPU there, and tokens that do not count are computed with the others."""
    tensors, target = draw(8192, 768, 50257, torch.bfloat16, ignored=2)
    x, weight = (tensors[name].cuda() for name in ("x", "weight"))
    target = target.cuda()
    with torch.no_grad():
        expected = linear_cross_entropy(x, weight, target)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            linear_cross_entropy(x, weight, target)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = linear_cross_entropy(x, weight, target)
        graph.replay()
    torch.testing.assert_close(found, expected)


def test_more_than_sixteen_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "SPLIT_NUMEL", 0)  # as for a large weight
    tensors, target = draw(80000, 64, 128, torch.bfloat16)
    tensors, target = {name: t.cuda() for name, t in tensors.items()}, target.cuda()
    found = results(tensors, target, torch.bfloat16, "fused")
    truth = results(tensors, target, torch.float64, None)
    assert_all_close(found, truth, results(tensors, target, torch.bfloat16, None))


def test_on_a_cpu_and_on_a_gpu() -> None:
    tensors, target = draw(300, 32, 1000)
    on_cpu = results(tensors, target, torch.float32, "auto")
    on_gpu = results({name: t.cuda() for name, t in tensors.items()}, target.cuda(), torch.float32, "auto")
    torch.testing.assert_close({name: t.cpu() for name, t in on_gpu.items()}, on_cpu, rtol=1e-3, atol=1e-5)


def test_a_target_that_is_no_class_is_nan_alone() -> None:
    tensors, target = draw(20, 8, 30)
    x, weight = (tensors[name].cuda().requires_grad_() for name in ("x", "weight"))
    target[3], target[5] = 30, -1
    loss = linear_cross_entropy(x, weight, target.cuda(), reduction="none")
    (dx,) = torch.autograd.grad(loss.sum(), x)
    assert loss.isnan().nonzero().flatten().tolist() == [3, 5]
    assert dx.isnan().all(1).nonzero().flatten().tolist() == [3, 5]


def test_memory_is_an_eighth_of_eager_s() -> None:
    N, K, V = 16384, 1024, 65536
    x = torch.randn(N, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(V, K, device="cuda") * 0.02).bfloat16().requires_grad_()
    target = torch.randint(0, V, (N,), device="cuda")

    def peak(eager: bool) -> int:
        x.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if eager:
            loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight), target)
        else:
            loss = linear_cross_entropy(x, weight, target)
        loss.backward()
        return torch.cuda.max_memory_allocated() - before

    peak(False), peak(True)  # cuBLAS takes its workspace
    assert peak(False) <= peak(True) / 8


def test_compiled_with_inductor_without_a_break() -> None:
    tensors, target = draw(300, 32, 1000)
    leaves = [t.cuda().requires_grad_() for t in tensors.values()]
    target = target.cuda()
    compiled = torch.compile(lambda x, w: linear_cross_entropy(x * 2, w, target) * 3, fullgraph=True)
    found, expected = compiled(*leaves), linear_cross_entropy(leaves[0] * 2, leaves[1], target) * 3
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))
