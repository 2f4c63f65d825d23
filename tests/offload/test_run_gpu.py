"""`storm.run` and real out-of-memory on a GPU: repeated or split until it fits, exact, and within the budget."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torchstorm.errors import BudgetError, OutOfVRAMError
from torchstorm.offload.session import Session

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

# Read when the first cuBLAS handle is made, so set before any test runs. Deterministic algorithms ask for it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

MIB = 2**20
WIDTH, ROWS = 512, 8192


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # put back by conftest.py
    gc.collect()  # what an earlier test left in cycles would count as allocated
    # cuBLAS's workspace may lie in a large block that an earlier test left: it could not be given back, and a step
    # that finds room in it asks for nothing that a limit refuses.
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.synchronize()


class Mlp(nn.Module):
    """Each of its layers has an activation of 4 x WIDTH floats a row: 64 MiB for ROWS rows."""

    def __init__(self, *, dropout: float = 0.0, num_layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm1d(WIDTH) if dropout else nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def make(**options: Any) -> Mlp:
    torch.manual_seed(1)
    return Mlp(**options).cuda()


def make_batch(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3)).cuda()


def loss_fn(model: nn.Module) -> Callable[[torch.Tensor], tuple[torch.Tensor, float]]:
    return lambda x: (model(x).square().sum(), len(x))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def plain_peak_bytes(rows: int = ROWS) -> int:
    """What a step takes without a Session."""
    before = torch.cuda.memory_allocated()
    model, x = make(), make_batch(rows)
    torch.cuda.reset_peak_memory_stats()
    total, weight = loss_fn(model)(x)
    (total / weight).backward()
    peak = torch.cuda.max_memory_allocated()
    print(f"a plain step peaks at {peak}, {before} of it from before")  # shown where a test fails
    return peak


def limit_process_to(nbytes: int) -> None:
    """From here on the allocator gives so much, cached memory included, and then says that it has no more."""
    gc.collect()
    torch.cuda.empty_cache()
    held, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    print(f"limited to {nbytes}; {used} in use, in blocks of {held}")
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.get_device_properties(0).total_memory)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_batch_that_fits_is_one_step_to_the_last_bit(as_tensor: bool) -> None:
    model, x = make(dropout=0.1), make_batch()
    expected = []
    torch.manual_seed(5)
    for _ in range(4):
        total, weight = loss_fn(model)(x)
        (total / weight).backward()
        expected.append((total.detach() / weight, gradients(model)))
        model.zero_grad()
    state = torch.cuda.get_rng_state()
    model = make(dropout=0.1)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, float | torch.Tensor]:
        total, weight = loss_fn(model)(x)
        return total, torch.tensor(weight, device="cuda") if as_tensor else weight

    budget = plain_peak_bytes() * 2 // 3
    torch.manual_seed(5)
    with Session(model, vram=budget, ram="4GiB") as storm:
        for mean, grads in expected:
            found = storm.run(fn, x)
            assert torch.equal(found, mean)
            assert all(torch.equal(one, other) for one, other in zip(gradients(model), grads, strict=True))
            model.zero_grad()
        highest = storm.report().highest
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert highest is not None
    assert highest.vram_bytes <= budget


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_batch_that_no_plan_fits_is_split_and_every_later_run_keeps_to_the_budget(with_gradients: bool) -> None:
    model, x = make(), make_batch()
    total, weight = loss_fn(model)(x)
    (total / weight).backward()
    expected = gradients(model)
    model.zero_grad()
    del total
    weights = sum(p.nbytes for p in model.parameters())
    # One layer of the whole batch takes about 200 MiB at once.
    budget = torch.cuda.memory_allocated() + weights * (2 if with_gradients else 1) + 96 * MIB
    calls: list[int] = []

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        calls.append(len(x))
        return loss_fn(model)(x)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Session(model, vram=budget, ram="4GiB", optimizer=optimizer) as storm:
        for index in range(6):
            if with_gradients:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            storm.run(fn, x)
            for found, right in zip(gradients(model), expected, strict=True):
                assert (found - right).norm() <= 1e-4 * right.norm()
            model.zero_grad()
            if index == 0:
                calls.clear()
            else:
                assert storm.usage().vram_bytes <= budget
        report = storm.report()
    assert max(calls) < ROWS
    assert sum(calls) == 5 * ROWS, "the choice was not remembered"
    assert any("split into" in note for note in report.notes)
    assert report.num_planned > 0


def test_a_sample_that_does_not_fit_is_a_budget_error() -> None:
    plain_peak_bytes(4)  # cuBLAS takes its workspace
    model, x = make(), make_batch(4)
    budget = torch.cuda.memory_allocated() + 24 * MIB  # the gradients alone take more
    with Session(model, vram=budget, ram="4GiB") as storm, pytest.raises(BudgetError, match="Not even one sample"):
        storm.run(loss_fn(model), x)


def test_a_device_with_less_than_the_budget_is_planned_for_and_never_runs_out_for_good() -> None:
    """The budget allows what the device does not have: the plan must learn it from the failures."""
    peak = plain_peak_bytes()
    model, x = make(dropout=0.1), make_batch()
    expected = []
    torch.manual_seed(5)
    for _ in range(8):
        total, weight = loss_fn(model)(x)
        (total / weight).backward()
        expected.append(gradients(model))
        model.zero_grad()
    del total
    buffers = [buffer.clone() for buffer in model.buffers()]
    model = make(dropout=0.1)
    torch.manual_seed(5)
    with Session(model, vram=peak * 2, ram="4GiB") as storm:
        for index, grads in enumerate(expected):
            if index == 3:  # three steps have measured; now the device shrinks
                limit_process_to(peak * 3 // 4)
            storm.run(loss_fn(model), x)
            if not any("split" in note for note in storm.report().notes):
                assert all(torch.equal(one, other) for one, other in zip(gradients(model), grads, strict=True))
            model.zero_grad()
        report = storm.report()
    assert any("repeated" in note for note in report.notes)
    assert not any("split" in note for note in report.notes), "a plan with more slack was enough"
    assert all(torch.equal(one, other) for one, other in zip(buffers, model.buffers(), strict=True))


def test_a_batch_far_beyond_the_device_is_split_until_it_fits() -> None:
    peak = plain_peak_bytes(1024)
    model, x = make(), make_batch(16384)
    limit_process_to(peak + x.nbytes)
    with Session(model, vram=peak + x.nbytes, ram="8GiB") as storm:
        for _ in range(4):
            loss = storm.run(loss_fn(model), x)
            model.zero_grad()
        report = storm.report()
    assert loss.isfinite()
    assert any("split into" in note for note in report.notes)


def test_a_step_that_runs_out_drops_its_gradients_and_leaves_no_memory_behind() -> None:
    peak = plain_peak_bytes()
    model, x = make(), make_batch()
    fixed = torch.cuda.memory_allocated()
    with Session(model, unlimited=True) as storm:
        limit_process_to(peak // 2)

        def step() -> None:
            with storm.step():
                total, weight = loss_fn(model)(x)
                (total / weight).backward()

        with pytest.raises(OutOfVRAMError) as caught:
            step()
        assert all(parameter.grad is None for parameter in model.parameters())
        error = caught.value
        assert error.asked_bytes > 0
        assert 0 < error.allocated_bytes <= error.reserved_bytes
        del caught
        gc.collect()
        assert torch.cuda.memory_allocated() <= fixed + 64 * MIB
        storm.run(loss_fn(model), x)
    assert any("split into" in note for note in storm.report().notes)


def test_gradients_from_before_wait_on_the_host_where_nothing_else_is_left() -> None:
    model = make(num_layers=24)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    x = make_batch(8)
    total, weight = loss_fn(model)(x)
    (total / weight).backward()
    once = gradients(model)
    del total
    # With the gradients that there are; those of the run do not fit besides.
    budget = torch.cuda.memory_allocated() + weights // 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Session(model, vram=budget, ram="4GiB", optimizer=optimizer) as storm:
        for times in (2, 3):
            storm.run(loss_fn(model), x, micro_batches=1)
            for found, one in zip(gradients(model), once, strict=True):
                assert (found - times * one).norm() <= 1e-5 * found.norm()
        assert storm.usage().vram_bytes <= budget
