"""Checkpoints that stay valid if the process is killed at any moment.

A run's folder holds `step-<n>/` with `tensors.safetensors` (weights as `model.<name>`, optimizer state as
`optimizer.<name>.<key>`) and `state.json` (the step, the options, the losses, the tensors' checksum). It is written
under a temporary name, synced to disk, and renamed. Only then the previous checkpoint is removed. So every folder
`step-<n>` is complete, and after the first checkpoint there is always one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from torchstorm.errors import CheckpointError, StorageError

_FORMAT = 1
_TENSORS = "tensors.safetensors"
_STATE = "state.json"
_LEFT_OVER = ".saving-"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: its folder.
        step: number of completed optimizer steps.
        record: the run's other data, as read from JSON.
        tensors_crc32: checksum of the tensors' file.
    """

    path: Path
    step: int
    record: Mapping[str, Any]
    tensors_crc32: int


def save_checkpoint(
    directory: Path, *, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, record: Mapping[str, Any]
) -> Path:
    """Writes `directory/step-<step>` and removes earlier checkpoints.

    Tied weights are written once.

    Args:
        directory: the run's folder; created if missing.
        step: number of completed optimizer steps; must be larger than that of every checkpoint there.
        model: its parameters and persistent buffers are saved.
        optimizer: the model's optimizer; its state is saved.
        record: other data to save; must be serializable as JSON.

    Returns:
        The checkpoint's folder.

    Raises:
        StorageError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    place = directory / f"step-{step:08d}"
    written = directory / f"{_LEFT_OVER}{place.name}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_left_over(directory)
        written.mkdir()
        save_file(_tensors_of(model, optimizer), written / _TENSORS)
        state = {"format": _FORMAT, "step": step, "tensors_crc32": _crc32(written / _TENSORS), "record": dict(record)}
        (written / _STATE).write_text(json.dumps(state))
        for path in (written / _TENSORS, written / _STATE, written):
            sync(path)
        written.rename(place)
        sync(directory)
        for older in _steps_in(directory).values():
            if older != place:
                # Renamed first, so that an interrupted removal leaves no incomplete checkpoint under a valid name.
                older.rename(directory / f"{_LEFT_OVER}{older.name}")
    except (OSError, SafetensorError) as error:
        raise StorageError(f"The checkpoint of step {step} cannot be written to {directory}: {error}.") from error
    finally:
        _remove_left_over(directory)
    return place


def find_checkpoint(directory: Path) -> Checkpoint:
    """Reads the newest checkpoint's `state.json`; the tensors are read by `restore`.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    steps = _steps_in(directory)
    if not steps:
        what = "has no checkpoint (step-<n>) in it" if directory.is_dir() else "is not a folder"
        raise CheckpointError(f"{directory} {what}: give --resume the folder that `torchstorm train --out` wrote to.")
    place = steps[max(steps)]
    try:
        state = json.loads((place / _STATE).read_text())
        if state["format"] != _FORMAT:
            raise CheckpointError(
                f"{place} has format {state['format']}, but this version of torchstorm reads {_FORMAT}."
            )
        return Checkpoint(path=place, step=state["step"], record=state["record"], tensors_crc32=state["tensors_crc32"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{place / _STATE} is damaged ({type(error).__name__}: {error}).") from error


def has_checkpoint(directory: Path) -> bool:
    """Whether `find_checkpoint` would find one."""
    return bool(_steps_in(directory))


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Loads the checkpoint into `model` and `optimizer`, which keep their devices and dtypes.

    Raises:
        CheckpointError: the tensors are damaged, or belong to another model.
    """
    path = checkpoint.path / _TENSORS
    try:
        found_crc32 = _crc32(path)
        if found_crc32 != checkpoint.tensors_crc32:
            raise CheckpointError(
                f"{path} is damaged: its checksum is {found_crc32:08x}, but {checkpoint.tensors_crc32:08x} was written."
            )
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    ours = _model_tensors(model)
    theirs = {name: tensors.pop(name) for name in list(tensors) if name.startswith("model.")}
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise CheckpointError(f"{path} belongs to another model: {len(odd)} tensors differ, such as {odd[0]}.")
    for name, tensor in ours.items():
        if tensor.shape != theirs[name].shape:
            raise CheckpointError(
                f"{path} belongs to another model: {name} is {tuple(theirs[name].shape)} there "
                f"and {tuple(tensor.shape)} here."
            )
    with torch.no_grad():
        for name, tensor in ours.items():
            tensor.copy_(theirs[name])
    numbers = {name: number for number, name in enumerate(_names_in(optimizer, model))}
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter_name, key = name.removeprefix("optimizer.").rsplit(".", 1)
        state.setdefault(numbers[parameter_name], {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def sync(path: Path) -> None:
    """Makes a file's content or a folder's entries durable (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = _model_tensors(model)
    names = _names_in(optimizer, model)
    for number, state in optimizer.state_dict()["state"].items():
        for key, tensor in state.items():
            tensors[f"optimizer.{names[number]}.{key}"] = tensor
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    # state_dict() has only persistent buffers, but lists a tied weight under each of its names. named_parameters and
    # named_buffers list it once, under its first name.
    once = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {f"model.{name}": once[name] for name in model.state_dict() if name in once}


def _names_in(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _remove_left_over(directory: Path) -> None:
    for left_over in directory.glob(f"{_LEFT_OVER}*"):
        shutil.rmtree(left_over, ignore_errors=True)


def _steps_in(directory: Path) -> dict[int, Path]:
    found = ((re.fullmatch(r"step-([0-9]+)", path.name), path) for path in directory.glob("step-*"))
    return {int(match[1]): path for match, path in found if match is not None}


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(8 * 2**20):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
