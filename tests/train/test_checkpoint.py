"""train/checkpoint.py: whole at every moment, exact, and honest about damage."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import forked
from torchstorm.errors import CheckpointError, StorageError
from torchstorm.train.checkpoint import find_checkpoint, has_checkpoint, restore, save_checkpoint


class Tied(nn.Module):
    """Two names for one weight, a buffer that is saved and one that is not."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 5)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def trained(seed: int, width: int = 6) -> tuple[Tied, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Tied(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        train_once(model, optimizer)
    return model, optimizer


def train_once(model: Tied, optimizer: torch.optim.AdamW) -> None:
    optimizer.zero_grad()
    model.head(model.norm(model.embedding(torch.tensor([0, 1, 4])))).square().sum().backward()
    optimizer.step()


def test_a_restored_model_goes_on_as_the_saved_one_to_the_last_bit(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    save_checkpoint(tmp_path, step=3, model=model, optimizer=optimizer, record={"loss": 0.1})
    found = find_checkpoint(tmp_path)
    assert (found.step, found.record, found.path) == (3, {"loss": 0.1}, tmp_path / "step-00000003")
    other, other_optimizer = Tied(), None
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    restore(found, other, other_optimizer)
    for _ in range(3):
        train_once(model, optimizer)
        train_once(other, other_optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert other.head.weight is other.embedding.weight


def test_a_tied_weight_is_written_once_and_scratch_not_at_all(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, optimizer = trained(0)
    place = save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer, record={})
    names = load_file(place / "tensors.safetensors").keys()
    assert {name for name in names if name.startswith("model.")} == {
        "model.embedding.weight",
        "model.head.bias",
        "model.norm.weight",
        "model.norm.bias",
        "model.norm.running_mean",
        "model.norm.running_var",
        "model.norm.num_batches_tracked",
    }
    assert "optimizer.embedding.weight.exp_avg_sq" in names


def test_only_the_newest_checkpoint_is_kept_and_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    (tmp_path / ".saving-step-00000020").mkdir()
    (tmp_path / ".saving-step-00000020" / "half").write_text("x")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-by-step").mkdir()
    for step in (9, 10, 20):
        save_checkpoint(tmp_path, step=step, model=model, optimizer=optimizer, record={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-00000020", "step-by-step"]


_SAVE_UNTIL_KILLED = """
import os, pathlib, random, signal, sys, time, torch
from torchstorm.train.checkpoint import find_checkpoint, restore, save_checkpoint

torch.set_num_threads(1)
folder = pathlib.Path(sys.argv[1])
model = torch.nn.Linear(600, 400)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(600)).sum().backward()
optimizer.step()

def save(step):
    with torch.no_grad():
        for tensor in (*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in model.parameters())):
            tensor.fill_(step)
    save_checkpoint(folder, step=step, model=model, optimizer=optimizer, record={"all_tensors_are": step})

began = time.perf_counter()
save(1)
save_seconds = time.perf_counter() - began
random.seed(int(sys.argv[2]))
num_half_written = 0
for _ in range(40):
    last = find_checkpoint(folder).step
    child = os.fork()
    if child == 0:
        for step in range(last + 1, 10**9):
            save(step)
    time.sleep(random.uniform(0, 3 * save_seconds))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    num_half_written += any(folder.glob(".saving-*"))
    found = find_checkpoint(folder)
    restore(found, model, optimizer)
    assert found.step >= last and found.record["all_tensors_are"] == found.step
    for tensor in (*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in model.parameters())):
        assert (tensor == found.step).all(), (found.step, tensor)
print(num_half_written, find_checkpoint(folder).step)
"""


def test_a_kill_at_any_moment_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SAVE_UNTIL_KILLED, str(tmp_path), "5"]
    done = forked.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    num_half_written, last_step = map(int, done.stdout.split())
    # Otherwise the kills all fell between two saves, or before the first one, and nothing was tested.
    assert num_half_written > 3
    assert last_step > 5


def test_a_folder_without_a_checkpoint_and_a_missing_one_are_told_apart(tmp_path: Path) -> None:
    assert not has_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        find_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", "state.json is damaged"),
        ("[]", "state.json is damaged"),
        ("{}", "state.json is damaged .KeyError: 'format'"),
        (json.dumps({"format": 99}), "has format 99, but this version of torchstorm reads 1"),
        (None, "state.json is damaged .FileNotFoundError"),
    ],
)
def test_a_state_that_cannot_be_read_is_refused_by_its_name(tmp_path: Path, state: str | None, message: str) -> None:
    (tmp_path / "step-00000001").mkdir()
    if state is not None:
        (tmp_path / "step-00000001" / "state.json").write_text(state)
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(tmp_path)


def test_one_flipped_bit_in_the_tensors_is_found(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    place = save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer, record={})
    content = bytearray((place / "tensors.safetensors").read_bytes())
    content[-1] ^= 1
    (place / "tensors.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged: its checksum is"):
        restore(find_checkpoint(tmp_path), model, optimizer)


def test_missing_tensors_are_refused_by_the_files_name(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    place = save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer, record={})
    (place / "tensors.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tensors.safetensors cannot be read"):
        restore(find_checkpoint(tmp_path), model, optimizer)


def test_a_checkpoint_of_another_model_is_refused_and_leaves_this_one_unchanged(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer, record={})
    wider, wider_optimizer = trained(1, width=7)
    before = wider.embedding.weight.detach().clone()
    with pytest.raises(
        CheckpointError, match=r"another model: model.embedding.weight is \(5, 6\) there and \(5, 7\) here"
    ):
        restore(find_checkpoint(tmp_path), wider, wider_optimizer)
    assert torch.equal(wider.embedding.weight, before)
    plain = nn.Linear(6, 5)
    with pytest.raises(CheckpointError, match=r"another model: 9 tensors differ, such as model.bias"):
        restore(find_checkpoint(tmp_path), plain, torch.optim.AdamW(plain.parameters()))


def test_a_disk_that_takes_nothing_more_is_told_and_the_last_good_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(0)
    save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer, record={})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match=r"step 2 cannot be written to .*No space left on device"):
        save_checkpoint(tmp_path, step=2, model=model, optimizer=optimizer, record={})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert find_checkpoint(tmp_path).step == 1
