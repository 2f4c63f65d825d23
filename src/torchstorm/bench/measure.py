"""Steps of training, timed and compared: what all benches of training share.

A step draws its data from a seed before its clock starts; the timed steps of all ways have the same seeds. The clock
then runs over forward, backward, the optimizer where there is one, and letting the gradients go, until the device is
done.

Gradients are compared under deterministic algorithms, every step with that of the run that keeps everything: the loss,
all gradients and all buffers, to the last bit. Steps that are compared begin from the same weights, buffers and
optimizer state.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from torchstorm.bench.bits import Bits, differences, fingerprints, relative_error
from torchstorm.bench.intervals import Busy, profile_step
from torchstorm.errors import OutOfVRAMError
from torchstorm.offload.compiled.repeatable import deterministically
from torchstorm.offload.session import Session

Context = Callable[[], AbstractContextManager[Any]]

_TRIES = 3

CLOSE = 0.05
"""Largest relative error of all gradients together that passes where bits cannot be asked for."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained.

    Attributes:
        model: on `device`.
        device: where.
        data: the batch that a seed gives.
        loss: a scalar from that batch, by the model.
        optimizer: changes the weights in every step; None for forward and backward alone.
        share: how large the batch that a seed gives is, of the largest; None where all are alike.
    """

    model: torch.nn.Module
    device: torch.device
    data: Callable[[int], Any]
    loss: Callable[[Any], torch.Tensor]
    optimizer: torch.optim.Optimizer | None = None
    share: Callable[[int], float] | None = None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Of some steps.

    Attributes:
        seconds: of each; where batches differ in size, for as much as the largest batch.
        host_seconds: of each, those until the host has asked for all of it; likewise.
        peak_bytes: most allocated device memory in any; 0 on a CPU.
    """

    seconds: tuple[float, ...]
    host_seconds: tuple[float, ...]
    peak_bytes: int

    @property
    def median_s(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    @property
    def host_s(self) -> float:
        """Median seconds until the host has asked for all of a step."""
        return statistics.median(self.host_seconds)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the run that keeps everything computed.

    Attributes:
        steps: bits of every step, in order.
        gradients: of the first step, on the host; empty where nobody asked.
        bits: whether two such runs agree to the last bit, so that others must.
        note: where they do not, or a deterministic form is missing, what is compared instead.
    """

    steps: tuple[Bits, ...]
    gradients: dict[str, torch.Tensor]
    bits: bool = True
    note: str = ""


class Meter:
    """Runs steps of a training.

    Attributes:
        num_repeated: how often a Session asked for a step to be repeated, because the device was out of memory.
        highest_bytes: most allocated device memory in any step since whoever reads it has set it to 0.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.num_repeated = self.highest_bytes = 0
        self._seed = 0
        model = training.model
        kept = dict(model.named_buffers())
        if training.optimizer is not None:
            kept.update(model.named_parameters())
        self._start = {name: tensor.detach().to("cpu", copy=True) for name, tensor in kept.items()}

    def step(
        self, context: Context, *, seed: int | None = None, look: Callable[[torch.Tensor], object] | None = None
    ) -> Timing:
        """One step, forward and backward within a context.

        Args:
            context: entered anew.
            seed: of the data and of random operations; None for the next that no step has had.
            look: given the loss when the gradients exist.
        """
        self._seed += 1
        seed = self._seed if seed is None else seed
        training = self.training
        batch = training.data(seed)
        training.model.zero_grad(set_to_none=True)  # where the step before broke off
        synchronize(self.training.device)
        if training.device.type == "cuda":  # pragma: gpu
            torch.cuda.reset_peak_memory_stats(training.device)
        start = time.perf_counter()
        loss = self._forward_backward(context, batch, seed)
        if look is not None:
            look(loss.detach())
        if training.optimizer is not None:
            training.optimizer.step()
        training.model.zero_grad(set_to_none=True)
        host_s = time.perf_counter() - start
        synchronize(self.training.device)
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated(training.device) if training.device.type == "cuda" else 0
        self.highest_bytes = max(self.highest_bytes, peak)
        share = training.share(seed) if training.share is not None else 1.0
        return Timing(seconds=(seconds / share,), host_seconds=(host_s / share,), peak_bytes=peak)

    def _forward_backward(self, context: Context, batch: Any, seed: int) -> torch.Tensor:
        for _ in range(_TRIES - 1):
            try:
                return self._try(context, batch, seed)
            except OutOfVRAMError:
                self.num_repeated += 1
        return self._try(context, batch, seed)

    def _try(self, context: Context, batch: Any, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        with context():
            loss = self.training.loss(batch)
            loss.backward()
        return loss

    def time(self, context: Context, *, warm: int, steps: int) -> Timing:
        """Times steps after others that warm up: where batches differ in size, after the very same ones, too.

        For every size that is new, libraries choose their kernels, which takes longer than a step.
        """
        for _ in range(warm):
            self.step(context)
        self.meet_sizes(context, steps=steps)
        timings = [self.step(context, seed=_timed_seed(number)) for number in range(steps)]
        return Timing(
            seconds=tuple(timing.seconds[0] for timing in timings),
            host_seconds=tuple(timing.host_seconds[0] for timing in timings),
            peak_bytes=max(timing.peak_bytes for timing in timings),
        )

    def meet_sizes(self, context: Context, *, steps: int) -> None:
        """Where batches differ in size, runs the very steps that will be timed; else none."""
        for number in range(steps if self.training.share is not None else 0):
            self.step(context, seed=_timed_seed(number))

    def profile(self, context: Context) -> Busy:
        """How busy the GPU is in one step, of a size that was met where batches differ in size; nothing on a CPU."""
        if self.training.device.type == "cpu":
            return Busy()
        seed = None if self.training.share is None else _timed_seed(0)  # pragma: gpu
        return profile_step(lambda: self.step(context, seed=seed).seconds[0])  # pragma: gpu

    def saved_bytes(self, context: Context) -> int:
        """Peak of the bytes of saved storages in a step within a context, by a Session that keeps all; for a CPU."""
        with Session(self.training.model, unlimited=True) as session:

            @contextlib.contextmanager
            def both() -> Iterator[None]:
                with session.step(), context():
                    yield

            self.step(both)
            return session.usage().ram_bytes

    # ------------------------------------------------------------------ gradients

    def reference(self, context: Context, *, steps: int, keep_gradients: bool = False) -> Reference:
        """What others are compared with: `steps` steps within a context, under deterministic algorithms.

        Where an operation has no deterministic form, the same is run twice with a warning instead; if those two differ,
        gradients are compared by size from then on.
        """
        found: dict[str, torch.Tensor] = {}

        def keep(_: torch.Tensor) -> None:
            if not found:
                found.update({name: grad.to("cpu", copy=True) for name, grad in self._gradients().items()})

        look = keep if keep_gradients else None
        try:
            return Reference(steps=tuple(self._bits(context, steps, look)), gradients=found)
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            missing = str(error).split(" ", 1)[0]
        found.clear()
        runs = [tuple(self._bits(context, steps, keep, warn_only=True)) for _ in range(2)]
        same = runs[0] == runs[1]
        instead = "but two runs agree to the last bit" if same else "so gradients are compared by size"
        return Reference(
            steps=runs[0],
            gradients=found,
            bits=same,
            note=f"{missing} cannot run deterministically, {instead}",
        )

    def compare(
        self, context: Context, reference: Reference, *, enough: Callable[[int], bool] = lambda steps: steps >= 2
    ) -> str:
        """What is wrong with the gradients of steps within a context; "" where they are those they must be.

        Args:
            context: of the way that is checked.
            reference: of the run that keeps everything.
            enough: told how many steps have agreed, whether that will do.
        """
        if not reference.bits:
            for number in range(1, len(reference.steps) + 1):
                self.step(context)
                if enough(number):
                    break
            return self.compare_size(context, reference)[1]
        warn_only = bool(reference.note)
        expected = iter(reference.steps)
        for number, bits in enumerate(self._bits(context, len(reference.steps), warn_only=warn_only), 1):
            wrong = differences(next(expected), bits)
            if wrong:
                more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                return f"in step {number} the bits of {wrong[0]}{more} differ"
            if enough(number):
                return ""
        return f"{len(reference.steps)} steps agree, but that is too few to tell"

    def compare_size(self, context: Context, reference: Reference, *, same_random: bool = False) -> tuple[float, str]:
        """Relative error of the first step's gradients against the reference's, and what is wrong with it, or "".

        Args:
            context, reference: as for `compare`.
            same_random: whether random operations matter, which must then run as for the reference: other kernels of
                attention drop out other elements.
        """
        errors: list[float] = []
        self._reset()
        as_then = deterministically(warn_only=bool(reference.note)) if same_random else contextlib.nullcontext()
        with as_then:
            self.step(
                context,
                seed=_check_seed(0),
                look=lambda _: errors.append(relative_error(reference.gradients, self._gradients())),
            )
        wrong = "" if errors[0] <= CLOSE else f"they are off by {errors[0]:.1%}, more than {CLOSE:.0%}"
        return errors[0], wrong

    def _bits(
        self,
        context: Context,
        steps: int,
        look: Callable[[torch.Tensor], object] | None = None,
        *,
        warn_only: bool = False,
    ) -> Iterator[Bits]:
        self._reset()
        model = self.training.model
        found: list[Bits] = []

        def note(loss: torch.Tensor) -> None:
            tensors = {name: parameter.grad for name, parameter in model.named_parameters()}
            found.append(fingerprints({"the loss": loss, **tensors, **dict(model.named_buffers())}))
            if look is not None:
                look(loss)

        for number in range(steps):
            with deterministically(warn_only=warn_only):
                self.step(context, seed=_check_seed(number), look=note)
            yield found[-1]

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.training.model.named_parameters() if p.grad is not None}

    @torch.no_grad()
    def _reset(self) -> None:
        """Weights, buffers and optimizer state as they were at first; state that exists stays allocated."""
        now = {**dict(self.training.model.named_buffers()), **dict(self.training.model.named_parameters())}
        for name, value in self._start.items():
            now[name].copy_(value)
        if self.training.optimizer is not None:
            for state in self.training.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":  # pragma: gpu
        torch.cuda.synchronize(device)


def _check_seed(number: int) -> int:
    return 10**6 + number


def _timed_seed(number: int) -> int:
    return 2 * 10**6 + number


def clean(device: torch.device) -> None:
    """Gives back what a way has left: cached device memory, and what PyTorch pinned for it."""
    gc.collect()
    if device.type == "cuda":  # pragma: gpu
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # else missing from the memory that the next may pin
