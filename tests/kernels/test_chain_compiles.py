"""Kernels that begin while the one before ends: who says so, who waits, and that waiting comes before all else."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from kernels.compiling import compiled
from torchstorm.kernels import rows
from torchstorm.kernels.batch_norm import launch_triton as batch_norm
from torchstorm.kernels.batch_norm.op import batch_norm_act_backward, batch_norm_act_op
from torchstorm.kernels.elementwise import launch_triton as elementwise
from torchstorm.kernels.norms import launch_triton as norms

__all__ = ["compiled"]  # a fixture

MAY_BEGIN, WAIT = "griddepcontrol.launch_dependents", "griddepcontrol.wait"


def _norm() -> None:
    x, row = torch.zeros(512, 1024), torch.zeros(512)
    norms.backward(x, x, x[0], row, row, True, True, True, x.dtype, "persistent")


def _batch_norm() -> None:
    x, C = torch.zeros(4096, 64), torch.zeros(64)
    batch_norm_act_op(x, C, C, None, None, 1e-5, "silu", "two-stage")
    batch_norm_act_backward(x, x, C, C, C, C, True, 1e-5, "silu", "two-stage")


def _sum() -> None:
    elementwise.product_sum(torch.zeros(4096, 64), None, torch.zeros(64))


FIRST, BETWEEN, LAST = (False, True), (True, True), (True, False)  # whether it waits, and lets the next begin
CHAINS: dict[str, tuple[Callable[[], None], dict[str, tuple[bool, bool]]]] = {
    "norm": (_norm, {"persistent_kernel": FIRST, "totals_kernel": LAST}),
    "batch_norm": (
        _batch_norm,
        {
            **{"statistics_kernel": FIRST, "merge_statistics_kernel": BETWEEN, "normalise_kernel": LAST},
            **{"gradient_sums_kernel": FIRST, "merge_sums_kernel": BETWEEN, "x_gradient_kernel": LAST},
        },
    ),
    "sum": (_sum, {"sums_kernel": FIRST, "sums_kernel of parts": LAST}),
}


@pytest.mark.parametrize("name", CHAINS)
def test_on_hopper_each_waits_before_it_reads_and_lets_the_next_begin(
    compiled: list[tuple[str, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (rows, norms, batch_norm, elementwise):
        monkeypatch.setattr(module, "chained", lambda _: True)
    run, expected = CHAINS[name]
    run()
    for (kernel_name, kernel), (expected_name, says) in zip(compiled, expected.items(), strict=True):
        assert kernel_name == expected_name.split()[0]
        ptx = kernel.asm["ptx"]
        assert (WAIT in ptx, MAY_BEGIN in ptx) == says, kernel_name
        assert kernel.metadata.launch_pdl == (WAIT in ptx)
        reads = re.search(r"ld\.global|cp\.async|st\.global", ptx)
        assert reads is not None
        assert ptx.find(WAIT) < reads.start()


@pytest.mark.parametrize("compiled", [80], indirect=True)
@pytest.mark.parametrize("name", CHAINS)
def test_elsewhere_nothing_is_said_of_it(compiled: list[tuple[str, Any]], name: str) -> None:
    CHAINS[name][0]()
    assert compiled
    assert all("griddepcontrol" not in kernel.asm["ptx"] for _, kernel in compiled)
