"""How a batch is cut into micro-batches: along what, into how many, and what of a model notices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from torchstorm.errors import BudgetError, ConfigError


@dataclass(frozen=True, kw_only=True)
class Work:
    """A batch, and how it can be split.

    Attributes:
        whole: the batch as it was given.
        leaves, spec: what is in it, and the nest around that.
        num_rows: samples in it, dim 0 of its first tensor that has one; 0 where there is none, so nothing can be split.
    """

    whole: Any
    leaves: list[Any]
    spec: TreeSpec
    num_rows: int

    @staticmethod
    def of(batch: Any) -> Work:
        """Looks at a batch."""
        leaves, spec = tree_flatten(batch)
        lengths = [leaf.shape[0] for leaf in leaves if _has_rows(leaf)]
        return Work(whole=batch, leaves=leaves, spec=spec, num_rows=lengths[0] if lengths else 0)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors in it."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def kind(self) -> tuple[Any, ...]:
        """The same for batches that differ only in how many samples they have and in what they hold."""
        return tuple(
            (tuple(leaf.shape[1:] if self._is_split(leaf) else leaf.shape), leaf.dtype) for leaf in self.tensors
        )

    def parts(self, num_parts: int) -> Iterator[tuple[Any, int]]:
        """The micro-batches in order, each with its number of samples; sizes differ by one at most.

        They are copies: of a view autograd would save the whole batch, so that steps of batches that differ in length
        could not share a plan; and what `fn` changes in place is not the caller's.

        Args:
            num_parts: how many; 1 gives the batch itself.
        """
        if num_parts == 1:
            yield self.whole, max(1, self.num_rows)
            return
        start = 0
        for size in part_sizes(self.num_rows, num_parts):
            leaves = [leaf.narrow(0, start, size).clone() if self._is_split(leaf) else leaf for leaf in self.leaves]
            yield tree_unflatten(leaves, self.spec), size
            start += size

    def check(self, num_parts: object) -> None:
        """Whether it can be split into so many parts.

        Raises:
            ConfigError: it cannot.
        """
        if not isinstance(num_parts, int) or isinstance(num_parts, bool) or num_parts < 1:
            raise ConfigError(f"micro_batches={num_parts!r}, but it must be an integer of at least 1.")
        if num_parts > max(1, self.num_rows):
            raise ConfigError(f"micro_batches={num_parts} was given, but {self.why_not()}")

    def why_not(self) -> str:
        """Why it cannot be split (further)."""
        if self.num_rows:
            return f"the batch has {self.num_rows} samples: dim 0 of its first tensor."
        return (
            f"no tensor with a first dimension was found in the batch, a {type(self.whole).__name__}: give a tensor, "
            "or dicts, lists and tuples of tensors (of another mapping, dict(batch))."
        )

    def _is_split(self, leaf: object) -> bool:
        return _has_rows(leaf) and leaf.shape[0] == self.num_rows  # type: ignore[attr-defined]


def _has_rows(leaf: object) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided or leaf.is_nested:
        return False
    return leaf.dim() > 0 and leaf.shape[0] > 0


def part_sizes(num_rows: int, num_parts: int) -> list[int]:
    """Sizes of so many parts, the larger ones first."""
    size, more = divmod(num_rows, num_parts)
    return [size + 1] * more + [size] * (num_parts - more)


def choose_num_parts(num_rows: int, at_least: int) -> int:
    """How many parts, where so many are needed: equal ones if that does not take twice as many or more.

    Equal parts have one shape, and so one plan.
    """
    return next((number for number in range(at_least, 2 * at_least) if num_rows % number == 0), at_least)


def rows_that_fit(points: Sequence[tuple[int, int]], *, fixed_bytes: int, budget_bytes: int) -> int:
    """How many samples at once should fit a budget, at least 1, less than any that did not.

    Args:
        points: (samples at once, bytes that they needed) for all that did not fit, in the order of trying.
        fixed_bytes: what is needed without any. Where two points say otherwise, those count.
        budget_bytes: what there is.
    """
    rows, needed = points[-1]
    others = [point for point in points if point[0] != rows]
    if others and (others[-1][1] - needed) * (others[-1][0] - rows) > 0:
        per_row = (others[-1][1] - needed) / (others[-1][0] - rows)
    else:
        per_row = max(0, needed - fixed_bytes) / rows
    over = needed - budget_bytes
    fits = rows - math.ceil(over / per_row) if per_row > 0 else 1
    return max(1, min(fits, min(point[0] for point in points) - 1))


def with_micro_batch(error: BudgetError, *, num_samples: int, fixed_bytes: int) -> BudgetError:
    """The error, with the micro-batch that should fit.

    Args:
        error: of a step that needed too much of the fast tier.
        num_samples: in its batch; below 2 nothing is added.
        fixed_bytes: what is needed without any.
    """
    if num_samples < 2:
        return error
    points = [(num_samples, error.needed_bytes)]
    fits = rows_that_fit(points, fixed_bytes=fixed_bytes, budget_bytes=error.budget_bytes)
    hint = f"Or a micro-batch: {fits} of this batch of {num_samples} samples would fit by estimate"
    return error.with_micro_batch(f"{hint}; storm.run(fn, batch) splits by itself.", fits)


def what_differs(model: torch.nn.Module) -> str:
    """What in a model makes a split batch differ from a whole one by more than the order of adding up; "" for nothing.

    Only what modules show is found: random masks by their probability, statistics over the batch by their class.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if not module.training:
            continue
        kind = type(module).__name__
        if isinstance(module, torch.nn.modules.batchnorm._NormBase):
            if module.track_running_stats or isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                found.setdefault(f"{kind} (statistics over the batch)", name)
        elif isinstance(module, torch.nn.RReLU):
            found.setdefault(f"{kind} (random slopes)", name)
        else:
            # Modules of many libraries keep the probability as a number, and hand it to a function.
            for attribute, value in vars(module).items():
                is_named = "drop" in attribute.lower() or (
                    attribute == "p" and isinstance(module, torch.nn.modules.dropout._DropoutNd)
                )
                if is_named and isinstance(value, float) and value > 0:
                    found.setdefault(f"{kind} ({attribute}={value:g})", name)
    return ", ".join(f"{what} in {name!r}" if name else what for what, name in found.items())
