"""Kernels for rows of pointwise operations as a C++ compiler makes them for this CPU: what CUDA's own functions round
is rounded the same way, so that all but the GPU's exponentials and the like gives the GPU's bits."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from torchstorm import nvrtc
from torchstorm.offload.fast import Cpu
from torchstorm.offload.recompute import compared, fused, pointwise
from torchstorm.offload.recompute.groups import Group

_BEFORE = """
#include <cmath>
#include <cstring>
#include <utility>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
struct { unsigned x; } blockIdx, threadIdx;
static float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
static unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
static float __fadd_rn(float x, float y) { return x + y; }
static float __fsub_rn(float x, float y) { return x - y; }
static float __fmul_rn(float x, float y) { return x * y; }
static float __fdiv_rn(float x, float y) { return x / y; }
static float __fsqrt_rn(float x) { return std::sqrt(x); }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
"""
_AFTER = """
template <typename... A, std::size_t... at>
void call(void (*kernel)(A...), void **places, std::index_sequence<at...>) { kernel(*static_cast<A *>(places[at])...); }
template <typename... A> void call(void (*kernel)(A...), void **places) {
    call(kernel, places, std::index_sequence_for<A...>());
}
extern "C" void run(void **places, unsigned blocks, unsigned threads) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) call(KERNEL, places);
}
"""
_EDGES = tuple(one for one in compared._EDGES if abs(one) < 1e9)  # NaN, and what comes to it, has other bits on a CPU


@functools.cache
def _library(code: str) -> Any:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        source.write_text(_BEFORE + code + _AFTER.replace("KERNEL", pointwise.KERNEL))
        options = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
        subprocess.run([compiler, *options, source, "-o", out], check=True)
        return ctypes.CDLL(str(out))


def prepare(source: nvrtc.Source, device: torch.device, places: Any) -> Any:
    """In place of `compared.prepare`."""
    run = _library(source.text()).run

    def launch(blocks: int, threads: int) -> None:
        run(places, ctypes.c_uint(blocks), ctypes.c_uint(threads))

    return launch


def compile_one(kernel: compared.Kernel) -> None:
    """In place of `compared.compile_one`."""
    kernel.is_compiled = True


def use(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Chains on the CPU are considered as on a GPU, and their kernels taken up as a step begins.

    Returns:
        The groups that have run, as they run.
    """
    ran: list[Group] = []
    run, begin_step = Group.run, Cpu.begin_step

    def noted(self: Group, there: Any) -> Any:
        ran.append(self)
        return run(self, there)

    def begin(self: Cpu) -> None:
        fused.take_over()
        begin_step(self)

    monkeypatch.setattr(Group, "run", noted)
    monkeypatch.setattr(Cpu, "begin_step", begin)
    monkeypatch.setattr(compared, "prepare", prepare)
    monkeypatch.setattr(compared, "compile_one", compile_one)
    monkeypatch.setattr(compared, "_kernels", {})
    monkeypatch.setattr(compared, "_EDGES", _EDGES)
    monkeypatch.setattr(compared, "_SPREAD", 2.0)
    monkeypatch.setattr(fused, "_waiting", [])
    monkeypatch.setattr(fused, "is_on", lambda device: True)
    return ran
