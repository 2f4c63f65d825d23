"""What CUPTI reports of a real step becomes busy and overlap."""

from __future__ import annotations

import time

import pytest
import torch

from torchstorm.bench.intervals import profile_step

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def timed_products(copies: bool) -> float:
    host = torch.empty(64 * 2**20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    one = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        one @ one
    if copies:
        there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def test_products_keep_the_gpu_busy_and_are_no_copies() -> None:
    timed_products(True)
    busy = profile_step(lambda: timed_products(False))
    assert busy.gpu_busy is not None
    assert 0.3 < busy.gpu_busy <= 1.05
    assert busy.overlap is None


def test_a_copy_behind_them_is_seen_and_not_hidden() -> None:
    timed_products(True)
    busy = profile_step(lambda: timed_products(True))
    assert busy.overlap is not None
    assert busy.overlap < 0.2
