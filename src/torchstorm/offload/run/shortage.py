"""What a Session does when the device has run out of memory within a step.

The step is dropped: what it saved, and the gradients that it made. The figures of the failure say how much room there
really was, and the next plan for such a step keeps more of the budget free. What was copied nowhere cannot be brought
back, so a gradient that the step has added to in place keeps what was added; the error says so.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchstorm.errors import BudgetError, OutOfVRAMError
from torchstorm.offload.fast import FastTier
from torchstorm.offload.step.hooks import SavedTensors
from torchstorm.offload.step.residency import Residency
from torchstorm.sizes import format_size

Planned = TypeVar("Planned")

# What CUDA's libraries say when the memory that they need themselves is not there.
_OTHER_WORDS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device has no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OTHER_WORDS)


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """The figures of an out-of-memory, in bytes.

    Attributes:
        reason: the first line of what PyTorch said.
        allocated_bytes: in tensors, when it was noticed.
        reserved_bytes: what the allocator held of the device, those included.
        free_bytes: of the device, held by nobody.
        asked_bytes: of the allocation that failed; 0 where that is not known.
        budget_bytes: what the Session may fill; 0 without a budget.
    """

    reason: str
    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    asked_bytes: int
    budget_bytes: int

    @staticmethod
    def read(error: BaseException, fast: FastTier, *, held_bytes: int, budget_bytes: int) -> Shortage:
        """Reads the figures while what the step allocated is still there.

        Args:
            error: what was raised.
            fast: the fast device.
            held_bytes: what the Session holds there.
            budget_bytes: what it may hold.
        """
        reason = (str(error).splitlines() or ["out of memory"])[0]
        asked = _ASKED.search(reason)
        allocated, reserved, free = fast.in_use(held_bytes, budget_bytes)
        return Shortage(
            reason=reason,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            free_bytes=free,
            asked_bytes=int(float(asked[1]) * _UNITS[asked[2]]) if asked else 0,
            budget_bytes=budget_bytes,
        )

    def slack_bytes(self, slack_bytes: int) -> int:
        """What plans should keep free of the budget from now on, where they kept `slack_bytes`.

        That much was allocated and could not be had: a plan must stay below it. Where the step went beyond what the
        plan allowed itself, it will do so again. A fiftieth of the budget comes on top.
        """
        reached = self.allocated_bytes + self.asked_bytes
        missed = reached - (self.budget_bytes - slack_bytes)
        return max(slack_bytes + max(0, missed), self.budget_bytes - reached) + self.budget_bytes // 50

    def error(self, *, planned_anew: bool, lost: list[str]) -> OutOfVRAMError:
        """The error that asks for a repeat.

        Args:
            planned_anew: whether the step's plan now keeps more free.
            lost: names of the gradients that cannot be restored.
        """
        asked = f", {format_size(self.asked_bytes)} more were requested" if self.asked_bytes else ""
        budget = f"; the budget is {format_size(self.budget_bytes)}" if self.budget_bytes else ""
        plan = "a new plan keeps more of the budget free" if planned_anew else "there was no plan to change"
        gradients = "and its gradients dropped"
        if lost:
            gradients = (
                f"but {len(lost)} gradients that existed before it hold a part of it ({lost[0]!r} is the first): call "
                "zero_grad() and begin again with the first step that added to them"
            )
        return OutOfVRAMError(
            f"The device ran out of memory in this step: {format_size(self.allocated_bytes)} were allocated, "
            f"{format_size(self.reserved_bytes)} reserved and {format_size(self.free_bytes)} free{asked}{budget}. The "
            f"step was dropped, {gradients}; {plan}. Repeat the step, or let storm.run(fn, batch) repeat and split it. "
            f"({self.reason})",
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            free_bytes=self.free_bytes,
            asked_bytes=self.asked_bytes,
            budget_bytes=self.budget_bytes,
            planned_anew=planned_anew,
            lost_gradients=tuple(lost),
        )


class Gradients:
    """Which gradients there are at a step's entry. It keeps none of them alive: a step may well zero them.

    Args:
        tensors: those whose gradients a step may change, each once.
        names: gives their names, where an error needs them.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], *, names: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    ) -> None:
        self._names = names
        self._absent: list[torch.Tensor] = []
        self._present: list[tuple[torch.Tensor, StorageWeakRef | None, int]] = []
        self.nbytes = 0
        for tensor in tensors:
            gradient = tensor.grad
            if gradient is None:
                self._absent.append(tensor)
            elif gradient.layout == torch.strided and type(gradient) is torch.Tensor:
                self._present.append((tensor, StorageWeakRef(gradient.untyped_storage()), gradient._version))
                self.nbytes += gradient.nbytes
            else:  # of those nothing tells whether they have changed
                self._present.append((tensor, None, 0))

    def have_changed(self) -> bool:
        """Whether any was made, replaced or added to since."""
        return any(tensor.grad is not None for tensor in self._absent) or any(
            tensor.grad is not None
            and (
                before is None
                or tensor.grad.untyped_storage()._cdata != before.cdata
                or tensor.grad._version != version
            )
            for tensor, before, version in self._present
        )

    def drop(self) -> list[str]:
        """Drops the gradients that the step made; returns the names of those that cannot be restored."""
        for tensor in self._absent:
            tensor.grad = None
        lost = set()
        for tensor, before, version in self._present:
            gradient = tensor.grad
            if gradient is None:
                continue  # zeroed by the step, which will do so again
            if before is None or gradient.untyped_storage()._cdata != before.cdata:
                tensor.grad = None  # one of the step's own in the other's place
                lost.add(id(tensor))
            elif gradient._version != version:
                lost.add(id(tensor))
        return [name for name, tensor in self._names() if id(tensor) in lost]


def held_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that an optimizer updates."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def trained(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batch: Iterable[torch.Tensor] = ()
) -> list[tuple[str, torch.Tensor]]:
    """All tensors, each once, whose gradients a step may change, with names: the model's parameters, those that the
    optimizer has besides, and tensors of the batch that take gradients."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(id(parameter), (name, parameter))
    for held in held_by(optimizer) if optimizer is not None else ():
        found.setdefault(id(held), (f"parameter {len(found)} of the optimizer", held))
    for tensor in batch:
        if tensor.requires_grad and tensor.is_leaf:
            found.setdefault(id(tensor), (f"tensor of the batch, shape {tuple(tensor.shape)}", tensor))
    return list(found.values())


def drop_step(saved: SavedTensors, error: BaseException) -> None:
    """Lets go of all that the running step saved, also where a loss in the caller's hands still refers to it.

    The frames of the traceback hold activations; those that have ended are emptied.
    """
    traceback.clear_frames(error.__traceback__)
    with saved._locked:
        saved.residency.abandon_step()
        saved.forget_measuring()
    saved.end()


def keep_more_free(residency: Residency, shortage: Shortage) -> None:  # pragma: gpu
    """What is decided as it goes keeps clear of what could not be had, too; the allocator gives back what lies idle."""
    torch.cuda.empty_cache()
    reached = shortage.allocated_bytes + shortage.asked_bytes
    limit = min(residency.limit_bytes, reached) - shortage.budget_bytes // 50
    residency.limit_bytes = max(limit, shortage.budget_bytes // 4)


def plan_with_slack(
    plan: Callable[[int], Planned], shortage: Shortage, *, slack_bytes: int, tier: str
) -> tuple[Planned | None, int]:
    """Makes a plan that keeps more of the budget free.

    Args:
        plan: makes one that keeps so many bytes free.
        shortage: what has happened.
        slack_bytes: what plans keep free so far.
        tier: the fast tier, "vram" or "ram".

    Returns:
        The plan and what it keeps free; None and `slack_bytes` where none keeps more free than before.
    """
    wanted = shortage.slack_bytes(slack_bytes)
    for _ in range(2):
        try:
            return plan(wanted), wanted
        except BudgetError as error:
            # With so much kept free nothing fits: the error says by how many bytes, so the most that fits is known.
            wanted -= max(0, error.needed_bytes - error.budget_bytes)
            if error.tier != tier or wanted <= slack_bytes:
                break
    return None, slack_bytes
