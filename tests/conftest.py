"""For all tests: the same random numbers, torch's global switches put back, skips that fail where asked, and which are
quick, or measured by coverage."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from typing import TypeVar

import pytest
import torch
from hypothesis import settings

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


# Plans are made at once, so that every run has the same ones; offload/test_planning_beside.py takes this back.
os.environ["TORCHSTORM_PLAN_NOW"] = "1"

# Inductor compiles and loads a library for every vector extension of the CPU before its first kernel, which takes as
# long as a dozen kernels; here it believes what the CPU says of itself.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Tracing and compiling make millions of objects that stay. Left to itself, Python looks through them for garbage after
# each 700 new ones, which takes a tenth of the time of tests that compile. It still does so many times in each of them.
gc.set_threshold(10_000, 20, 20)

# Every run draws the same examples, so that a change fails for what it does; `make fuzz` draws others each time.
settings.register_profile("same", derandomize=True)
settings.register_profile("fuzz", print_blob=True)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fail-on-skip", action="store_true", help="a test that skips has failed")


# `pytest -m quick`: some tests of every room, in all about 30 s on one core. Files, and within some only these tests.
QUICK = {
    "bench/test_bits.py",
    "bench/test_measure.py",
    "bench/test_rows.py",
    "kernels/test_autocast.py",
    "kernels/test_linear.py::test_no_worse_than_pytorch",
    "kernels/test_matmul.py::test_sizes",
    "kernels/test_mlstm.py::test_any_length_in_any_chunks",
    "kernels/test_mlstm_step.py",
    "kernels/test_norms.py::test_no_worse_than_pytorch[torch",
    "test_nvrtc.py",
    "kernels/test_softmax.py::test_no_worse_than_pytorch[torch",
    "memory/test_device.py",
    "memory/test_limits.py",
    "memory/test_simulated.py",
    "models/test_gpt.py",
    "offload/test_exact.py::test_a_session_changes_no_bit",
    "offload/test_planning.py",
    "plan/test_forecast.py",
    "plan/test_plan.py",
    "plan/test_solve.py::test_placements_follow_the_order_of_moments",
    "plan/test_solve.py::test_the_smallest_budget_named_works_and_a_byte_less_does_not",
    "report/test_curve.py",
    "storage/test_aligned.py",
    "storage/test_choice.py",
    "storage/test_rows.py",
    "storage/test_volume.py::test_every_dtype_and_shape_comes_back_to_the_bit",
    "test_architecture.py::test_a_module_imports_only_what_its_room_may",
    "test_cli_commands.py",
    "train/test_config.py",
    "train/test_texts.py",
    "transfer/test_extents.py",
}
# Of a test's cases, so many are measured by coverage: the others reach the same lines, and being measured takes as long
# again as most tests do.
NUM_CASES_MEASURED = 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_cases: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        test = name.split("[")[0]
        file = test.split("::")[0]
        is_quick = file in QUICK or any(name.startswith(each) for each in QUICK if each.startswith(f"{file}::"))
        if is_quick and not any(item.get_closest_marker(needs) for needs in ("gpu", "nvme")):
            item.add_marker("quick")
        num_cases[test] += 1
        if num_cases[test] > NUM_CASES_MEASURED:
            item.add_marker("no_cover")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """In a process of several, pytest-cov begins to measure twice, and what it saves is the second's. Where `no_cover`
    stops that one, the first would go on, at the same cost."""
    coverage = session.config.pluginmanager.getplugin("_cov")
    if hasattr(session.config, "workerinput") and coverage is not None and coverage.cov_controller is not None:
        coverage.cov_controller.pause()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return _fail_where_skipped(report, item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return _fail_where_skipped(report, collector.config)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    """The C++ is there before the first step, so that no step goes another way than the same one of another run."""
    from torchstorm.offload.native import library  # here, so that what is measured by coverage has begun before
    from torchstorm.offload.native.classes import classes

    library.begin(classes)
    assert library.wait() == ""


@pytest.fixture(scope="session", autouse=True)
def _cheap_seeds() -> Iterator[None]:
    """`torch.manual_seed` notes the stack for each kind of device that has not begun, in a list that grows; a hundred
    times what it takes to seed the CPU. Kinds that are not here need no seeds."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in torch.cuda, torch.xpu, torch.mtia:
            if not kind.is_available():
                patch.setattr(kind, "manual_seed_all", lambda seed: None, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _untimed_guards() -> Iterator[None]:
    """After each compile Dynamo empties the CPU's caches and times its guards, for a log."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("torch._C._dynamo.guards", "torch._dynamo.guards"):
            if module in sys.modules:
                patch.setattr(f"{module}.profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(autouse=True, scope="module")
def short_search() -> Iterator[None]:
    """Searches for plans end early: what these tests hold is how steps follow plans. How good plans are is held to in
    tests/plan, where they end as they do elsewhere."""
    from torchstorm.plan import search

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_STEPS", 2)
        yield


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from the same random numbers, and leaves torch's global switches as they were."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    dtype = torch.get_default_dtype()
    grad = torch.is_grad_enabled()
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    _spare_the_collector()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _CACHE_BYTES:
        torch.cuda.empty_cache()


_CACHE_BYTES = 1 << 30
"""Of a GPU's memory, that a process may hold for its next test: many processes share the GPU."""

_num_modules_spared = 0


def _spare_the_collector() -> None:
    """What was imported is never garbage, and each of the many collections would go through all of it."""
    global _num_modules_spared
    if len(sys.modules) > _num_modules_spared + 100:
        gc.collect()
        gc.freeze()
        _num_modules_spared = len(sys.modules)


def _fail_where_skipped(report: Report, config: pytest.Config) -> Report:
    if config.getoption("--fail-on-skip") and report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and --fail-on-skip allows none: {report.longrepr}"
    return report
