"""Cases run in Triton's interpreter, in a process of their own: it is chosen when Triton is imported."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXTREMES = {
    "all forgotten": ((0.0, 1.0), (-30.0, 1.0)),
    "none forgotten": ((0.0, 1.0), (30.0, 1.0)),
    "i near -30": ((-30.0, 1.0), (2.0, 1.0)),
    "i near 30": ((30.0, 1.0), (2.0, 1.0)),
    "i from -30 to 30": ((0.0, 12.0), (2.0, 1.0)),
    "all equal": ((0.0, 0.0), (0.0, 0.0)),
}
"""How gates are drawn at their extremes: mean and scale of i, and of f."""


shared: Path | None = None
"""A folder of all the processes that run these tests: what one of them has interpreted the others read there."""


def interpreted(script: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """What a script beside this file found of each case, by its name: cases as JSON in, a line of JSON for each out."""
    if shared is None:
        said = _run(script, cases)
    else:
        with (shared / f"{script}.said").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # one of them runs it, and others wait for it
            file.seek(0)
            said = file.read()
            if not said:
                said = _run(script, cases)
                file.write(said)
    return {result["name"]: result for result in map(json.loads, said.splitlines())}


def _run(script: str, cases: list[dict[str, Any]]) -> str:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::RuntimeWarning", here / script],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{here.parents[1] / 'src'}{os.pathsep}{here.parent}", "OMP_NUM_THREADS": "1"},
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
