"""`storm.run`: forward and backward by the Session, which may split the batch and repeat after an out-of-memory.

Every micro-batch is a step of its own, so that all of one shape share a plan. Gradients are scaled before backward by
one over the total weight that the first micro-batch predicts; only where the prediction was wrong are they multiplied
once more, at the end.
"""

from __future__ import annotations

import gc
import math
import numbers
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchstorm.errors import BudgetError, ConfigError, OutOfVRAMError, UnsupportedError
from torchstorm.offload.fast import FastTier
from torchstorm.offload.run.shortage import trained
from torchstorm.offload.run.snapshot import Snapshot
from torchstorm.offload.run.split import Work, choose_num_parts, part_sizes, rows_that_fit, what_differs
from torchstorm.sizes import format_size

# Of one number of micro-batches, while each out-of-memory leads to a plan that keeps more free; and where none does,
# before the batch is split, or if it cannot be.
_TRIES_WITH_NEW_PLANS = 4
_TRIES_BEFORE_SPLIT = 2
_TRIES_WITHOUT_SPLIT = 3

Fn = Callable[[Any], Any]


@dataclass(eq=False)
class RunMemory:
    """What a Session's runs remember.

    Attributes:
        rows: by kind of batch, how many samples at once fit. A kind of which every batch fitted is not in it.
        unchanging: names of large buffers that no run has changed so far.
        on_host: whether gradients from before a run must wait in host memory.
        num_repeats: repeats after running out of memory.
        split: of the last batch that was split.
        differs: why that is not the same.
    """

    rows: dict[tuple[Any, ...], int] = field(default_factory=dict)
    unchanging: set[str] | None = None
    on_host: bool = False
    num_repeats: int = 0
    split: str = ""
    differs: str = ""

    def notes(self) -> tuple[str, ...]:
        """What the user should know."""
        repeats = f"run: repeated {self.num_repeats} times after running out of memory" if self.num_repeats else ""
        return tuple(note for note in (self.split, self.differs, repeats) if note)


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """A try that did not fit."""

    num_parts: int
    num_rows: int  # samples in its largest micro-batch
    error: BudgetError | OutOfVRAMError

    def __str__(self) -> str:
        if isinstance(self.error, BudgetError):
            what = f"needs {self.error.tier}={format_size(self.error.needed_bytes)}"
        else:
            what = f"out of memory at {format_size(self.error.allocated_bytes)}"
        return f"{self.num_parts} x {self.num_rows}: {what}"


class _Mean:
    """Sums up losses and weights, on the device where they are."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._share: tuple[int, int] = (1, 1)
        self._losses: list[torch.Tensor] = []
        self._weights: list[float | torch.Tensor] = []
        self._scale: torch.Tensor | None = None

    def add(self, answer: object, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes what `fn` returned for so many samples; gives the loss, and the gradient to begin backward with."""
        loss, weight = _checked(answer)
        self._losses.append(loss.detach().reshape(()))
        self._weights.append(weight)
        if self._scale is None:
            self._share = (self._num_rows, num_rows)
            predicted = _predict(weight, *self._share)
            if isinstance(predicted, torch.Tensor):  # pragma: gpu
                self._scale = (1.0 / predicted).to(loss.dtype)
            else:
                self._scale = torch.full((), 1.0 / predicted, dtype=loss.dtype, device=loss.device)
        return loss, self._scale.reshape(loss.shape)

    def close(self) -> tuple[torch.Tensor, float]:
        """The mean, and what the gradients are still to be multiplied by. Waits for weights that are on a GPU.

        Raises:
            ConfigError: the weights' sum is not positive.
        """
        on_device = [weight for weight in self._weights if isinstance(weight, torch.Tensor)]
        read = iter(torch.stack(on_device).tolist() if on_device else ())
        weights = [float(next(read)) if isinstance(weight, torch.Tensor) else weight for weight in self._weights]
        total = sum(weights)
        if total <= 0:
            raise ConfigError(
                f"The weights that fn returned sum to {total:g} over {len(weights)} calls: a mean is the sum of losses "
                "over the sum of weights, which must be positive. Leave out batches in which nothing counts."
            )
        factor = float(_predict(weights[0], *self._share)) / total
        mean = torch.stack(self._losses).double().sum() / total
        return mean.to(self._losses[0].dtype), factor


def _predict(weight: float | torch.Tensor, num_rows: int, of_rows: int) -> float | torch.Tensor:
    """The total weight, if all samples weigh what the first ones do; the number of samples, if those weigh nothing."""
    parts, rest = divmod(num_rows, of_rows)
    total = weight * num_rows / of_rows if rest else weight * parts
    if isinstance(total, torch.Tensor):  # pragma: gpu
        return torch.where(total > 0, total, num_rows)
    return total if total > 0 else float(num_rows)


def _checked(answer: object) -> tuple[torch.Tensor, float | torch.Tensor]:
    """The loss and the weight; a weight on the host as a number, one on a GPU as a float64 scalar there."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise ConfigError(
            f"fn returned {_described(answer)}; storm.run needs (sum of losses, weight), as in "
            '(F.cross_entropy(logits, labels, reduction="sum"), labels.numel()).'
        )
    loss, weight = answer
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise ConfigError(
            f"fn returned {_described(loss)} as the sum of losses: storm.run needs a tensor of a floating dtype with "
            'one element, as reduction="sum" gives it.'
        )
    if not loss.requires_grad:
        raise ConfigError(
            "fn returned a sum of losses that depends on nothing that requires a gradient: was it detached, or made "
            "under torch.no_grad()?"
        )
    if isinstance(weight, torch.Tensor) and weight.numel() == 1 and not weight.is_complex():
        if weight.requires_grad:
            raise ConfigError(
                "fn returned a weight that requires a gradient, and storm.run divides by it as by a number: detach it, "
                "or make what depends on it part of the loss."
            )
        weight = weight.reshape(()).to(torch.float64)
        return loss, weight if weight.is_cuda else float(weight)
    if isinstance(weight, numbers.Real) and not isinstance(weight, bool):
        return loss, float(weight)
    raise ConfigError(
        f"fn returned {_described(weight)} as the weight: storm.run needs a number, or a tensor with one element, such "
        "as the number of tokens that the losses were summed over."
    )


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(map(_described, value))})"
    return f"{type(value).__name__} {value!r}"[:100]


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs one batch.

    Attributes:
        model, optimizer, fast: the Session's.
        memory: what its runs remember.
        step: begins a step.
        add_inputs: names tensors that never move, within a step.
        fixed_bytes: what a step needs on a tier however small its batch is.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    fast: FastTier
    memory: RunMemory
    step: Callable[[], AbstractContextManager[None]]
    add_inputs: Callable[[list[torch.Tensor]], None]
    fixed_bytes: Callable[[str], int]

    def run(self, fn: Fn, batch: Any, micro_batches: int | None) -> torch.Tensor:
        """See `Session.run`."""
        if not callable(fn):
            raise ConfigError(
                f"storm.run(fn, batch) needs a function to call with the batch, but was given {type(fn).__name__} as "
                "its first argument."
            )
        work = Work.of(batch)
        if micro_batches is not None:
            work.check(micro_batches)
        num_parts = micro_batches or self._remembered(work)
        tensors = trained(self.model, self.optimizer, work.tensors)
        hooked = next((name for name, tensor in tensors if tensor._post_accumulate_grad_hooks), "")
        if num_parts > 1 and hooked:
            raise UnsupportedError(
                f"{hooked!r} has a hook that runs when its gradient is there (an optimizer in backward?); it would run "
                f"in each of {num_parts} micro-batches. Remove the hook, or give a batch that fits whole."
            )
        unchanging = self.memory.unchanging or set()
        snapshot = Snapshot(
            self.model, tensors, work.tensors, self.fast.device, unchanging=unchanging, on_host=self.memory.on_host
        )
        failures: list[_Failure] = []
        try:
            while isinstance(result := self._try(fn, work, num_parts), _Failure):
                failures.append(result)
                num_parts = self._next(work, failures, snapshot, micro_batches, hooked)
                gc.collect()  # what lies in cycles would be missing in the next try
                try:
                    snapshot.rewind()
                except UnsupportedError as refused:
                    raise refused from failures[-1].error
            mean, factor = result.close()
        except BaseException:
            snapshot.put_back()
            raise
        snapshot.add_gradients(factor)
        self._remember(work, num_parts, failures, snapshot)
        return mean

    def _try(self, fn: Fn, work: Work, num_parts: int) -> _Mean | _Failure:
        """All micro-batches, one after the other."""
        mean = _Mean(max(1, work.num_rows))
        for part, num_rows in work.parts(num_parts):
            try:
                with self.step():
                    self.add_inputs([leaf for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor)])
                    loss, scale = mean.add(fn(part), num_rows)
                    torch.autograd.backward(loss, scale)
                    del loss
            except (BudgetError, OutOfVRAMError) as error:
                # What the frames of the failure hold must go before the next try.
                error.__traceback__ = error.__cause__ = error.__context__ = None
                largest = part_sizes(max(1, work.num_rows), num_parts)[0]
                return _Failure(num_parts=num_parts, num_rows=largest, error=error)
        return mean

    def _next(
        self, work: Work, failures: list[_Failure], snapshot: Snapshot, micro_batches: int | None, hooked: str
    ) -> int:
        """Into how many parts to split in the next try.

        Raises:
            BudgetError, OutOfVRAMError: there is nothing left to try.
        """
        last = failures[-1]
        num_tries = sum(failure.num_parts == last.num_parts for failure in failures)
        if hooked:
            raise _gave_up(failures, f"{hooked!r} has a hook that runs when its gradient is there, so nothing repeats.")
        can_split = micro_batches is None and last.num_parts < work.num_rows
        is_out_of_memory = isinstance(last.error, OutOfVRAMError)
        if isinstance(last.error, OutOfVRAMError):
            enough = _TRIES_BEFORE_SPLIT if can_split else _TRIES_WITHOUT_SPLIT
            if num_tries < (_TRIES_WITH_NEW_PLANS if last.error.planned_anew else enough):
                self.memory.num_repeats += 1
                return last.num_parts
        elif last.error.smallest_bytes is None and num_tries == 1:
            # The step was not the one that was planned. That plan is gone, so the next try gets one of its own.
            return last.num_parts
        wanted = self._parts_needed(work, failures)
        if can_split:
            self.memory.num_repeats += is_out_of_memory
            return choose_num_parts(work.num_rows, min(work.num_rows, max(last.num_parts + 1, wanted)))
        if self.fast.counts_all and snapshot.had_gradients and not self.memory.on_host:  # pragma: gpu
            self.memory.on_host = True
            snapshot.move_to_host()
            return last.num_parts
        if micro_batches is not None and last.num_parts < work.num_rows:
            why = f"micro_batches={micro_batches} is too small: try about {wanted}, or leave it out."
        elif work.num_rows > 1:
            why = "Not even one sample fits."
        else:
            why = f"It cannot be split further: {work.why_not()}"
        raise _gave_up(failures, why)

    def _parts_needed(self, work: Work, failures: list[_Failure]) -> int:
        """By the figures of what did not fit: the parts to try next."""
        last = failures[-1]
        if isinstance(last.error, BudgetError):
            points = [
                (failure.num_rows, failure.error.needed_bytes)
                for failure in failures
                if isinstance(failure.error, BudgetError) and failure.error.tier == last.error.tier
            ]
            fixed = self.fixed_bytes(last.error.tier) if last.error.tier else 0
            fits = rows_that_fit(points, fixed_bytes=fixed, budget_bytes=last.error.budget_bytes)
            return math.ceil(work.num_rows / fits)
        # How much it would have needed nobody knows, but what it reached was too much.
        reached = last.error.allocated_bytes + last.error.asked_bytes
        room = last.error.reserved_bytes + last.error.free_bytes
        fixed = self.fixed_bytes(self.fast.name)
        ratio = (reached - fixed) / (room - fixed) if room > fixed else 1.0
        return min(max(1, work.num_rows), math.ceil(last.num_parts * max(2.0, ratio)))

    def _remembered(self, work: Work) -> int:
        """Into how many parts a batch is split that is like others before."""
        limit = self.memory.rows.get(work.kind)
        if limit is None or limit >= work.num_rows:
            return 1
        return choose_num_parts(work.num_rows, math.ceil(work.num_rows / limit))

    def _remember(self, work: Work, num_parts: int, failures: list[_Failure], snapshot: Snapshot) -> None:
        if any(failure.num_parts != num_parts for failure in failures):
            self.memory.rows[work.kind] = part_sizes(work.num_rows, num_parts)[0]
        unchanged = snapshot.unchanged()
        self.memory.unchanging = unchanged if self.memory.unchanging is None else unchanged & self.memory.unchanging
        if num_parts > 1:
            sizes = part_sizes(work.num_rows, num_parts)
            each = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]} or {sizes[-1]}"
            split = f"run: a batch of {work.num_rows} samples was split into {num_parts} micro-batches of {each}"
            if split != self.memory.split:
                found = what_differs(self.model)
                self.memory.differs = f"run: a split batch is not the same as a whole one: {found}" if found else ""
            self.memory.split = split


def _gave_up(failures: list[_Failure], why: str) -> BudgetError | OutOfVRAMError:
    """The last error, with what was tried."""
    last = failures[-1].error
    tried = f"Tried (micro-batches x samples): {'; '.join(map(str, failures))}."
    if isinstance(last, BudgetError):
        return BudgetError(
            f"{last} {why} {tried}",
            tier=last.tier,
            budget_bytes=last.budget_bytes,
            needed_bytes=last.needed_bytes,
            smallest_bytes=last.smallest_bytes,
            block=last.block,
        )
    asked = f", {format_size(last.asked_bytes)} more were requested" if last.asked_bytes else ""
    budget = f"; the budget is {format_size(last.budget_bytes)}" if last.budget_bytes else ""
    return OutOfVRAMError(
        f"The device ran out of memory, and {len(failures)} tries did not help. In the last one "
        f"{format_size(last.allocated_bytes)} were allocated, {format_size(last.reserved_bytes)} reserved and "
        f"{format_size(last.free_bytes)} free{asked}{budget}. {why} {tried} Gradients, buffers and random states are "
        "as before. Free memory on the device, or give a smaller batch.",
        allocated_bytes=last.allocated_bytes,
        reserved_bytes=last.reserved_bytes,
        free_bytes=last.free_bytes,
        asked_bytes=last.asked_bytes,
        budget_bytes=last.budget_bytes,
        planned_anew=last.planned_anew,
    )
