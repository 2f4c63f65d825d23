"""Processes that are forked from one that has imported torch are what `subprocess` would have started."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import forked

TELLS = """
import json, os, sys, warnings
print(json.dumps([os.getcwd(), sys.argv[1:], dict(os.environ), __name__, sys.stdin.read(), sys.warnoptions]))
print("torch" in sys.modules, "torchstorm" in sys.modules, file=sys.stderr)
"""


def test_it_has_the_place_arguments_variables_and_streams_that_it_was_given(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", TELLS, "one", "two"]
    given: dict[str, Any] = {"cwd": tmp_path, "env": {"A": "b"}, "input": "read", "capture_output": True, "text": True}
    ours, theirs = forked.run(command, **given), subprocess.run(command, check=True, **given)
    found, expected = json.loads(ours.stdout), json.loads(theirs.stdout)
    expected[2].pop("LC_CTYPE", None)  # which Python sets for itself, where no locale is given, as it begins
    assert found == expected
    assert ours.stderr == "True False\n"


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("1 / 0", 1),
        ("import os; os._exit(4)", 4),
        ("import os; os.abort()", -6),
    ],
)
def test_it_ends_as_any_other(code: str, returncode: int, tmp_path: Path) -> None:
    file = tmp_path / "left"
    code = f"import atexit, pathlib; atexit.register(pathlib.Path({str(file)!r}).touch); {code}"
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == returncode
    assert file.exists() == (returncode in (0, 1, 3))
    assert ("ZeroDivisionError" in done.stderr) == (returncode == 1)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_it_and_a_time_limit_ends_it(signum: signal.Signals) -> None:
    # Where the tests run in the background of a shell, SIGINT is ignored, and processes begin so.
    listens = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)"
    waits = [sys.executable, "-c", f"{listens}; print('ready', flush=True); time.sleep(60)"]
    with forked.Popen(waits, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert child.poll() is None
        child.send_signal(signum)
        assert child.wait(10) == -signum
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run(waits, stdout=subprocess.DEVNULL, timeout=0.1)
    assert time.monotonic() - began < 30


def test_another_program_is_refused() -> None:
    with pytest.raises(AssertionError, match="another program"):
        forked.Popen(["/bin/true"])
