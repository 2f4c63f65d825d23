"""For all tests: the same random numbers, torch's global switches put back, skips that fail where asked."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Iterator
from typing import TypeVar

import pytest
import torch

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fail-on-skip", action="store_true", help="a test that skips has failed")


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
