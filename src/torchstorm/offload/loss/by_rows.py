"""Within a step, losses of language models are computed some rows at a time: see `loss.rows`.

What computes its loss by PyTorch's cross entropy gets that from `loss.cross_entropy`. Most of transformers' models cast
the logits to float32 before. What they call for that stands where it can be replaced, so the logits that it is given
are put off: it gets what stands for them, and only what is no cross entropy makes the copy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn._reduction import get_enum, legacy_get_enum
from torch.utils._pytree import tree_map_only

from torchstorm.offload.loss.cross_entropy import CrossEntropy, is_worth_it, running, wants_gradients
from torchstorm.offload.loss.place import StandIn, function_set, with_losses
from torchstorm.offload.recompute.watched import unwatched

_MODULE = "transformers.loss.loss_utils"
_NAMES = frozenset({"ForCausalLMLoss", "ForMaskedLMLoss"})

_is_seen_by_functions = torch._C._is_torch_function_enabled
_cross_entropy, _operator = nn.functional.cross_entropy, torch._C._nn.cross_entropy_loss


class LossByRows(StandIn):
    """Stands where a module has its loss function, while a step runs.

    Args:
        module: which has it.
        by_rows: computes its cross entropy.
    """

    def __init__(self, module: nn.Module, by_rows: CrossEntropy) -> None:
        super().__init__(module)
        self._by_rows = by_rows

    @property
    def may_stand(self) -> bool:
        """Whether nothing else that is not known was set."""
        loss = function_set(self._module)
        return loss is None or _is_known(loss)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self.function
        is_to_put_off = (
            any(is_worth_it(one) for one in (*args, *kwargs.values()))
            and running() is not None  # who has read it from the module in a step may call it after the step
            and wants_gradients()
            and _is_seen_by_functions()
            and _is_known(function)
        )
        if not is_to_put_off:
            return function(*args, **kwargs)
        with unwatched():  # what is made of the logits here is small
            return function(
                *(self._put_off(one) for one in args), **{name: self._put_off(one) for name, one in kwargs.items()}
            )

    def _put_off(self, given: Any) -> Any:
        return _PutOff(given, given.dtype, self._by_rows) if is_worth_it(given) else given


class _PutOff:
    """Logits that are cast only where something needs them so.

    Args:
        logits: as they are.
        dtype: what they are to be cast to.
        by_rows: computes their cross entropy.
    """

    def __init__(self, logits: torch.Tensor, dtype: torch.dtype, by_rows: CrossEntropy) -> None:
        self._logits, self.dtype, self._by_rows = logits, dtype, by_rows

    def whole(self) -> torch.Tensor:
        """The logits, cast."""
        return self._logits.to(self.dtype)

    def float(self) -> _PutOff:
        return _PutOff(self._logits, torch.float32, self._by_rows)

    def view(self, *shape: Any) -> Any:
        if not self._logits.is_contiguous() or any(isinstance(one, torch.dtype) for one in shape):
            return self.whole().view(*shape)
        return _PutOff(self._logits.view(*shape), self.dtype, self._by_rows)

    @property
    def device(self) -> torch.device:
        return self._logits.device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    def __getitem__(self, where: Any) -> torch.Tensor:
        return self.whole()[where]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What PyTorch calls in place of a function of its own that was given one."""
        kwargs = kwargs or {}
        called = _called(*args, **kwargs) if func is _cross_entropy else args if func is _operator else None
        if called and isinstance(called[0], _PutOff):
            logits, *rest = called
            loss = logits._by_rows(logits._logits, logits.dtype, *rest)
            if loss is not None:
                return loss
        args, kwargs = tree_map_only(_PutOff, _PutOff.whole, (args, kwargs))
        return func(*args, **kwargs)


def _is_known(loss: Any) -> bool:
    """Whether it is one of transformers' own, and calls what they call."""
    module = sys.modules.get(_MODULE)
    own = [getattr(module, "fixed_cross_entropy", None), loss]
    return (
        getattr(loss, "__name__", "") in _NAMES
        and all(_file_of(one) == getattr(module, "__file__", "") for one in own)
        and nn.functional.cross_entropy is _cross_entropy
        and _file_of(_cross_entropy) == nn.functional.__file__
    )


def _file_of(function: Any) -> str:
    """Where a function's own code is, which those that wrap or replace it have elsewhere."""
    return str(getattr(getattr(function, "__code__", None), "co_filename", None))


def _called(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[Any, ...]:
    """What `torch.nn.functional.cross_entropy` calls PyTorch's operator with."""
    named = get_enum(reduction) if size_average is None and reduce is None else legacy_get_enum(size_average, reduce)
    return logits, target, weight, named, ignore_index, label_smoothing


class LossesByRows:
    """The losses of a model.

    Args:
        model: of a Session.
    """

    def __init__(self, model: nn.Module) -> None:
        self._by_rows = CrossEntropy()
        self._losses = [LossByRows(module, self._by_rows) for module in with_losses(model)]

    @contextmanager
    def placed(self) -> Iterator[None]:
        """A step runs: losses that are known are computed by rows, where their users have not set others."""
        for loss in self._losses:
            if loss.may_stand:
                loss.place()
        try:
            with self._by_rows.running():
                yield
        finally:
            for loss in self._losses:
                loss.undo()

    @property
    def notes(self) -> tuple[str, ...]:
        """Why one is computed at once after all."""
        if not self._by_rows.differs:
            return ()
        return ("The loss is computed at once: some rows at a time have other bits on this device.",)
