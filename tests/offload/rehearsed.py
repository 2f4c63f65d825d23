"""A Session that takes the CPU for a GPU: the device's memory is the storages that PyTorch's operations have made and
that are still there, counted one by one. So what only a GPU's budget asks for (who holds what, and what lies there
while something is computed again) is gone through without one, byte by byte."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchstorm.memory.device import DeviceTier
from torchstorm.memory.tier import TierSpec
from torchstorm.offload import session
from torchstorm.offload.budget import Tiers
from torchstorm.offload.replan import user_plan
from torchstorm.offload.session import Session
from torchstorm.offload.step.clock import Clock, CpuClock
from torchstorm.plan.forecast import RAM
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget, Plan

_RAM_BYTES = 2**40


class Meter(TorchDispatchMode):
    """Counts storages from the operation that makes one until it is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self._known or not nbytes:
            return tensor

        def gone(_: object) -> None:
            del self._known[address]
            self.live_bytes -= nbytes

        self._known[address] = weakref.ref(storage, gone)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return tensor

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.hold(leaf)
        return out


class _Device:
    """The CPU, which says that it is a GPU."""

    type, index = "cuda", 0

    def __eq__(self, other: object) -> bool:
        return other == torch.device("cpu")

    def __hash__(self) -> int:
        return 0


_empty = torch.empty


def _empty_there(*size: Any, device: object = None, **options: Any) -> torch.Tensor:
    return _empty(*size, device=None if isinstance(device, _Device) else device, **options)  # type: ignore[arg-type]


class _Even:
    """A clock by which everything takes as long: what is planned depends on nothing that disturbs a test."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def mark(self) -> float:
        self._now_s += 1e-3
        return self._now_s


class Fast:
    """The CPU as a fast tier that is like a GPU: see `FastTier`."""

    name = "vram"
    counts_all = is_beside_host = True

    def __init__(self, meter: Meter, clock: Clock) -> None:
        self.device: Any = _Device()
        self._meter, self._clock = meter, clock

    def clock(self) -> Clock:
        return self._clock

    def synchronize(self) -> None:
        pass

    def keep_busy(self, seconds: float) -> None:
        pass

    def is_idle(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def begin_step(self) -> None:
        self.reset_peak()

    def allocated_bytes(self) -> int:
        return self._meter.live_bytes

    def peak_bytes(self) -> int:
        return self._meter.peak_bytes

    def reset_peak(self) -> None:
        self._meter.reset_peak()

    def unused_bytes(self, limit_bytes: int) -> int:
        return limit_bytes - self._meter.live_bytes

    def in_use(self, held_bytes: int, limit_bytes: int) -> tuple[int, int, int]:
        return self._meter.live_bytes, self._meter.live_bytes, limit_bytes - self._meter.live_bytes

    def empty(self, nbytes: int, phase: int) -> torch.Tensor:
        return self._meter.hold(torch.empty(nbytes, dtype=torch.uint8))


class _Tiers(Tiers):
    speeds: Machine

    def machine(self) -> Machine:
        return self.speeds


class Rehearsal:
    """Sessions that take the CPU for a GPU, within one test.

    Args:
        monkeypatch: of the test.
        link_bytes_per_s: of the simulated link to RAM.
        is_even: whether everything takes as long, by the device's clock.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, link_bytes_per_s: float, is_even: bool = False) -> None:
        self.meter = Meter()
        self._clock: Clock = _Even() if is_even else CpuClock()
        self.machine = Machine(
            name="rehearsed",
            device="cuda",
            ram_bytes=_RAM_BYTES,
            d2h_bytes_per_s=link_bytes_per_s,
            h2d_bytes_per_s=link_bytes_per_s,
        )
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(torch.cuda, "default_generators", (torch.default_generator,))
        monkeypatch.setattr(torch, "empty", _empty_there)

    def session(
        self,
        model: torch.nn.Module,
        vram: int,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        plan: Plan | None = None,
        spare_bytes: int = 0,
        knows_optimizer: bool = True,
    ) -> Session:
        """A Session with such a budget.

        Args:
            optimizer, plan: as for `Session`; left out: one without state, and none.
            spare_bytes: of the budget, which plans leave free.
            knows_optimizer: whether the Session is given one.
        """
        for tensor in [*model.parameters(), *model.buffers()]:
            self.meter.hold(tensor)
        fast = Fast(self.meter, self._clock)
        tiers = _Tiers(
            fast=fast,
            budget=Budget(vram=vram, ram=_RAM_BYTES),
            fast_bytes=vram,
            slow={RAM: DeviceTier(TierSpec(name="ram", capacity_bytes=_RAM_BYTES))},
            default_tier=RAM,
            spare=Budget(vram=spare_bytes),
        )
        tiers.speeds = self.machine
        with self._monkeypatch.context() as patch:
            patch.setattr(session, "build_tiers", lambda *_, **__: tiers)
            patch.setattr(user_plan, "model_device", lambda _: fast.device)
            given_one = (optimizer or torch.optim.SGD(model.parameters())) if knows_optimizer else None
            return Session(model, optimizer=given_one, plan=plan)
