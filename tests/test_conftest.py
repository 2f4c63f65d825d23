"""What `make test-gpu` stands on: a run in which something skips, or nothing runs, has failed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

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


def run_pytest(folder: Path, sources: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("conftest.py"), folder / "conftest.py")
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider", "-rA"]
    command += ["--continue-on-collection-errors", ".", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_every_way_to_skip_fails_where_skips_are_not_allowed_and_nothing_else_does(tmp_path: Path) -> None:
    lax = run_pytest(tmp_path, SKIPS | NO_SKIPS)
    assert lax.returncode == 0
    assert "1 passed, 4 skipped, 1 xfailed" in lax.stdout
    strict = run_pytest(tmp_path, {}, "--fail-on-skip")
    assert strict.returncode == 1
    assert re.search(r" 1 failed, 1 passed, 1 xfailed, 3 errors in", strict.stdout), strict.stdout
    assert strict.stdout.count("skipped, and --fail-on-skip allows none") >= 4


def test_a_run_without_skips_passes_where_none_are_allowed(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, NO_SKIPS, "--fail-on-skip").returncode == 0


def test_a_run_of_no_tests_fails(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, NO_SKIPS, "--fail-on-skip", "-k", "nothing").returncode != 0
