"""From the sizes that the user names to the tiers a Session works with."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace

import torch

from torchstorm.errors import BudgetError, DeviceError, SizeError
from torchstorm.memory.disk import DiskTier
from torchstorm.memory.host import HostTier
from torchstorm.memory.limits import available_ram_bytes
from torchstorm.memory.staged import StagedDiskTier
from torchstorm.memory.tier import Tier, TierSpec
from torchstorm.offload.fast import FastTier, fast_tier_on
from torchstorm.offload.measure import measure_machine
from torchstorm.offload.step.saving import slab_bytes
from torchstorm.paths import path_text, user_path
from torchstorm.plan.forecast import DISK, KEEP, RAM, Figures
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget
from torchstorm.sizes import format_size, parse_size
from torchstorm.transfer.engine import Engine
from torchstorm.transfer.pinned import PinnedArena, pin_memory

_UNLIMITED_BYTES = 1 << 62
# Of one system call of the disk's: whoever makes it takes a core, and Python's lock, from what computes.
_STRAIGHT_BYTES = 2**24
# A library may take a workspace after the measured step, and the allocator rounds what it hands out: a piece of a free
# one of its segments is up to 1 MiB larger than what was asked for, by what else was there before.
_LEAST_SPARE_BYTES, _MOST_SPARE_BYTES, _SPARE_PART = 16 * 2**20, 64 * 2**20, 400
_LARGEST_SEGMENT_BYTES = 2**29  # to unpin 256 MiB takes 5 to 20 ms, in which CUDA does nothing else
_GIVING_BACK = 0.002  # of the time of training, at most so much for unpinning what no plan has a use for


@dataclass(eq=False, kw_only=True)
class Tiers:
    """The fast device of one Session, the tiers below it, and what they may take.

    Attributes:
        fast: the fast device.
        budget: bytes per tier, as the user named them.
        fast_bytes: what the Session may fill the fast device with.
        spare: what plans leave free of the budget.
        slow: where tensors can go.
        default_tier: where they go without a plan.
        staging_bytes: constant part of the fast tier's budget.
        gives_back_at_s: when the next pinned memory may be unpinned that no plan has a use for, by `time.perf_counter`.
    """

    fast: FastTier
    budget: Budget
    fast_bytes: int
    spare: Budget = field(default_factory=Budget)
    slow: dict[str, Tier] = field(default_factory=dict)
    default_tier: str = KEEP
    staging_bytes: int = 0
    directory: str | None = None
    arenas: list[PinnedArena] = field(default_factory=list)
    gives_back_at_s: float = 0.0

    def allows(self, figures: Figures | None, more_bytes: int) -> bool:
        """Whether a step with such peaks keeps to the budget of the fast tier, with `more_bytes` that are not the
        Session's."""
        assert figures is not None
        taken_bytes: int = getattr(figures, f"{self.fast.name}_bytes")
        return taken_bytes + more_bytes <= self.fast_bytes

    def judge_shortfall(self, needed_bytes: int, block: str, *, is_measured: bool) -> str:
        """What to note of a step without a plan that needed more RAM than the budget has, where RAM is the fast tier.

        Raises:
            BudgetError: it was not one that is measured, and after which a plan was found.
        """
        if is_measured:
            return (
                f"A step that was measured, and had no plan yet, took {format_size(needed_bytes)} of ram="
                f"{format_size(self.budget.ram)}: nowhere was room for more. More disk= keeps such steps, too."
            )
        where = f"block {block!r} alone" if block else "one moment"
        raise BudgetError(
            f"ram={format_size(self.budget.ram)}, but {where} needs {format_size(needed_bytes)} at once in this step, "
            f"which differs from those before it. Give at least ram={needed_bytes} ({format_size(needed_bytes)}), or "
            "disk= where there is none.",
            tier="ram",
            budget_bytes=self.budget.ram,
            needed_bytes=needed_bytes,
            block=block,
        )

    def add_arena(self, capacity_bytes: int) -> PinnedArena:  # pragma: gpu
        """Opens an arena whose bytes count as `ram`; its segments are small beside the whole."""
        arena = PinnedArena(
            capacity_bytes,
            pin=pin_memory,
            available_bytes=available_ram_bytes,
            segment_bytes=max(min(2**28, capacity_bytes // 64), 2**25),
            largest_bytes=_LARGEST_SEGMENT_BYTES,
        )
        self.arenas.append(arena)
        return arena

    def spare_with(self, slack_bytes: int) -> Budget:
        """`spare`, with so many bytes more of the fast tier."""
        return replace(self.spare, **{self.fast.name: getattr(self.spare, self.fast.name) + slack_bytes})

    def own_bytes(self, fast_bytes: int) -> int:
        """What a Session with such a budget on the fast tier takes of it: bounce buffers, and larger shared buffers."""
        growth = max(0, slab_bytes(fast_bytes) - slab_bytes(self.fast_bytes))
        threads, block = (0, 0) if self.fast.is_beside_host else bounce_buffers(fast_bytes)
        return threads * block + 2 * growth

    def machine(self) -> Machine:
        """Speeds of the link and the disk, measured on first use."""
        return measure_machine(self.fast.device, self.directory)

    def ram_bytes(self) -> int:
        """On CUDA, what the arenas have taken from the machine."""
        return sum(arena.held_bytes for arena in self.arenas)

    def disk_bytes(self) -> int:
        """Peak of bytes in spill files since the step began."""
        return self.slow[DISK].peak_bytes if DISK in self.slow else 0

    def trim(self, ram_bytes: int) -> None:
        """Chooses pinned memory that plans, which take at most so much of it, need not have. `give_back` unpins it."""
        if self.arenas:  # pragma: gpu
            self.arenas[-1].trim(max(0, ram_bytes - self.spare.ram), one_by_one=True)

    def begin_step(self) -> None:
        """A step begins: peaks count from here, and a little of what `trim` has chosen is unpinned. Raises as the fast
        tier does."""
        self.fast.begin_step()
        self.give_back()
        for tier in self.slow.values():
            tier.reset_peak()

    def give_back(self) -> None:
        """Unpins a segment of what `trim` has chosen, if the device has nothing to do: CUDA waits until it has not, and
        begins nothing meanwhile. That takes a small share of training's time."""
        if not self.arenas or not self.arenas[-1].is_leaving:
            return
        began_s = time.perf_counter()
        if began_s >= self.gives_back_at_s and self.fast.is_idle():
            self.arenas[-1].release_one()
            now_s = time.perf_counter()
            self.gives_back_at_s = now_s + (now_s - began_s) / _GIVING_BACK

    def notes(self) -> tuple[str, ...]:
        """What the user should know about the paths in use."""
        notes = []
        for reason in {arena.not_pinned for arena in self.arenas if arena.not_pinned}:  # pragma: gpu
            notes.append(f"ram is pageable: {reason}")
        disk = self.slow.get(DISK)
        if isinstance(disk, DiskTier | StagedDiskTier):
            info = disk.info()
            notes.append(f"disk: {info.path} I/O ({info.reason})")
        return tuple(notes)

    def close(self) -> None:
        """Closes every tier."""
        for tier in self.slow.values():
            tier.close()
        self.fast.close()


def build_tiers(
    model: torch.nn.Module,
    *,
    vram: int | str | None,
    ram: int | str | None,
    disk: str | os.PathLike[str] | None,
    check: bool,
    unlimited: bool,
) -> Tiers:
    """Reads the budgets and opens the tiers. Raises as `Session` does."""
    fast = fast_tier_on(model_device(model), has_budget=not unlimited)
    if fast.name != "vram" and vram is not None:
        raise DeviceError(
            f"vram={vram!r} was given, but the model's parameters are on the CPU, where RAM is the fast tier. "
            "Move the model to a GPU, or give ram= and disk= instead."
        )
    if unlimited:
        if not (vram is ram is disk is None):
            raise DeviceError(f"unlimited=True was given together with vram={vram!r}, ram={ram!r}, disk={disk!r}.")
        return Tiers(fast=fast, budget=Budget(), fast_bytes=_UNLIMITED_BYTES)
    ram_bytes = available_ram_bytes() // 2 if ram is None else parse_size(ram, name="ram")
    directory, disk_bytes = parse_disk(disk)
    if fast.name == "vram":  # pragma: gpu
        return _cuda_tiers(fast, vram, ram_bytes, directory, disk_bytes, check)
    tiers = Tiers(fast=fast, budget=Budget(ram=ram_bytes), fast_bytes=ram_bytes, directory=directory)
    if directory is not None:
        threads, block = bounce_buffers(ram_bytes)
        tier = DiskTier(
            directory,
            capacity_bytes=disk_bytes,
            check=check,
            threads=threads,
            block_bytes=block,
            straight_bytes=_STRAIGHT_BYTES,
            unattended=True,
        )
        tiers.slow[DISK] = tier
        tiers.default_tier = DISK
        tiers.staging_bytes = threads * block  # once the disk is used
        tiers.budget = Budget(ram=ram_bytes, disk=tier.spec.capacity_bytes)
    return tiers


def _cuda_tiers(
    fast: FastTier,
    vram: int | str | None,
    ram_bytes: int,
    directory: str | None,
    disk_bytes: int | None,
    check: bool,
) -> Tiers:  # pragma: gpu
    device, total = fast.device, torch.cuda.mem_get_info(fast.device)[1]
    allocated, reserved, free = fast.in_use(0, 0)
    room = free + reserved
    vram_bytes = room * 9 // 10 if vram is None else parse_size(vram, name="vram")
    if vram_bytes > total:
        raise BudgetError(
            f"vram={format_size(vram_bytes)}, but {torch.cuda.get_device_name(device)} has {format_size(total)}, of "
            f"which {format_size(room)} are free. Give at most vram={room}.",
            tier="vram",
            budget_bytes=vram_bytes,
            needed_bytes=total,
        )
    if allocated >= vram_bytes:
        raise BudgetError(
            f"vram={format_size(vram_bytes)}, but {format_size(allocated)} are allocated before the first step (the "
            "weights and what else this process holds). Give a larger vram=.",
            tier="vram",
            budget_bytes=vram_bytes,
            needed_bytes=allocated,
        )
    engine = Engine(device)
    tiers = Tiers(
        fast=fast,
        budget=Budget(vram=vram_bytes, ram=ram_bytes),
        fast_bytes=vram_bytes,
        default_tier=RAM,
        directory=directory,
    )
    staging = 0
    if directory is not None:
        piece = max(min(2**24, ram_bytes // 32 // 4096 * 4096), 2**16)
        staging = min(8 * piece, ram_bytes // 4)
        ring = tiers.add_arena(staging)
        disk = DiskTier(directory, capacity_bytes=disk_bytes, check=check)
        tiers.slow[DISK] = StagedDiskTier(disk, ring, engine, piece_bytes=piece)
    arena = tiers.add_arena(ram_bytes - staging)
    tiers.slow[RAM] = HostTier(
        arena, engine=engine, spec=TierSpec(name="ram", capacity_bytes=ram_bytes - staging), check=check
    )
    disk_capacity = tiers.slow[DISK].spec.capacity_bytes if DISK in tiers.slow else 0
    tiers.budget = Budget(vram=vram_bytes, ram=ram_bytes, disk=disk_capacity)
    tiers.spare = Budget(vram=vram_spare_bytes(vram_bytes), ram=staging)
    return tiers


def vram_spare_bytes(vram_bytes: int) -> int:
    """What plans leave free of so much device memory."""
    return max(_LEAST_SPARE_BYTES, min(_MOST_SPARE_BYTES, vram_bytes // _SPARE_PART))


def bounce_buffers(ram_bytes: int) -> tuple[int, int]:
    """How many buffers of how many bytes the disk gets: they count as ram, so a small budget gets small ones."""
    threads = 4 if ram_bytes >= 64 * 2**20 else 2
    return threads, max(min(2**20, ram_bytes // 64 // threads // 4096 * 4096), 64 * 1024)


def model_device(model: torch.nn.Module) -> torch.device:
    """The one device that a model's parameters and buffers are on; the CPU for a model without any.

    Raises:
        DeviceError: they are on several, or on one that is neither CPU nor CUDA.
    """
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]} or {torch.device("cpu")}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        names = ", ".join(sorted(str(device) for device in devices))
        raise DeviceError(
            f"{type(model).__name__} has parameters on {names}, but a Session keeps the budget of one CPU or CUDA "
            "device: move the model to one, or make a Session for each part."
        )
    return devices.pop()


def parse_disk(disk: str | os.PathLike[str] | None) -> tuple[str | None, int | None]:
    """Splits "DIR" or "DIR:SIZE" into directory and bytes. A Path is taken as what it is written as.

    Raises:
        ConfigError: it is no path; see `user_path`.
        SizeError: the part after the last colon is neither a size nor part of an existing directory's name.
    """
    if disk is None:
        return None, None
    text = path_text(disk, name="disk")
    directory, colon, size = text.rpartition(":")
    if not colon or os.path.isdir(os.path.expanduser(text)):
        return str(user_path(text, name="disk")), None
    if not directory:
        raise SizeError(f"disk={text!r} names no directory: write DIR or DIR:SIZE.")
    return str(user_path(directory, name="disk")), parse_size(size, name=f"disk={text!r}: the size")
