"""Matrix products on a CPU: variants, sizes, strides, special numbers, errors, and PyTorch's rules for operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

from kernels.matmul_runs import SHAPES, assert_right, draw, strided
from torchstorm.errors import ConfigError, DeviceError, ShapeError
from torchstorm.kernels import matmul, variants
from torchstorm.kernels.matmul.batches import batches_of
from torchstorm.kernels.matmul.function import matmul_reference
from torchstorm.kernels.matmul.ladder import MATMUL
from torchstorm.kernels.matmul.op import matmul_op
from torchstorm.kernels.variants import Variant

pytest.importorskip("numba")
VARIANTS = ("naive", "blocked", "parallel", "torch")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("variant", [*VARIANTS, "auto"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_sizes(shapes: str, variant: str) -> None:
    assert_right(*draw(SHAPES[shapes], torch.float32), variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes(dtype: torch.dtype, variant: str) -> None:
    assert_right(*draw(((2, 33, 700), (2, 700, 41)), dtype), variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("how", ["transposed", "sliced", "offset", "permuted"])
def test_strides(how: str, variant: str) -> None:
    a, b = (strided(x, how) for x in draw(((3, 37, 50), (3, 50, 29)), torch.float32))
    assert_right(a, b, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_expanded_operands_and_many_batch_dimensions(variant: str) -> None:
    a = torch.randn(1, 50).expand(37, 50)
    b = torch.randn(50, 1).expand(50, 29)
    assert_right(a, b, variant)
    # No two of these batch dimensions can be merged.
    a = torch.randn(2, 4, 3, 7, 5).transpose(0, 2)
    b = torch.randn(3, 1, 2, 5, 6).expand(3, 4, 2, 5, 6)
    assert_right(a, b, variant)


def test_the_definition_is_what_torch_computes() -> None:
    a, b = draw(((2, 3, 5), (2, 5, 4)), torch.float64)
    torch.testing.assert_close(matmul_reference(a, b), a @ b)


@pytest.mark.parametrize("variant", VARIANTS)
def test_results_fill_memory_that_held_nan(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = Tensor.new_empty
    monkeypatch.setattr(
        Tensor, "new_empty", lambda x, *size, **options: new_empty(x, *size, **options).fill_(torch.nan)
    )
    for shapes in ("prime", "no k", "broadcast"):
        assert_right(*draw(SHAPES[shapes], torch.float32), variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nan_and_infinity_go_where_pytorch_lets_them_go(dtype: torch.dtype, variant: str) -> None:
    a, b = draw(((9, 70), (70, 11)), dtype)
    a[1, 3], a[2, 69], b[0, 4], b[69, 10] = torch.nan, torch.inf, -torch.inf, torch.inf
    a[5] = 0  # times infinity
    a[7, 2], b[2, 5] = torch.finfo(dtype).max, torch.finfo(dtype).max
    mine, theirs = matmul(a, b, variant=variant), a @ b
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(test(mine), test(theirs))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sum_of_many_terms_is_as_exact_as_pytorchs(variant: str) -> None:
    assert_right(*draw(((3, 20000), (20000, 4)), torch.float32), variant)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(0, 140),) * 3),
    batch=st.sampled_from([((), ()), ((2,), (2,)), ((1, 3), (2, 1)), ((2, 3), ()), ((), (2,))]),
    how=st.tuples(*(st.sampled_from(["packed", "transposed", "sliced", "offset"]),) * 2),
    variant=st.sampled_from(["blocked", "parallel"]),
)
def test_any_sizes_batches_and_strides(
    sizes: tuple[int, int, int], batch: tuple[tuple[int, ...], tuple[int, ...]], how: tuple[str, str], variant: str
) -> None:
    M, N, K = sizes
    a, b = draw(((*batch[0], M, K), (*batch[1], K, N)), torch.float32)
    assert_right(strided(a, how[0]), strided(b, how[1]), variant)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 3), max_size=4))
def test_merged_batches_name_every_pair_of_matrices_once(data: st.DataObject, sizes: list[int]) -> None:
    def numbered() -> Tensor:
        """Matrices (1, 1) that hold their own place, their batch dimensions in any order, some of them shared."""
        order = data.draw(st.permutations(range(len(sizes))))
        shared = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
        own = [1 if is_shared else size for size, is_shared in zip(sizes, shared, strict=True)]
        x = torch.arange(torch.Size(own).numel()).view([own[d] for d in order])
        return x.permute([order.index(d) for d in range(len(sizes))]).expand(sizes)[..., None, None]

    a, b = numbered(), numbered()
    found = []
    for batches in batches_of(a, b):
        assert batches.first == len(found)
        for outer in range(batches.sizes[0]):
            for inner in range(batches.sizes[1]):
                at_a = batches.a_offset + outer * batches.a_strides[0] + inner * batches.a_strides[1]
                at_b = batches.b_offset + outer * batches.b_strides[0] + inner * batches.b_strides[1]
                found.append((int(a.as_strided((1,), (1,), at_a)), int(b.as_strided((1,), (1,), at_b))))
    assert found == list(zip(a.flatten().tolist(), b.flatten().tolist(), strict=True))


def test_matrices_that_lie_one_after_the_other_are_one_batch_dimension() -> None:
    a, b = torch.zeros(4, 5, 6, 2, 3), torch.zeros(3, 7).expand(4, 5, 6, 3, 7)
    (batches,) = batches_of(a, b)
    assert (batches.sizes, batches.a_strides, batches.b_strides) == ((1, 120), (0, 6), (0, 0))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_gradients(variant: str) -> None:
    a, b = (x.requires_grad_() for x in draw(((2, 3, 4), (4, 5)), torch.float64))
    assert torch.autograd.gradcheck(lambda x, y: matmul(x, y, variant=variant), (a, b))
    assert torch.autograd.gradgradcheck(lambda x, y: matmul(x, y, variant=variant), (a, b))


def test_one_operand_without_gradient_is_not_differentiated_and_the_other_not_kept() -> None:
    a, b = draw(((3, 4), (4, 5)), torch.float32)
    b.requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        c = matmul(a, b, variant="blocked")
    assert [x.data_ptr() for x in kept] == [a.data_ptr()]
    with FlopCounterMode(display=False) as counter:
        c.sum().backward()
    assert counter.get_total_flops() == 2 * 3 * 4 * 5


def test_operations_are_counted() -> None:
    a, b = (x.requires_grad_() for x in draw(((2, 3, 8), (2, 8, 5)), torch.float32))
    with FlopCounterMode(display=False) as counter:
        matmul(a, b).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 2 * 3 * 8 * 5


def test_opcheck() -> None:
    for shapes in (((3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((3, 0), (0, 5))):
        a, b = (x.requires_grad_() for x in draw(shapes, torch.float32))
        torch.library.opcheck(matmul_op, (a, b, "blocked"))
    a, b = draw(((4, 3), (5, 4)), torch.float32)
    torch.library.opcheck(matmul_op, (a.mT, b.mT.detach().requires_grad_(), "naive"))


def test_compiled_without_a_break_and_not_again_for_other_numbers_of_rows() -> None:
    torch.compiler.reset()
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda a, b: matmul(a, b, variant="blocked").relu(), backend=counter, fullgraph=True)
    b = torch.randn(20, 7, requires_grad=True)
    for rows in (4, 9, 33, 2, 100):
        a = torch.randn(rows, 20, requires_grad=True)
        found = [
            (out, *torch.autograd.grad(out.sum(), (a, b)))
            for out in (compiled(a, b), matmul(a, b, variant="blocked").relu())
        ]
        torch.testing.assert_close(found[0], found[1])
    assert counter.frame_count <= 2  # the first shape, then any
    assert not counters["graph_break"]
    torch.compiler.reset()


def test_pytorchs_own_is_called_directly_and_compiles() -> None:
    torch.compiler.reset()
    a, b = draw(((30, 40), (40, 50)), torch.float32)
    compiled = torch.compile(matmul, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        within = compiled(a, b)
    assert torch.equal(within, a @ b)
    assert torch.equal(compiled(a, b), a @ b)
    torch.compiler.reset()


def test_shapes_are_known_without_data() -> None:
    a, b = (x.to("meta") for x in draw(((2, 3, 4), (4, 5)), torch.bfloat16))
    c = matmul(a, b)
    assert (c.shape, c.dtype, c.device.type) == ((2, 3, 5), torch.bfloat16, "meta")


def test_autocast_changes_nothing() -> None:
    a, b = draw(((30, 40), (40, 50)), torch.float32)
    for variant in VARIANTS:
        with torch.autocast("cpu", torch.bfloat16):
            mine = matmul(a, b, variant=variant)
        assert torch.equal(mine, matmul(a, b, variant=variant))


def test_the_parallel_form_gives_the_same_bits_with_any_number_of_threads() -> None:
    a, b = draw(((300, 600), (600, 520)), torch.float32)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(matmul(a, b, variant="parallel"))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "message"),
    [
        (((3, 4), (5, 6)), (torch.float32,) * 2, r"a \(3, 4\) @ b \(5, 6\): a has rows of 4, but b has columns of 5"),
        (((2, 3, 4), (3, 4, 5)), (torch.float32,) * 2, "batches of 2 and 3"),
        (((), (4,)), (torch.float32,) * 2, "at least one dimension"),
        (((3, 4), (4, 5)), (torch.float32, torch.float64), r"a is torch.float32, b torch.float64"),
        (((3, 4), (4, 5)), (torch.int64,) * 2, "a is torch.int64"),
        (((3, 4), (4, 5)), (torch.complex64,) * 2, "a is torch.complex64"),
    ],
)
def test_what_does_not_fit_is_refused(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dtypes: tuple[torch.dtype, torch.dtype], message: str
) -> None:
    a, b = (torch.ones(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    with pytest.raises(ShapeError, match=message):
        matmul(a, b)


def test_other_devices_and_unknown_variants_are_refused() -> None:
    a, b = draw(((3, 4), (4, 5)), torch.float32)
    with pytest.raises(ShapeError, match="a is on cpu, b on meta"):
        matmul(a, b.to("meta"))
    with pytest.raises(ConfigError, match="variant='fastest', but matmul has 'naive', 'blocked'"):
        matmul(a, b, variant="fastest")
    with pytest.raises(
        DeviceError, match=r"runs on cuda, not on cpu. Here there are 'naive', 'blocked', 'parallel', 'tor"
    ):
        matmul(a, b, variant="wgmma")


def test_every_name_is_listed_once_and_has_its_lesson() -> None:
    names = variants("matmul")
    assert len(set(names)) == len(names) >= 10
    assert names[0] == "naive"
    assert set(VARIANTS) < set(names)
    places = [(variant.name, device) for variant in MATMUL for device in variant.devices]
    assert len(set(places)) == len(places)
    assert all(variant.lesson and variant.costs for variant in MATMUL)


def test_without_numba_its_variants_say_so(uninstall: Callable[[str], None]) -> None:
    uninstall("numba")
    a, b = draw(((3, 4), (4, 5)), torch.float32)
    with pytest.raises(DeviceError, match=r"it needs numba, which is not installed. Here there are 'torch' and 'auto'"):
        matmul(a, b, variant="parallel")
    assert torch.equal(matmul(a, b), a @ b)


def test_a_variant_for_another_device_is_found_by_the_devices_own_name() -> None:
    cpu, cuda = (v for v in MATMUL if v.name == "naive")
    assert isinstance(cpu, Variant)
    assert (cpu.devices, cuda.devices) == (("cpu",), ("cuda",))
    assert "cpu, not on cuda" in cpu.why_not(torch.device("cuda"), torch.float32)
