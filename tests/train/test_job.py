"""train/job.py: saved, resumed, compared, refused; all in this process."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from torchstorm.errors import BudgetError, CheckpointError, ConfigError, StorageError
from torchstorm.offload.native import library
from torchstorm.train import job, loop
from torchstorm.train.checkpoint import find_checkpoint
from torchstorm.train.loop import StepInfo
from torchstorm.train.progress import Display
from torchstorm.train.stop import Stopped


def text_of(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def tight(options: dict[str, Any], tmp_path: Path, console: Console) -> dict[str, Any]:
    """The same run with 60 % of the memory that it takes without a budget."""
    free = job.train({**options, "out": str(tmp_path / "free"), "steps": 1}, console=console).run.measured
    assert free is not None
    return {**options, "ram": str(free.ram_bytes * 6 // 10), "disk": str(tmp_path)}


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, signum: int = signal.SIGINT, title: str = "") -> None:
    """Lets the signal come while a step is shown."""
    show = Display.step

    def step_and_signal(self: Display, info: StepInfo) -> None:
        show(self, info)
        if info.step == step and title in self._title:
            os.kill(os.getpid(), signum)

    monkeypatch.setattr(Display, "step", step_and_signal)


@pytest.mark.no_cover
@pytest.mark.parametrize("model", ["gpt-micro", "xlstm-micro"])
def test_a_run_stopped_twice_and_resumed_equals_one_never_stopped(
    model: str, options: dict[str, Any], tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**options, "model": model, "dropout": 0.3, "accumulate": 2, "tokenizer": "chars"}
    whole = job.train({**options, "out": str(tmp_path / "whole")}, console=console)
    for step, resume in ((2, None), (4, Path(options["out"]))):
        with monkeypatch.context() as patch:
            stop_after(patch, step, signal.SIGTERM)
            with pytest.raises(Stopped, match=f"SIGTERM after step {step}") as stopped:
                job.train(options if resume is None else {}, resume=resume, console=console)
        assert stopped.value.checkpoint_dir == Path(options["out"])
        assert find_checkpoint(Path(options["out"])).step == step
    resumed = job.train({}, resume=Path(options["out"]), console=console)
    assert resumed.run.losses == whole.run.losses
    assert resumed.run.val_losses == whole.run.val_losses
    assert resumed.run.weights_sha256 == whole.run.weights_sha256
    assert resumed.run.sample == whole.run.sample
    assert "resumed after step 4" in text_of(console)


def test_checkpoints_come_every_so_often_and_at_the_end(
    options: dict[str, Any], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    save = job.save_checkpoint

    def noted(*args: Any, **kwargs: Any) -> Path:
        saved.append(kwargs["step"])
        return save(*args, **kwargs)

    monkeypatch.setattr(job, "save_checkpoint", noted)
    job.train({**options, "checkpoint_every": 2, "steps": 5}, console=console)
    assert saved == [2, 4, 5]
    record = find_checkpoint(Path(options["out"])).record
    assert len(record["run"]["losses"]) == 5
    assert record["tokenizer"] == {"kind": "bytes"}


@pytest.mark.no_cover
@pytest.mark.parametrize("model", ["gpt-micro", "xlstm-micro"])
def test_a_compared_run_is_the_same_to_the_last_bit_and_says_what_it_cost(
    model: str, options: dict[str, Any], tmp_path: Path, console: Console
) -> None:
    file = tmp_path / "deep" / "result.json"
    options = {**options, "model": model, "dropout": 0.2}
    asked = {**tight(options, tmp_path, console), "compare": True, "json": str(file)}
    result = job.train(asked, console=console)
    assert result.bit_identical is True
    content = json.loads(file.read_text())
    assert len(content["sources"]) == 12
    assert content["bit_identical"] is True
    assert len(content["losses"]) == 6
    assert content["losses"] == content["unlimited_losses"]
    assert content["measured"]["ram_bytes"] <= int(asked["ram"]) < content["unlimited"]["ram_bytes"]
    assert content["forecast"].keys() == content["measured"].keys() == content["unlimited"].keys()
    assert content["corrected"].keys() == content["forecast"].keys()
    assert "bit-identical" in text_of(console)


def test_no_step_that_is_compared_runs_beside_a_compiler(
    options: dict[str, Any], tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {**tight(options, tmp_path, console), "compare": True}
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nsleep 1\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setattr(library, "_building", library._Building())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    beside: list[bool] = []
    show = Display.step

    def noted(self: Display, info: StepInfo) -> None:
        beside.append(library.is_building())
        show(self, info)

    monkeypatch.setattr(Display, "step", noted)
    assert job.train(asked, console=console).bit_identical is True
    assert beside == [False] * 12
    assert text_of(console).count("Builds the C++ of settled steps") == 1


def test_a_stop_during_the_comparison_loses_nothing_and_resuming_compares_only(
    options: dict[str, Any], tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {**tight(options, tmp_path, console), "compare": True}
    with monkeypatch.context() as patch:
        stop_after(patch, 3, title="without a budget")
        with pytest.raises(Stopped, match="SIGINT after step 6"):
            job.train(asked, console=console)
    result = job.train({}, resume=Path(options["out"]), console=console)
    assert result.bit_identical is True
    assert result.run.measured is not None


def test_a_stop_in_the_last_step_still_ends_before_the_comparison(
    options: dict[str, Any], tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {**tight(options, tmp_path, console), "compare": True}
    stop_after(monkeypatch, 6, title="under the budget")
    with pytest.raises(Stopped, match="SIGINT after step 6"):
        job.train(asked, console=console)
    assert find_checkpoint(Path(options["out"])).record["run"]["weights_sha256"]


@pytest.mark.no_cover
def test_a_budget_below_what_is_needed_is_refused_before_any_weight_has_moved(
    options: dict[str, Any], tmp_path: Path, console: Console
) -> None:
    with pytest.raises(BudgetError, match="ram"):
        job.train({**options, "ram": "1KiB"}, console=console)
    assert not list(Path(options["out"]).iterdir())


def test_a_disk_tier_that_fails_in_the_middle_loses_no_step(
    options: dict[str, Any], tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailsInStep4(loop.Session):
        count = 0

        @contextmanager
        def step(self) -> Iterator[None]:
            self.count += 1
            with super().step():
                yield
            if self.count == 4:
                raise StorageError("the disk is full")

    asked = tight(options, tmp_path, console)
    whole = job.train({**asked, "out": str(tmp_path / "whole")}, console=console)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Session", FailsInStep4)
        with pytest.raises(StorageError, match="the disk is full"):
            job.train(asked, console=console)
    assert "Saved after step 3. Resume with --resume" in text_of(console)
    resumed = job.train({}, resume=Path(options["out"]), console=console)
    assert resumed.run.losses == whole.run.losses


def test_resuming_with_another_text_is_refused_with_both_checksums(
    options: dict[str, Any], tmp_path: Path, console: Console
) -> None:
    job.train({**options, "steps": 1}, console=console)
    (tmp_path / "other.txt").write_text("other " * 2000)
    with pytest.raises(CheckpointError, match=r"The text has changed: .* SHA-256"):
        job.train({"data": str(tmp_path / "other.txt")}, resume=Path(options["out"]), console=console)


def test_resuming_into_another_folder_leaves_the_first_one_as_it_was(
    options: dict[str, Any], tmp_path: Path, console: Console
) -> None:
    job.train({**options, "steps": 2}, console=console)
    job.train({"out": str(tmp_path / "copy")}, resume=Path(options["out"]), console=console)
    assert find_checkpoint(tmp_path / "copy").step == find_checkpoint(Path(options["out"])).step == 2


def test_a_new_run_never_overwrites_another_ones_checkpoint(options: dict[str, Any], console: Console) -> None:
    job.train({**options, "steps": 1}, console=console)
    with pytest.raises(ConfigError, match=r"already holds a checkpoint, of step 1: resume it with --resume"):
        job.train(options, console=console)


def test_without_out_the_run_is_kept_under_its_time(
    options: dict[str, Any], tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    del options["out"]
    result = job.train({**options, "steps": 1}, console=console)
    assert result.checkpoint_dir.parent == Path("torchstorm-runs")
    assert find_checkpoint(tmp_path / result.checkpoint_dir).step == 1


def test_a_folder_that_cannot_be_made_is_refused_before_training(
    options: dict[str, Any], text_file: Path, console: Console
) -> None:
    with pytest.raises(StorageError, match=r"--out needs the folder .*text.txt/out, which cannot be created"):
        job.train({**options, "out": str(text_file / "out")}, console=console)
    with pytest.raises(StorageError, match=r"--json needs the folder .*text.txt, which cannot be created"):
        job.train({**options, "json": str(text_file / "a.json")}, console=console)


def test_running_out_of_gpu_memory_points_to_the_budget(
    options: dict[str, Any], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")

    monkeypatch.setattr(job, "run_training", out_of_memory)
    with pytest.raises(BudgetError, match=r"Tried to allocate 2.00 GiB. To fit, give a budget, as in --vram 8GiB"):
        job.train(options, console=console)


def test_a_comparison_that_does_not_fit_the_machine_says_so_and_the_run_counts(
    options: dict[str, Any], tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_once = job.run_training

    def only_the_budgeted(*args: Any, **kwargs: Any) -> Any:
        if kwargs["unlimited"]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return train_once(*args, **kwargs)

    asked = {**tight(options, tmp_path, console), "compare": True, "json": str(tmp_path / "a.json")}
    monkeypatch.setattr(job, "run_training", only_the_budgeted)
    result = job.train(asked, console=console)
    assert result.bit_identical is None
    assert "does not fit on this machine: CUDA out of memory." in text_of(console)
    assert json.loads((tmp_path / "a.json").read_text())["unlimited"] is None
