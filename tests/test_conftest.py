"""What `make test-gpu` stands on: a run in which something skips, or nothing runs, has failed. And what `make coverage`
leaves out is not slowed by it, in several processes either."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

import forked

SKIPS = {
    "test_in_the_body": "import pytest\n\ndef test_skips():\n    pytest.skip('no GPU')\n",
    "test_by_mark": "import pytest\n\n@pytest.mark.skipif(True, reason='no GPU')\ndef test_skips():\n    pass\n",
    "test_in_a_fixture": "import pytest\n\n@pytest.fixture\ndef gpu():\n    pytest.skip('no GPU')\n\n"
    "def test_skips(gpu):\n    pass\n",
    "test_as_a_file": "import pytest\n\npytest.skip('no GPU', allow_module_level=True)\n",
}
NO_SKIPS = {
    "test_passes": "def test_passes():\n    pass\n",
    "test_fails": "import pytest\n\n@pytest.mark.xfail\ndef test_fails_as_expected():\n    assert False\n",
}
MEASURED = {
    "test_measured": """
import sys, pytest

def test_is_measured():
    assert sys.gettrace() is not None

@pytest.mark.no_cover
def test_is_not_measured():
    assert sys.gettrace() is None

def test_is_measured_after_it():
    assert sys.gettrace() is not None
""",
}


RUNS = {
    "lax": (SKIPS | NO_SKIPS, []),
    "strict": (SKIPS | NO_SKIPS, ["--fail-on-skip"]),
    "strict without skips": (NO_SKIPS, ["--fail-on-skip"]),
    "strict without tests": (NO_SKIPS, ["--fail-on-skip", "-k", "nothing"]),
    "measured in several processes": (MEASURED, ["--cov", "--cov-report=", "--numprocesses", "1"]),
}
# A process that has imported torch, and what the fixtures let it import, forks one for each run.
FORKS = """
import json, os, sys
import pytest, torch
from torchstorm.plan import search

torch.use_deterministic_algorithms(False)
for folder, options in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.dup2(os.open("said", os.O_CREAT | os.O_WRONLY), 1)
        usual = ["-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider", "-rA"]
        code = pytest.main([*usual, "--continue-on-collection-errors", ".", *options])
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and what was said, by the run's name."""
    given = []
    for name, (sources, options) in RUNS.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        shutil.copy(Path(__file__).with_name("conftest.py"), folder / "conftest.py")
        for module, source in sources.items():
            (folder / f"{module}.py").write_text(source)
        given.append((str(folder), options))
    command = [sys.executable, "-c", FORKS, json.dumps(given)]
    done = forked.run(command, capture_output=True, text=True, timeout=120, check=True)
    codes = map(int, done.stdout.split())
    return {
        name: (code, (Path(folder) / "said").read_text())
        for name, code, (folder, _) in zip(RUNS, codes, given, strict=True)
    }


def test_every_way_to_skip_fails_where_skips_are_not_allowed_and_nothing_else_does(
    runs: dict[str, tuple[int, str]],
) -> None:
    code, said = runs["lax"]
    assert code == 0
    assert "1 passed, 4 skipped, 1 xfailed" in said
    code, said = runs["strict"]
    assert code == 1
    assert re.search(r" 1 failed, 1 passed, 1 xfailed, 3 errors in", said), said
    assert said.count("skipped, and --fail-on-skip allows none") >= 4


def test_a_run_without_skips_passes_where_none_are_allowed(runs: dict[str, tuple[int, str]]) -> None:
    code, said = runs["strict without skips"]
    assert code == 0
    assert "1 passed, 1 xfailed" in said


def test_a_run_of_no_tests_fails(runs: dict[str, tuple[int, str]]) -> None:
    code, said = runs["strict without tests"]
    assert code == 5
    assert "2 deselected" in said


def test_coverage_in_several_processes_stops_where_a_test_says_so_and_goes_on_after_it(
    runs: dict[str, tuple[int, str]],
) -> None:
    code, said = runs["measured in several processes"]
    assert code == 0, said
    assert "3 passed" in said
