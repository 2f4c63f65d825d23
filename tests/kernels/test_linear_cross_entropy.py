"""linear_cross_entropy on a CPU: right as PyTorch is, in a fraction of the memory, by the rules of operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from close import assert_all_close
from torchstorm.errors import ConfigError, DeviceError, ShapeError, UnsupportedError
from torchstorm.kernels import linear_cross_entropy, variants
from torchstorm.kernels.linear_cross_entropy import chunks, function
from torchstorm.kernels.linear_cross_entropy.chunks import Wanted
from torchstorm.kernels.linear_cross_entropy.op import linear_cross_entropy_backward, linear_cross_entropy_forward
from torchstorm.kernels.linear_cross_entropy.reference import Reduction
from torchstorm.kernels.linear_cross_entropy.rows_torch import Options

ON_CPU = ("naive", "chunked")
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(autouse=True)
def _chunks_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small logits are cut like large ones, and rows made as long as on a GPU."""
    monkeypatch.setattr(chunks, "LEAST_BYTES", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(chunks, "ROW_BYTES", {"cpu": 16, "cuda": 16})


def draw(
    N: int, K: int, V: int, dtype: torch.dtype = torch.float32, *, bias: bool = False, ignored: int = 7
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors by name, and targets, every seventh of which is ignored."""
    tensors = {"x": torch.randn(N, K), "weight": torch.randn(V, K) * 2 * max(K, 1) ** -0.5}
    tensors |= {"bias": torch.randn(V)} if bias else {}
    target = torch.randint(0, V, (N,))
    target[::ignored] = -100
    return {name: t.to(dtype) for name, t in tensors.items()}, target


def results(
    tensors: dict[str, Tensor], target: Tensor, dtype: torch.dtype, variant: str | None, **options: Any
) -> dict[str, Tensor]:
    """The loss and its gradients; of PyTorch's own in the dtype where there is no variant."""
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in tensors.items()}
    if variant is None:
        loss = plainly(leaves["x"], leaves["weight"], target, bias=leaves.get("bias"), **options)
    else:
        loss = linear_cross_entropy(target=target, variant=variant, **leaves, **options)
    d_loss = torch.linspace(0.5, 2.0, loss.numel()).view(loss.shape).to(loss)
    grads = torch.autograd.grad(loss, list(leaves.values()), d_loss)
    return {"loss": loss.detach(), **{f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def plainly(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    **options: Any,
) -> Tensor:
    logits = F.linear(x, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)
    return loss.view(target.shape) if options.get("reduction") == "none" else loss


def check(tensors: dict[str, Tensor], target: Tensor, variant: str, **options: Any) -> None:
    dtype = tensors["x"].dtype
    found = results(tensors, target, dtype, variant, **options)
    truth = results(tensors, target, torch.float64, None, **options)
    theirs = results(tensors, target, dtype, None, **options)
    assert found["loss"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # A mean is one number, which PyTorch may happen to have exactly.
    assert_all_close(found, truth, theirs, floor=torch.finfo(dtype).eps * (4 if dtype.itemsize > 2 else 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", ON_CPU)
def test_no_worse_than_pytorch(variant: str, dtype: torch.dtype) -> None:
    tensors, target = draw(300, 17, 101, dtype, bias=True)
    for reduction in ("mean", "sum", "none"):
        check(tensors, target, variant, reduction=reduction)
        check(tensors, target, variant, reduction=reduction, softcap=3.0, label_smoothing=0.1)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 300),
    st.integers(0, 9),
    st.integers(1, 40),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from([None, 0.5, 30.0]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.booleans(),
    st.integers(1, 5),
)
def test_any_shape_and_options(
    N: int,
    K: int,
    V: int,
    reduction: Reduction,
    softcap: float | None,
    smoothing: float,
    bias: bool,
    ignored: int,
) -> None:
    torch.manual_seed(0)
    tensors, target = draw(N, K, V, torch.float64, bias=bias, ignored=ignored)
    options: dict[str, Any] = {"reduction": reduction, "softcap": softcap, "label_smoothing": smoothing}
    found = results(tensors, target, torch.float64, "chunked", **options)
    # PyTorch divides none by none where no token counts, as here.
    torch.testing.assert_close(found, results(tensors, target, torch.float64, None, **options), equal_nan=True)


@pytest.mark.parametrize("N", [0, 5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_token_counts(N: int, smoothing: float) -> None:
    tensors, target = draw(N, 4, 6, bias=True, ignored=1)
    options: dict[str, Any] = {"label_smoothing": smoothing}
    found, theirs = (results(tensors, target, torch.float32, variant, **options) for variant in ("chunked", None))
    assert found["loss"].isnan()
    assert theirs["loss"].isnan()
    for name in ("d_x", "d_weight", "d_bias"):
        assert torch.equal(found[name], torch.zeros_like(found[name]))
        assert torch.equal(theirs[name], found[name])


def test_any_strides_and_leading_dimensions() -> None:
    x, weight = torch.randn(4, 7, 5), torch.randn(5, 11)
    target = torch.randint(0, 11, (7, 4)).mT
    plain = results({"x": x, "weight": weight.mT.contiguous()}, target.contiguous(), torch.float32, "chunked")
    leaves = x.mT.contiguous().mT.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(leaves[0], leaves[1].mT, target)
    dx, dw = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close((loss, dx / 2, dw.mT / 2), (plain["loss"], plain["d_x"], plain["d_weight"]))
    expanded = torch.randn(1, 5).expand(11, 5)
    assert torch.equal(linear_cross_entropy(x, expanded, target), linear_cross_entropy(x, expanded.clone(), target))
    one = linear_cross_entropy(x[0, 0], weight.mT, target[0, 0], reduction="none")
    assert one.shape == ()
    torch.testing.assert_close(one, plainly(x[:1, 0], weight.mT, target[0, :1]))


def test_many_chunks_of_bfloat16() -> None:
    """More than 16, so that dweight is kept in float32 between them."""
    check(*draw(2300, 8, 20, torch.bfloat16), "chunked", reduction="sum")
    check(*draw(20000, 3, 5, torch.bfloat16), "chunked")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_large_weight_s_gradient_is_kept_in_bfloat16(monkeypatch: pytest.MonkeyPatch, reduction: str) -> None:
    monkeypatch.setattr(chunks, "SPLIT_NUMEL", 0)
    check(*draw(1000, 8, 20, torch.bfloat16, bias=True), "chunked", reduction=reduction)


def test_float16_keeps_the_gradients_of_a_mean_over_many_tokens() -> None:
    tensors, target = draw(4096, 4, 1000, torch.float16)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    loss = linear_cross_entropy(target=target, **leaves)
    dx = torch.autograd.grad(loss * 65536, leaves["x"])[0]
    wide = leaves["x"].detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(plainly(wide, leaves["weight"].double(), target) * 65536, wide)
    assert float((dx.double() - truth).norm() / truth.norm()) < 2e-3


def test_only_gradients_that_are_wanted_are_made() -> None:
    tensors, target = draw(40, 4, 6, bias=True)
    count = {"x": 2, "weight": 2, "bias": 1}
    for names in ((), ("x",), ("weight",), ("bias",), ("x", "weight")):
        for name, t in tensors.items():
            t.requires_grad_(name in names)
        with FlopCounterMode(display=False) as counter:
            loss = linear_cross_entropy(target=target, **tensors)
        products = 1 + sum(count[name] - 1 for name in names)
        assert counter.get_total_flops() == products * 2 * 40 * 4 * 6
        if names:
            grads = torch.autograd.grad(loss, [tensors[name] for name in names])
            expected = torch.autograd.grad(plainly(target=target, **tensors), [tensors[name] for name in names])
            torch.testing.assert_close(grads, expected)
    with torch.no_grad():
        *_, dx, dweight, dbias, _ = linear_cross_entropy_forward(
            *(tensors[name] for name in ("x", "weight", "bias")),
            target,
            -100,
            0.0,
            None,
            "mean",
            *[False] * 3,
            "chunked",
        )
    assert dx.numel() == dweight.numel() == dbias.numel() == 0


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """PyTorch's products without that library's, which on some processors copy what they are given."""
    torch._C._set_mkldnn_enabled(False)  # `torch.backends.mkldnn.flags` warns
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def peak_bytes(tensors: dict[str, Tensor], target: Tensor, variant: str | None, reduction: str) -> tuple[int, int]:
    """Of one forward and backward pass: the most allocated at once, and the largest single allocation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        results(tensors, target, tensors["x"].dtype, variant, reduction=reduction)
    sizes = [
        event.nbytes() for event in found.profiler.kineto_results.events() if event.name() == "[memory]"  # type: ignore[union-attr]
    ]  # fmt: skip
    now = most = 0
    for size in sizes:
        now += size
        most = max(most, now)
    return most, max(sizes)


class _NoSoftmax:
    """In place of the Triton kernel, which allocates nothing either."""

    @staticmethod
    def losses(
        logits: Tensor, V: int, target: Tensor, options: Options, loss: Tensor, lse: Tensor, scale: Tensor | None
    ) -> None:
        loss.zero_()


@pytest.mark.no_cover
@pytest.mark.parametrize("ignored", [8, 10**6])
@pytest.mark.parametrize(("N", "K", "V"), [(32768, 4096, 131072), (8192, 768, 50257)])
def test_an_eighth_of_the_memory_at_full_size(
    monkeypatch: pytest.MonkeyPatch, N: int, K: int, V: int, ignored: int
) -> None:
    """All sizes by 32, which leaves their ratios; chunks as on a GPU, and a kernel that allocates nothing."""
    N, K, V = N // 32, K // 32, V // 32
    monkeypatch.setattr(chunks, "ROWS", {"cpu": (1024 // 32, 4096 // 32)})
    monkeypatch.setattr(chunks, "ROWS_STEP", chunks.ROWS_STEP // 32)
    monkeypatch.setattr(chunks, "SPLIT_NUMEL", chunks.SPLIT_NUMEL // 32**2)
    tensors, target = draw(N, K, V, torch.bfloat16, ignored=ignored)
    theirs, _ = peak_bytes(tensors, target, None, "mean")
    monkeypatch.setattr(chunks, "_softmax", lambda variant: _NoSoftmax)

    def ours(x: Tensor, weight: Tensor, target: Tensor, **_: Any) -> Tensor:
        options = -100, 0.0, None, "mean", True, True, False
        return cast(Tensor, linear_cross_entropy_forward(x, weight, None, target, *options, "fused")[0])

    monkeypatch.setitem(globals(), "plainly", ours)
    with without_mkldnn():
        most, _ = peak_bytes(tensors, target, None, "mean")
    most += 4 * K * min(N // 8, 4096 // 32)  # a chunk's dx in float32, on a GPU
    print(f"{N} x {K} x {V}: {most / theirs:.4f}")
    assert most <= theirs / 8


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_never_exist_whole(dtype: torch.dtype, reduction: str) -> None:
    N, K, V = 4096, 8, 512
    tensors, target = draw(N, K, V, dtype)
    with without_mkldnn():
        most, largest = peak_bytes(tensors, target, "chunked", reduction)
        theirs, their_largest = peak_bytes(tensors, target, None, reduction)
    assert their_largest == N * V * dtype.itemsize
    assert largest <= N * V * 4 / 8
    # The softmax of a chunk in PyTorch takes several times the chunk, in float32 whatever the dtype.
    assert most <= theirs * (0.25 if dtype == torch.float32 else 0.5), (most, theirs)


def test_small_logits_are_not_cut_and_large_ones_not_below_a_thousand_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def rows(N: int, V: int, device: str = "meta", gradients: bool = True) -> int:
        return chunks.chunk_rows(N, V, torch.empty(0, dtype=torch.bfloat16, device=device), gradients=gradients)

    assert rows(500, 1000) == 500
    assert [rows(N, 100_000) for N in (0, 100, 2000, 4096, 100_000)] == [1, 100, 256, 512, 1024]
    assert rows(100_000, 50_000, gradients=False) == 1024  # the most on a CPU
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    assert [rows(N, 131_072, "cpu") for N in (1000, 8192, 32_768, 1_000_000)] == [1000, 1024, 4096, 4096]
    assert [rows(N, 131_072, "cpu", gradients=False) for N in (8192, 32_768)] == [1024, 2048]


class Products(TorchDispatchMode):
    """The sizes of all matrix products, as (rows, sums, columns)."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.__name__:
            a, b = args[-2:]
            self.sizes.append((*a.shape, b.shape[1]))
        return func(*args, **(kwargs or {}))


def test_products_have_full_rows_and_no_tokens_that_do_not_count() -> None:
    tensors, target = draw(700, 13, 101, bias=True, ignored=2)
    options, given = Options(ignore_index=-100, label_smoothing=0.0, softcap=None), tuple(tensors.values())
    with Products() as products:
        chunks.forward(*given, target, options, Wanted(True, True, True), torch.ones(()), "chunked")
    of_chunks = [{(n, 16, 104), (n, 104, 16), (104, n, 16)} for n in (128, 94)]
    assert set(products.sizes) == of_chunks[0] | of_chunks[1], "350 tokens count"
    again = products.sizes.copy()
    with products:
        no_lse = torch.empty(0)
        chunks.backward(torch.ones(700), *given, target, no_lse, options, Wanted(True, True, True), "chunked")
    assert products.sizes == again * 2


def test_what_a_token_that_does_not_count_holds_is_nobody_s_affair() -> None:
    tensors, target = draw(700, 13, 101, ignored=2)
    tensors["x"][::2] = float("nan")
    found = results(tensors, target, torch.float32, "chunked")
    tensors["x"][::2] = 0.0
    expected = results(tensors, target, torch.float32, None)
    torch.testing.assert_close(found, expected)


def test_auto_on_a_cpu_is_plain_for_few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    chosen: list[str] = []

    def noted(*arguments: Any) -> Any:
        chosen.append(arguments[-1])
        return linear_cross_entropy_forward(*arguments)

    monkeypatch.setattr(function, "linear_cross_entropy_forward", noted)
    for N, V, dtype in ((4096, 256, torch.float32), (2000, 5000, torch.float32), (16, 100, torch.float16)):
        tensors, target = draw(N, 4, V, dtype)
        found = linear_cross_entropy(target=target, **tensors)
        torch.testing.assert_close(found, plainly(target=target, **tensors).float(), rtol=2e-3, atol=0)
    assert chosen == ["chunked"] * 2, "of the last two"


def test_gradients_of_gradients_are_refused_or_right() -> None:
    tensors, target = draw(6, 3, 5, torch.float64, bias=True)
    leaves = [t.requires_grad_() for t in tensors.values()]
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(leaves[0], leaves[1], target, reduction=cast(Reduction, reduction)).sum()
        with pytest.raises(UnsupportedError, match=r"create_graph=True.*variant='naive'"):
            torch.autograd.grad(loss, leaves[0], create_graph=True)

    def compute(variant: str) -> Any:
        return lambda x, weight, bias: linear_cross_entropy(
            x, weight, target, bias=bias, variant=variant, softcap=2.0, label_smoothing=0.1
        )

    assert torch.autograd.gradcheck(compute("chunked"), leaves)
    assert torch.autograd.gradgradcheck(compute("naive"), leaves)


def test_backward_twice_and_scaled() -> None:
    tensors, target = draw(20, 4, 6)
    leaves = [t.requires_grad_() for t in tensors.values()]
    loss = linear_cross_entropy(*leaves, target)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss * 3, leaves)
    torch.testing.assert_close([3 * grad for grad in first], list(second))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(reduction: str) -> None:
    tensors, target = draw(12, 4, 6, bias=True)
    leaves = [t.requires_grad_() for t in tensors.values()]
    options = -100, 0.1, 5.0
    arguments = *leaves, target, *options, reduction, True, True, True, "chunked"
    torch.library.opcheck(linear_cross_entropy_forward, arguments, test_utils=CHECKS)
    plain = *(t.detach() for t in leaves), target
    wanted = True, False, True
    torch.library.opcheck(
        linear_cross_entropy_backward, (torch.randn(12), *plain, torch.empty(0), *options, *wanted, "chunked")
    )


@pytest.mark.no_cover
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_without_a_break_and_not_again_for_other_tokens(reduction: Reduction) -> None:
    torch.compiler.reset()
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")

    def compute(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, target, reduction=reduction, softcap=5.0)

    compiled = torch.compile(compute, backend=counter, fullgraph=True)
    for N in (10, 300, 77, 2000):
        tensors, target = draw(N, 4, 6)
        leaves = [t.requires_grad_() for t in tensors.values()]
        found, expected = compiled(*leaves, target), compute(*leaves, target)
        torch.testing.assert_close(found, expected)
        grads = (torch.autograd.grad(loss.sum() * 2, leaves) for loss in (found, expected))
        torch.testing.assert_close(*grads)
    assert counter.frame_count <= 2  # the first number of tokens, then any
    assert not counters["graph_break"]
    torch.compiler.reset()


def test_same_bits_twice_and_under_autocast() -> None:
    tensors, target = draw(700, 16, 50)
    for variant in ON_CPU:
        found = []
        for autocast in (False, True):
            leaves = [t.requires_grad_() for t in tensors.values()]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = linear_cross_entropy(*leaves, target, variant=variant)
            found.append([loss, *torch.autograd.grad(loss, leaves)])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_shapes_are_known_without_data() -> None:
    x, weight = torch.empty(3, 5, 4, device="meta", requires_grad=True), torch.empty(7, 4, device="meta")
    target = torch.empty(3, 5, dtype=torch.int64, device="meta")
    assert linear_cross_entropy(x, weight, target).shape == ()
    loss = linear_cross_entropy(x, weight, target, reduction="none")
    assert (loss.shape, loss.dtype, loss.device.type) == ((3, 5), torch.float32, "meta")


def test_errors_say_what_was_given_and_what_there_is() -> None:
    x, weight, target = torch.randn(2, 3, 4), torch.randn(7, 4), torch.zeros(2, 3, dtype=torch.int64)
    target[1, 0] = 7
    with pytest.raises(ShapeError, match=r"target 3 of 6 is 7, but weight has 7 rows.*0 to 6, or ignore_index=-100"):
        linear_cross_entropy(x, weight, target)
    assert linear_cross_entropy(x, weight, target, ignore_index=7).isfinite()
    target[1, 0] = 0
    wrong: list[tuple[Any, Any, str]] = [
        ((x, weight.mT, target), {}, r"x \(2, 3, 4\), weight \(4, 7\).*weight.mT"),
        ((x, weight, target[0]), {}, r"torch.int64 \(3,\).*must be torch.int64 \(2, 3\)"),
        ((x, weight, target.int()), {}, r"torch.int32 \(2, 3\)"),
        ((x, weight, target), {"bias": torch.randn(4)}, r"bias \(4,\).*must be \(7,\)"),
        ((x.bfloat16(), weight, target), {}, r"x torch.bfloat16, weight torch.float32.*weight.to\(x.dtype\)"),
        ((x.int(), weight.int(), target), {}, r"x torch.int32"),
        ((x.to("meta"), weight, target), {}, r"x on meta, weight on cpu, target on cpu"),
    ]
    for arguments, options, message in wrong:
        with pytest.raises(ShapeError, match=message):
            linear_cross_entropy(*arguments, **options)
    for options, message in (
        ({"reduction": "max"}, r"reduction='max'.*'mean', 'sum' or 'none'"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"variant": "liger"}, "variant='liger', but linear_cross_entropy has 'naive', 'chunked', 'fused' and 'auto'"),
    ):
        with pytest.raises(ConfigError, match=message):
            linear_cross_entropy(x, weight, target, **cast(Any, options))
    with pytest.raises(DeviceError, match=r"'fused' of linear_cross_entropy: it runs on cuda, not on cpu.*'chunked'"):
        linear_cross_entropy(x, weight, target, variant="fused")
    assert variants("linear_cross_entropy") == ("naive", "chunked", "fused")
