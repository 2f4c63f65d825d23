"""What cannot go on says so, touches no weight, leaves no file, and lets the run go on with another budget."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import forked
from offload.steps import Outcome, assert_same, saved_bytes, train
from torchstorm.errors import (
    BudgetError,
    ConfigError,
    CorruptionError,
    DeviceError,
    SizeError,
    StorageError,
    UnsupportedError,
)
from torchstorm.offload.session import Session

WIDTH, ROWS = 64, 256


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models this small only lose by more; the root conftest puts it back."""
    torch.set_num_threads(1)


def mlp(width: int = WIDTH) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width), nn.Tanh()]
    return nn.Sequential(*layers)


def square(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(torch.randn(ROWS, WIDTH)).square().mean()
    loss.backward()
    return loss


def long_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(torch.randn(8 * ROWS, WIDTH)).square().mean()
    loss.backward()
    return loss


def image_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16 * 16, 8), nn.Tanh(),
    )  # fmt: skip


def image_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(torch.randn(16, 3, 32, 32)).square().mean()
    loss.backward()
    return loss


def many_small() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def small_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(torch.randn(48, WIDTH)).square().mean()
    loss.backward()
    return loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], torch.Tensor]]] = {
    "mlp": (mlp, square),
    "mlp with large batches": (mlp, long_step),
    "convolutions": (image_net, image_step),
    "many small tensors": (many_small, small_step),
}


# ---------------------------------------------------------------------- a budget that is too small


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("name", "with_disk"),
    [*((name, True) for name in MODELS), ("mlp", False), ("many small tensors", False)],
)
def test_the_smallest_feasible_budget_that_the_error_names_is_feasible(
    name: str, with_disk: bool, tmp_path: Path
) -> None:
    make, step = MODELS[name]
    disk = str(tmp_path) if with_disk else None
    torch.manual_seed(1)
    model = make()
    before = {key: value.clone() for key, value in model.named_parameters()}
    with Session(model, ram="32KiB", disk=disk) as session, pytest.raises(BudgetError) as caught, session.step():
        step(model, 0)
    error = caught.value
    assert error.tier == "ram"
    assert error.budget_bytes == 32 * 1024
    assert error.smallest_bytes is not None
    assert f"ram={error.smallest_bytes}" in str(error)
    assert all(torch.equal(before[key], value) for key, value in model.named_parameters())
    expected, _ = train(make, step, None)
    found, again = train(make, step, lambda model, optimizer: Session(model, ram=error.smallest_bytes, disk=disk))
    assert again is not None
    assert_same(expected, found)
    report = again.report()
    # The first step is not planned; with nowhere to move to it keeps what the later ones compute again.
    figures = report.highest if with_disk else report.measured
    assert figures is not None
    assert figures.ram_bytes <= error.smallest_bytes
    again.close()


@pytest.mark.parametrize("name", MODELS)
def test_with_ram_alone_and_nothing_computed_again_a_byte_less_than_the_step_saves_is_refused(name: str) -> None:
    make, step = MODELS[name]
    model = make()
    smallest = saved_bytes(make, step)
    with (
        Session(model, ram=smallest - 1, recompute=False) as session,
        pytest.raises(BudgetError, match=f"ram={smallest}"),
        session.step(),
    ):
        step(model, 0)


@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_budget_named_for_a_session_with_a_disk_is_feasible_with_one(name: str, tmp_path: Path) -> None:
    """With RAM alone the message also says what would do with disk=; that must be true, too."""
    make, step = MODELS[name]
    model = make()
    with Session(model, ram="32KiB") as session, pytest.raises(BudgetError) as caught, session.step():
        step(model, 0)
    named = int(str(caught.value).rpartition("ram=")[2].split()[0])
    with Session(model, ram=named, disk=str(tmp_path)) as session:
        for index in range(3):
            with session.step():
                step(model, index)
        highest = session.report().highest
    assert highest is not None
    assert highest.ram_bytes <= named


def test_a_budget_error_names_the_block(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4096), nn.Tanh()), nn.Linear(4096, 8))
    message = r"block '(1|1\.1|1\.0|2)' alone needs .* at once"
    session = Session(model, ram="1MiB", disk=str(tmp_path))
    with pytest.raises(BudgetError, match=message) as caught, session.step():
        model(torch.randn(256, 8)).sum().backward()
    session.close()
    assert caught.value.block.startswith(("1", "2"))
    assert caught.value.needed_bytes >= 4 * 256 * 4096


def test_a_disk_that_is_too_small_is_a_budget_error_that_names_what_would_do(tmp_path: Path) -> None:
    model = mlp()
    ram = int(saved_bytes(mlp, square) * 0.4)
    session = Session(model, ram=ram, disk=f"{tmp_path}:64KiB", recompute=False)
    with pytest.raises(BudgetError) as caught, session.step():
        square(model, 0)
    session.close()
    assert list(tmp_path.iterdir()) == []
    smallest = caught.value.smallest_bytes
    assert smallest is not None
    budget = {"ram": ram, "disk": 64 * 1024} | {caught.value.tier: smallest}
    found, session = train(
        mlp,
        square,
        lambda model, _: Session(model, ram=budget["ram"], disk=f"{tmp_path}:{budget['disk']}", recompute=False),
    )
    assert session is not None
    expected, _ = train(mlp, square, None)
    assert_same(expected, found)
    highest = session.report().highest
    assert highest is not None
    assert highest.ram_bytes <= budget["ram"]
    assert highest.disk_bytes <= budget["disk"]
    session.close()


def test_a_disk_budget_that_fits_the_plan_is_kept_in_every_step(tmp_path: Path) -> None:
    """The first step moves all it may; where the disk has no room for all, it must make do with the RAM it has."""
    total = saved_bytes(mlp, square)
    ram, disk = int(total * 0.6), int(total * 0.5)
    expected, _ = train(mlp, square, None)
    found, session = train(mlp, square, lambda model, optimizer: Session(model, ram=ram, disk=f"{tmp_path}:{disk}"))
    assert session is not None
    assert_same(expected, found)
    highest = session.report().highest
    assert highest is not None
    assert highest.ram_bytes <= ram
    assert 0 < highest.disk_bytes <= disk
    session.close()


def test_a_session_with_exactly_what_the_forecast_names_keeps_to_it(tmp_path: Path) -> None:
    """The forecast's disk bytes are bytes in the spill file, where a storage takes whole pages. The first step, which
    knows no plan, may lack room there, and says so."""
    model = mlp(60)  # storages that are not a multiple of a page

    def run(disk_bytes: int | str) -> Session:
        torch.manual_seed(0)
        session = Session(model, ram=ram, disk=f"{tmp_path}:{disk_bytes}")
        for _ in range(4):
            with session.step():
                model(torch.randn(1001, 60)).square().mean().backward()
        session.close()
        return session

    with Session(model, unlimited=True) as session, session.step():
        model(torch.randn(1001, 60)).square().mean().backward()
    ram = session.usage().ram_bytes // 2
    forecast = run("1GiB").report().forecast
    assert forecast is not None
    report = run(forecast.disk_bytes).report()
    assert report.highest is not None
    assert report.measured is not None
    assert report.measured.ram_bytes <= ram
    assert report.highest.disk_bytes <= forecast.disk_bytes
    assert (report.highest.ram_bytes > ram) == any("A step that was measured" in note for note in report.notes)


def test_a_longer_batch_than_fits_is_a_budget_error_and_the_next_step_is_right(tmp_path: Path) -> None:
    ram = int(saved_bytes(mlp, square) * 0.5)
    expected, _ = train(mlp, square, None)
    torch.manual_seed(1)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outcome = Outcome()
    with Session(model, ram=ram, disk=str(tmp_path), optimizer=optimizer) as session:
        for index in range(4):
            if index == 2:
                # Where the plan so far computes nothing again, the first long step is traced without its operations: it
                # shows that moving is not enough, and the second one that computing again is not, either.
                def long_steps() -> None:
                    for _ in range(2):
                        with session.step():
                            long_step(model, 2)

                with pytest.raises(BudgetError) as caught:
                    long_steps()
                assert caught.value.needed_bytes > ram
                optimizer.zero_grad()
            torch.manual_seed(100 + index)
            with session.step():
                outcome.losses.append(square(model, index).detach())
            outcome.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    outcome.state = dict(model.state_dict())
    assert_same(expected, outcome)


# ---------------------------------------------------------------------- a disk that fails

FULL_DISK = """
import os, resource, signal, sys
import torch
from torch import nn
from torchstorm import Session, StorageError
from torchstorm.plan import search

search._STEPS = 2  # as `short_search` has it, for another process
directory = sys.argv[1]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
torch.set_num_threads(1)
for when in ("the first step", "a planned step"):  # each in a process of its own, for which nothing is imported again
    child = os.fork()
    if not child:
        break
    if os.waitpid(child, 0)[1]:
        sys.exit(when)
else:
    sys.exit()

def make():
    torch.manual_seed(1)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

def step(model, optimizer, index, session=None):
    torch.manual_seed(index)
    x = torch.randn(2048, 64)
    if session is None:
        loss = model(x).square().mean(); loss.backward()
    else:
        with session.step():
            loss = model(x).square().mean(); loss.backward()
    optimizer.step(); optimizer.zero_grad()
    return loss.item()

def state(model, optimizer):
    tensors = [*model.state_dict().values()]
    tensors += [value for each in optimizer.state_dict()["state"].values() for value in each.values()]
    return [tensor.clone() for tensor in tensors]

reference, reference_optimizer = make()
expected = [step(reference, reference_optimizer, index) for index in range(5)]

model, optimizer = make()
session = Session(model, ram="6MiB", disk=directory, optimizer=optimizer)
losses = [step(model, optimizer, 0, session)] if when == "a planned step" else []
if losses:
    losses.append(step(model, optimizer, 1, session))
before = state(model, optimizer)
# From here on no file may grow beyond 2 MiB, in the middle of what the step spills. What is there already is cut off.
spill = [os.path.join(root, name) for root, _, names in os.walk(directory) for name in names if name == "spill"]
os.truncate(spill[0], 0)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 2**20, limits[1]))
try:
    step(model, optimizer, len(losses), session)
except StorageError as error:
    print("StorageError:", error)
else:
    sys.exit("no StorageError")
assert all(torch.equal(one, other) for one, other in zip(before, state(model, optimizer), strict=True)), "state"
assert os.listdir(directory) == [], os.listdir(directory)
try:
    with session.step():
        pass
except StorageError as error:
    assert "create a new one" in str(error)
else:
    sys.exit("the Session went on")
optimizer.zero_grad()
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
with Session(model, ram="32MiB", optimizer=optimizer) as other:
    losses += [step(model, optimizer, index, other) for index in range(len(losses), 5)]
assert losses == expected, (losses, expected)
assert os.listdir(directory) == []
"""


def test_a_disk_that_fills_up_in_a_step_costs_that_step_and_nothing_else(tmp_path: Path) -> None:
    done = forked.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("failed in the block") == 2
    assert done.stdout.count("ulimit -f") == 2


def flip_spilled_bytes(directory: Path) -> None:
    (spill,) = directory.glob("*/spill")
    content = bytearray(spill.read_bytes())
    for index in range(0, len(content), 4096):
        content[index] ^= 1
    with open(spill, "r+b") as file:
        file.write(content)


@pytest.mark.parametrize("name", ["mlp with large batches", "many small tensors"])
def test_a_flipped_byte_in_a_spill_file_is_found_and_the_tensor_named(name: str, tmp_path: Path) -> None:
    make, step = MODELS[name]
    torch.manual_seed(0)
    model = make()
    rows = 8 * ROWS if step is long_step else 48
    ram = int(saved_bytes(make, step) * 0.6)
    if name == "many small tensors":
        ram = max(ram, 256 * 1024)  # the bounce buffers alone take 128 KiB
        rows = 1024

    def step_on_a_faulty_disk() -> None:
        with session.step():
            loss = model(torch.randn(rows, WIDTH)).square().mean()
            flip_spilled_bytes(tmp_path)
            loss.backward()

    session = Session(model, ram=ram, disk=str(tmp_path), check=True)
    with pytest.raises(CorruptionError, match=r"a tensor saved in \S+ \(\d+ bytes\) was read from .* with checksum"):
        step_on_a_faulty_disk()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="closed"), session.step():
        pass


@pytest.mark.parametrize("kind", ["a file", "below a file", "no parent", "read-only file system"])
def test_a_directory_that_cannot_be_used_is_a_storage_error(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    directory = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "spill",
        "no parent": tmp_path / "not" / "there",
        "read-only file system": Path("/proc/spill"),
    }[kind]
    with pytest.raises(StorageError, match="disk="):
        Session(mlp(), ram="1MiB", disk=str(directory))
    assert (tmp_path / "file").read_text() == "in the way"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize("size", ["24 GB?", "-1", "0", -1, 0, "", "GiB", "1e", "nan", "inf", 1.5, True])
@pytest.mark.parametrize("tier", ["ram", "vram"])
def test_a_size_that_cannot_be_read_is_a_size_error(tier: str, size: object) -> None:
    error = SizeError if tier == "ram" else (SizeError, DeviceError)
    with pytest.raises(error):
        Session(mlp(), **{tier: size})


@pytest.mark.parametrize("size", ["24 GB?", "-1", "0", "GiB"])
def test_a_disk_size_that_cannot_be_read_is_a_size_error(size: str, tmp_path: Path) -> None:
    with pytest.raises(SizeError):
        Session(mlp(), ram="1MiB", disk=f"{tmp_path}:{size}")
    assert list(tmp_path.iterdir()) == []


def test_vram_for_a_model_on_the_cpu_is_a_device_error() -> None:
    with pytest.raises(DeviceError, match="on the CPU"):
        Session(mlp(), vram="24GiB")


def test_a_model_on_the_meta_device_is_a_device_error() -> None:
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(DeviceError, match="meta"):
        Session(model, ram="1MiB")


def test_a_budget_together_with_unlimited_is_an_error() -> None:
    with pytest.raises(ValueError, match="unlimited"):
        Session(mlp(), ram="1MiB", unlimited=True)


# ---------------------------------------------------------------------- steps that cannot be


def test_a_step_within_a_step_of_the_same_session_is_a_config_error_and_harms_neither(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = many_small(), torch.randn(ROWS, WIDTH)
    model(x).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    with Session(model, ram="2MiB", disk=str(tmp_path)) as session:
        with session.step():
            loss = model(x).square().mean()
            with pytest.raises(ConfigError, match="already in a step"), session.step():
                pass
            loss.backward()
        found = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_torch_func_inside_a_step_is_unsupported_and_names_the_model(tmp_path: Path) -> None:
    model = many_small()

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    with Session(model, ram="2MiB", disk=str(tmp_path)) as session:
        with pytest.raises(UnsupportedError, match="Sequential"), session.step():
            torch.func.grad(loss)(dict(model.named_parameters()), torch.randn(ROWS, WIDTH))
        # And the next step is as if that one had not been.
        with session.step():
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()


def test_a_step_on_a_closed_session_is_an_error() -> None:
    session = Session(mlp(), ram="8MiB")
    session.close()
    with pytest.raises(StorageError, match="closed"), session.step():
        pass


def test_a_step_in_which_nothing_is_saved_is_fine_and_counts_as_no_planned_one(tmp_path: Path) -> None:
    model = many_small()
    with Session(model, ram="2MiB", disk=str(tmp_path)) as session:
        with session.step(), torch.no_grad():
            model(torch.randn(ROWS, WIDTH))
        for _ in range(4):
            with session.step():
                model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        planned = session.report().num_planned
        for _ in range(3):
            with session.step(), torch.no_grad():
                model(torch.randn(ROWS, WIDTH))
        assert session.report().num_planned == planned
