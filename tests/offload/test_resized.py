"""A module that frees and refills the memory of what autograd saved: exact where it is a parameter's, else an error."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from offload.steps import assert_exact_within
from torchstorm.errors import UnsupportedError
from torchstorm.offload.session import Session
from torchstorm.offload.step import resizes
from torchstorm.offload.step.parcels import Saved

WIDTH, ROWS = 256, 1024  # 1 MiB a tensor: each moves by itself
NBYTES = WIDTH * ROWS * 4


def in_place(storage: torch.UntypedStorage) -> None:
    """Frees and refills at once; the memory may come back at the same address."""
    nbytes = storage.nbytes()
    values = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,)).clone()
    storage.resize_(0)
    storage.resize_(nbytes)
    torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,)).copy_(values)


def elsewhere(storage: torch.UntypedStorage) -> None:
    """As C++ code may: unseen by Python's `UntypedStorage.resize_`."""
    nbytes = storage.nbytes()
    alias = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
    alias.resize_(2 * nbytes)


class Refills(nn.Module):
    """Lets `change` have the storage of what its activation function saved."""

    def __init__(self, change: Callable[[torch.UntypedStorage], None], *, rows: int = ROWS) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.change = change
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x[: self.rows])
        out = torch.nn.functional.gelu(hidden)  # saves `hidden`
        self.change(hidden.untyped_storage())
        return out


def make(change: Callable[[torch.UntypedStorage], None], *, rows: int = ROWS) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Refills(change, rows=rows), nn.Linear(WIDTH, WIDTH))


def run(session: Session, model: nn.Module) -> None:
    with session.step():
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()


@pytest.mark.parametrize("change", [in_place, elsewhere])
@pytest.mark.parametrize("budget", [100 * NBYTES, int(1.6 * NBYTES)], ids=["kept", "moved"])
def test_a_refilled_activation_is_an_error_with_the_module_s_name(
    change: Callable[[torch.UntypedStorage], None], budget: int, tmp_path: Path
) -> None:
    model = make(change)
    with pytest.raises(UnsupportedError, match=r"saved in 2 was freed or replaced"):
        run(Session(model, ram=budget, disk=str(tmp_path), recompute=False), model)


def test_memory_that_came_back_at_the_same_address_is_noticed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Saved, "has_other_memory", False)
    model = make(in_place)
    with pytest.raises(UnsupportedError, match="saved in 2 was freed or replaced"):
        run(Session(model, ram=100 * NBYTES, disk=str(tmp_path)), model)


def test_a_refilled_small_activation_is_an_error_too(tmp_path: Path) -> None:
    model = make(in_place, rows=24)  # 24 KiB: copied into a buffer with others
    with pytest.raises(UnsupportedError, match="saved in 2 was freed"):
        run(Session(model, ram=16 * NBYTES, disk=str(tmp_path)), model)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_by_a_plan_names_the_module_too(recompute: bool, tmp_path: Path) -> None:
    refill = False

    def change(storage: torch.UntypedStorage) -> None:
        if refill:
            in_place(storage)

    model = make(change)
    session = Session(model, ram=5 * NBYTES, disk=str(tmp_path), recompute=recompute)
    for _ in range(3):
        run(session, model)
    assert session.report().num_planned
    refill = True
    with pytest.raises(UnsupportedError, match="saved in 2 was freed"):
        run(session, model)


def test_the_step_after_the_error_runs_and_nothing_stays_held(tmp_path: Path) -> None:
    refill = True

    def change(storage: torch.UntypedStorage) -> None:
        if refill:
            in_place(storage)

    model = make(change)
    session = Session(model, ram=5 * NBYTES, disk=str(tmp_path), recompute=False)
    with pytest.raises(UnsupportedError):
        run(session, model)
    refill = False
    gc.collect()
    for _ in range(3):
        run(session, model)
    assert session.usage().ram_bytes <= 5 * NBYTES
    assert session._shared.residency.resident_bytes == session._shared.residency.staging_bytes


def test_memory_that_backward_does_not_need_may_be_freed(tmp_path: Path) -> None:
    def step(model: nn.Module, index: int) -> torch.Tensor:
        out = model(torch.randn(ROWS, WIDTH))
        unused = torch.nn.functional.gelu(out * 2)
        in_place(unused.untyped_storage())
        loss = out.square().mean()
        loss.backward()
        return loss

    assert_exact_within(lambda: make(lambda storage: None), step, tmp_path)


def test_memory_freed_while_it_is_copied_out_waits_for_the_copy(tmp_path: Path) -> None:
    """Else the thread that copies reads memory that is no longer there."""

    def free(storage: torch.UntypedStorage) -> None:
        storage.resize_(0)

    large = 4096
    model = nn.Sequential(nn.Linear(large, large), Refills(free), nn.Linear(WIDTH, WIDTH))
    model[1].linear = nn.Linear(large, large)
    session = Session(model, ram="24MiB", disk=str(tmp_path), recompute=False)
    with pytest.raises(UnsupportedError, match="saved in 1 was freed"), session.step():
        model[1](model[0](torch.randn(1024, large))).square().mean().backward()


class Gathers(nn.Module):
    """As FSDP2 does with a weight: gathered before use, freed after, and again for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shard", torch.randn(WIDTH, WIDTH) / 8)
        self.gathered = None

    def gather(self, *_: object) -> None:
        gathered = self.gathered
        gathered.untyped_storage().resize_(self.shard.nbytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(gathered):
            gathered.copy_(self.shard)

    def release(self, *_: object) -> None:
        self.gathered.untyped_storage().resize_(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gathered is None:
            self.gathered = nn.Parameter(torch.empty_like(self.shard))
        self.gather()
        out = torch.nn.functional.linear(x, self.gathered)
        self.release()
        out.register_hook(self.gather)
        return out


def test_parameters_that_no_module_has_and_their_views_are_left_alone(tmp_path: Path) -> None:
    def step(model: nn.Module, index: int) -> torch.Tensor:
        loss = model(torch.randn(ROWS, WIDTH, requires_grad=True)).square().mean()
        loss.backward()
        return loss

    assert_exact_within(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), Gathers(), nn.GELU(), Gathers(), nn.GELU()),
        step,
        tmp_path,
    )


def test_who_resizes_memory_of_his_own_is_not_told() -> None:
    class Counts:
        told = 0

        def before_resize(self, storage: torch.UntypedStorage) -> None:
            self.told += storage.nbytes()

    listener, storage = Counts(), torch.empty(8).untyped_storage()
    resizes.listen(listener)
    resizes.resize_unnoticed(storage, 64)
    assert (storage.nbytes(), listener.told) == (64, 0)
    assert storage.resize_(0) is storage
    assert (storage.nbytes(), listener.told) == (0, 64)
