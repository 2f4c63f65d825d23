"""`torchstorm train` as a user types it: real processes, real files, real signals."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import forked
from torchstorm.cli import app, main
from torchstorm.train.config import TrainConfig
from torchstorm.train.loop import StepInfo
from torchstorm.train.progress import Display

TINY = [
    *("--device=cpu", "--layers=2", "--heads=2", "--width=16", "--batch=4", "--seq=16"),
    *("--val-every=0", "--sample-chars=8", "--warmup=2"),
]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ["storm", "tensor", "budget", "tier", "disk", "plan", "and", "the"]
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join(random.Random(0).choices(words, k=2000)))
    return file


@pytest.fixture(scope="module")
def long_run(text_file: Path) -> list[str]:
    """Long enough that a signal meets it at work."""
    return [*TINY, "--data", str(text_file), "--steps=150", "--dropout=0.2", "--checkpoint-every=10"]


@pytest.fixture(scope="module")
def losses_never_stopped(long_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("whole")
    assert invoke(*long_run, "--out", str(folder / "out"), "--json", str(folder / "a.json"))[0] == 0
    return losses_in(folder / "a.json")


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from torchstorm.cli import main; main()", "train", *arguments]
    return forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def invoke(*arguments: str) -> tuple[int, str, str]:
    """The command in this process: where neither signals nor a real exit matter."""
    result = CliRunner().invoke(app, ["train", *arguments])
    return result.exit_code, result.stdout, result.stderr


def losses_in(file: Path) -> list[float]:
    losses: list[float] = json.loads(file.read_text())["losses"]
    return losses


@pytest.mark.no_cover
def test_the_command_trains_compares_and_writes_json(text_file: Path, tmp_path: Path) -> None:
    # A step large enough that 60 % of it is more than the Session's staging.
    larger = ["--layers=4", "--width=32", "--seq=32"]
    file, common = tmp_path / "a.json", [*TINY, *larger, "--data", str(text_file), "--steps", "4"]
    code, _, _ = invoke(*common, "--out", str(tmp_path / "free"), "--json", str(file))
    assert code == 0
    budget = json.loads(file.read_text())["measured"]["ram_bytes"] * 6 // 10
    asked = [*common, "--out", str(tmp_path / "out"), "--json", str(file), "--betas", "0.8,0.9"]
    process = start(*asked, "--ram", str(budget), "--disk", str(tmp_path), "--compare")
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (0, "")
    assert "bit-identical" in stdout
    assert "forecast" in stdout
    assert str(tmp_path / "out") in stdout
    content = json.loads(file.read_text())
    assert content["bit_identical"] is True
    assert content["config"]["betas"] == [0.8, 0.9]
    assert content["measured"]["ram_bytes"] <= budget


def test_a_plan_file_is_what_the_run_follows_from_its_first_step(text_file: Path, tmp_path: Path) -> None:
    size = ["--device=cpu", "--layers=4", "--heads=2", "--width=32", "--batch=8", "--seq=64"]
    plan = tmp_path / "plan.json"
    planned = CliRunner().invoke(app, ["plan", *size, "--ram=3MiB", f"--disk={tmp_path}", "--json", str(plan)])
    assert planned.exit_code == 0, planned.output
    forecast = json.loads(plan.read_text())["forecast"]
    assert forecast["disk_bytes"] > 0
    run = [*size, "--data", str(text_file), "--steps=4", "--val-every=0", "--sample-chars=0", f"--disk={tmp_path}"]
    code, out, err = invoke(*run, "--plan", str(plan), "--out", str(tmp_path / "a"), "--json", str(tmp_path / "a.json"))
    assert code == 0, err
    assert "plan's" in out
    assert "is for another step" not in out
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["highest"]["ram_bytes"] == forecast["ram_bytes"], "also in the first step"
    assert found["highest"]["disk_bytes"] == forecast["disk_bytes"]
    code, _, err = invoke(*run, "--batch=4", "--plan", str(plan), "--out", str(tmp_path / "b"))
    assert code == 2
    assert "PlanError: This plan is for a batch of (8x64 int64, 8x64 int64), but GPT was given (4x64" in err


@pytest.mark.no_cover
@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on_and_the_resumed_run_equals_one_never_stopped(
    long_run: list[str],
    losses_never_stopped: list[float],
    tmp_path: Path,
    signum: signal.Signals,
    exit_code: int,
) -> None:
    out = tmp_path / "out put"
    process = start(*long_run, "--out", str(out))
    assert process.stdout is not None
    shown = ""
    while "step 15/" not in shown:
        shown = process.stdout.readline()
        assert shown, process.communicate()
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (exit_code, "")
    stopped = re.search(rf"Stopped by {signum.name} after step (\d+); saved in", stdout)
    assert stopped is not None, stdout
    assert 15 <= int(stopped[1]) < 150
    assert f"torchstorm train --resume '{out}'" in stdout
    assert invoke("--resume", str(out), "--json", str(tmp_path / "resumed.json"))[0] == 0
    assert losses_in(tmp_path / "resumed.json") == losses_never_stopped


def test_a_stopped_run_prints_the_command_that_goes_on(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = Display.step

    def show_and_stop(self: Display, info: StepInfo) -> None:
        show(self, info)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Display, "step", show_and_stop)
    code, stdout, stderr = invoke(*TINY, "--data", str(text_file), "--steps", "9", "--out", str(tmp_path / "out"))
    assert (code, stderr) == (143, "")
    assert f"Stopped by SIGTERM after step 1; saved in {tmp_path}/out" in stdout
    assert stdout.endswith(f"Resume with: torchstorm train --resume {tmp_path}/out\n")


def test_the_entry_point_shows_its_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["torchstorm", "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "train" in capsys.readouterr().out


@pytest.mark.no_cover
def test_a_killed_run_goes_on_from_its_last_checkpoint_to_the_losses_of_one_never_killed(
    long_run: list[str], losses_never_stopped: list[float], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start(*long_run, "--out", str(out))
    deadline_s = time.monotonic() + 60
    while not any(out.glob("step-*")):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    time.sleep(random.Random(3).uniform(0, 0.2))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert invoke("--resume", str(out), "--json", str(tmp_path / "resumed.json"))[0] == 0
    assert losses_in(tmp_path / "resumed.json") == losses_never_stopped


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ram", "12 apples"], "SizeError: --ram='12 apples' is not a size"),
        (["--device", "tpu"], "DeviceError: --device 'tpu' is not a device"),
        (["--data", "/nowhere/text"], "DataError: --data /nowhere/text does not exist"),
        (["--resume", "/nowhere"], "CheckpointError: /nowhere is not a folder"),
        (["--model", "gpt5"], "ConfigError: --model='gpt5' is not known"),
        (["--betas", "0.9"], "ConfigError: --betas='0.9' cannot be read"),
        (["--heads", "3"], "ConfigError: width=16 cannot be split over num_heads=3"),
        (["--compare"], "ConfigError: --compare compares a run under a budget with one without"),
        (["--ram", "1KiB"], "BudgetError: "),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(
    text_file: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, _, stderr = invoke(
        *TINY, "--data", str(text_file), "--steps", "2", "--out", str(tmp_path / "out"), *arguments
    )
    assert code == 2
    assert stderr.startswith(message), stderr
    assert stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="holds where there is no GPU")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vram", "1GiB"], "DeviceError: --vram 1GiB was given, but the run is on the CPU"),
        (["--device", "cuda"], "DeviceError: --device cuda was given, but PyTorch"),
    ],
)
def test_a_gpu_that_is_not_there_is_one_line_on_stderr(arguments: list[str], message: str) -> None:
    code, stdout, stderr = invoke(*arguments)
    assert code == 2
    assert stderr.startswith(message)
    assert (stdout, stderr.count("\n")) == ("", 1)


def test_every_option_of_a_run_is_one_of_the_commands_and_the_help_has_its_default() -> None:
    help_text = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).stdout
    for name, default in TrainConfig().to_json().items():
        line = next((line for line in help_text.splitlines() if f"--{name.replace('_', '-')} " in line), None)
        assert line is not None, name
        if not isinstance(default, bool | list | None):
            assert f"(default: {default})" in line
