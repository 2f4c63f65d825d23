"""What a Session says of a use that would fail elsewhere, or not at all: it refuses, or warns once.

Refused is what cannot be done, where it is asked for. Warned of is what gives the right gradients, and yet not what the
user came for: no single step shows that, but three in a row do.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch

from torchstorm.errors import ConfigError, DeviceError, StorageError, TorchstormWarning, UnsupportedError
from torchstorm.offload import torch_private as private
from torchstorm.offload.compiled.call import is_ours, refuse_compiled_whole
from torchstorm.offload.run.shortage import Gradients
from torchstorm.offload.step.hooks import SavedTensors
from torchstorm.offload.step.inputs import NoteInputs

Function = TypeVar("Function", bound=Callable[..., Any])

_ENOUGH = 3  # in a row are no accident
_OWN = ("torchstorm.", "contextlib")  # modules that a warning is not about

_NO_BACKWARD = (
    "Three steps in a row have saved tensors, and no backward has used them. Call loss.backward() inside `with "
    "storm.step():`; what needs no backward belongs outside the step, under torch.no_grad()."
)
_NO_FORWARD = (
    "Three steps in a row have made gradients, and nothing was saved through this Session, so no budget was kept. Run "
    "the forward pass inside `with storm.step():`, in the same thread, and neither within another Session's step nor "
    "within other hooks for saved tensors (torch.autograd.graph.save_on_cpu)."
)
_OTHER_MODEL = (
    "In three steps in a row this Session's model was not called, and none of its parameters got a gradient. The "
    "weights of another model count as saved tensors, and are moved: make a Session for the model that the steps run."
)
_NOT_ENTERED = (
    "storm.step() was called three times, and no step was entered, so no budget was kept. Write `with storm.step():` "
    "around forward and backward."
)


# ---------------------------------------------------------------------- what a Session is given


def check_model(model: object) -> None:
    """Makes sure that a Session can work with what it was given as its model.

    Raises:
        ConfigError: it is no module.
        UnsupportedError: it is one whose steps a Session does not see.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"Session(model) needs one torch.nn.Module, but was given {_described(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"This {type(model).__name__} is TorchScript, which takes no hooks. Give the Session the model as it was "
            "before torch.jit, and compile it block by block with storm.compile()."
        )
    refuse_compiled_whole(model)
    for module in model.modules():
        if isinstance(module, torch.nn.DataParallel) and len(module.device_ids) > 1:
            raise UnsupportedError(
                f"DataParallel runs this model in {len(module.device_ids)} threads on as many GPUs, of which a Session "
                "sees none. Use DistributedDataParallel, with a Session in each process."
            )


def check_optimizer(optimizer: object) -> None:
    """Makes sure that an optimizer is one.

    Raises:
        ConfigError: it is not.
    """
    if optimizer is not None and not isinstance(getattr(optimizer, "param_groups", None), list):
        several = isinstance(optimizer, list | tuple | dict)
        hint = "Where there are several, leave it out" if several else "Give the one that is to step, or leave it out"
        raise ConfigError(
            f"optimizer={_named(optimizer)} is no torch.optim.Optimizer. {hint}: room is then kept free for twice the "
            "parameters' bytes."
        )


def _described(model: object) -> str:
    """What was given in a model's place, and what to give."""
    if isinstance(model, type):
        return f"the class {model.__name__}: give an instance of it."
    if isinstance(model, list | tuple) and any(isinstance(item, torch.nn.Module) for item in model):
        return f"a {type(model).__name__} of {len(model)}: put them into a torch.nn.ModuleList, and give that."
    if isinstance(model, dict) and any(isinstance(item, torch.Tensor) for item in model.values()):
        return f"a state dict ({type(model).__name__} of {len(model)}): give the model that it is for."
    return f"{_named(model)}: give the model that the steps train."


def _named(value: object) -> str:
    if isinstance(value, type | list | tuple | dict):
        return f"class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__} of {len(value)}"
    return repr(value) if value is None or isinstance(value, str | int | float) else type(value).__name__


# ---------------------------------------------------------------------- steps


class StepContext(ContextDecorator):
    """What `Session.step` returns: each time that it is entered, one step begins.

    Args:
        running: held while a step of the Session runs.
        step: runs one around its `yield`.
        watch: the Session's.
    """

    def __init__(self, running: threading.Lock, step: Callable[[], Iterator[None]], watch: Watch) -> None:
        self._running = running
        self._run = step
        self._watch = watch
        self._step: AbstractContextManager[None] | None = None
        self._thread = 0
        watch.asked()

    def __enter__(self) -> None:
        self._watch.used()
        if private.is_within_compiled():
            raise UnsupportedError(
                "storm.step() was entered within a function that torch.compile compiles, and would be compiled with "
                "it. Enter the step outside of that function, and compile the model with storm.compile()."
            )
        if private.is_backward_compiled():
            raise UnsupportedError(
                "Compiled autograd is enabled, and would compile the Session's own work, too. Disable it for "
                "the step; storm.compile() compiles the backward of single blocks."
            )
        step = self._alone()
        step.__enter__()
        self._step, self._thread = step, threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._thread != threading.get_ident():
            raise ConfigError(
                "This step was entered in another thread, whose tensors it saves: leave it there, too. Until then this "
                "Session is in a step."
            )
        assert self._step is not None
        step, self._step = self._step, None
        return step.__exit__(kind, error, trace)

    def __call__(self, function: Function) -> Function:
        """As a decorator: every call of the function is a step.

        Raises:
            ConfigError: the function returns before its body has run.
        """
        self._watch.used()
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_one(function) for is_one in kinds):
            raise ConfigError(
                f"@storm.step() would be over before the body of {function.__name__!r} runs, which is a generator or a "
                "coroutine: write `with storm.step():` inside of it."
            )
        return super().__call__(function)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            raise ConfigError("This Session is already in a step: leave it before entering another.")
        try:
            yield from self._run()
        finally:
            self._running.release()


def check_unmoved(model: torch.nn.Module, parameters: Iterable[torch.nn.Parameter], *, device: torch.device) -> None:
    """Makes sure that a model is what its Session was made for. Buffers may lie elsewhere.

    Raises:
        DeviceError: it was moved.
    """
    moved = next((parameter.device for parameter in parameters if parameter.device != device), None)
    if moved is not None:
        raise DeviceError(
            f"This Session was made for {type(model).__name__} on {device}, and now it has parameters on {moved}. Move "
            "it back before the step, or close this Session and make a new one."
        )


def better_said(error: BaseException, model: torch.nn.Module, *, closed: str) -> Exception | None:
    """What to raise in place of an error that a step met; None for the error itself.

    Args:
        error: the error.
        model: the Session's.
        closed: why the Session was closed within the step, "" where it was not.
    """
    if closed and isinstance(error, StorageError):
        return StorageError(f"This Session was closed within its own step ({closed}): close it after the step. {error}")
    if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
        return UnsupportedError(
            f"{type(model).__name__} uses something that cannot run with saved-tensor hooks, on which a "
            f"Session stands: {error}"
        )
    return None


def check_first_save(model: torch.nn.Module) -> None:
    """Called while a step saves its first tensor: makes sure that it is not within the model compiled as a whole.

    Compiling makes a second module around the model, of which the model itself knows nothing.

    Raises:
        UnsupportedError: it is.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        module = frame.f_locals.get("self") if frame.f_code.co_name == "__call__" else None
        if isinstance(module, torch.nn.Module) and not is_ours(module) and model in module.modules():
            refuse_compiled_whole(module)


# ---------------------------------------------------------------------- over many steps


class Watch:
    """Notices over the steps of one Session what is an error in none of them, and warns once of each kind.

    Args:
        model, optimizer: the Session's.

    Attributes:
        is_new_kind: whether the step that runs is the first of its kind, as the first one with another model is.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Callable[[], torch.optim.Optimizer | None]) -> None:
        self._model = model
        self._optimizer = optimizer
        self._told: set[str] = set()
        self._found = ""
        self._num_found = 0
        self._num_used = 0
        self._num_asked = 0  # contexts made since one was used
        self.is_new_kind = False
        self._check_optimizer()

    def asked(self) -> None:
        """The context of a step was made."""
        self._num_asked += 1
        if self._num_asked >= _ENOUGH:
            self._warn(_NOT_ENTERED, _NOT_ENTERED)

    def used(self) -> None:
        """One of them is entered, or decorates a function."""
        self._num_asked = 0

    def step_ended(self, gradients: Gradients, inputs: NoteInputs, saved: SavedTensors, *, has_saved: bool) -> None:
        """A step has ended without an error.

        Args:
            gradients: of what it trains, as they were when it began.
            inputs: what the model was called with in it.
            saved: the Session's. A backward since the last step counts, too.
            has_saved: whether anything was saved in the step.
        """
        is_used, self._num_used = saved.num_used != self._num_used, saved.num_used
        found = ""
        if has_saved and not is_used:
            found = _NO_BACKWARD
        elif not has_saved and gradients.have_changed():
            found = _NO_FORWARD
        elif has_saved and inputs.shapes is None and _has_forward(self._model) and not gradients.have_changed():
            found = _OTHER_MODEL
        self._num_found = self._num_found + 1 if found == self._found else 1
        self._found = found
        if found and self._num_found >= _ENOUGH:
            self._warn(found, found)
        if self.is_new_kind:
            self.is_new_kind = False
            self._check_optimizer()

    def _check_optimizer(self) -> None:
        """Warns of an optimizer that does not train the model."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        parameters = list(self._model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad] or parameters
        if trained and not any(id(parameter) in held for parameter in trained):
            self._warn(
                "optimizer",
                f"optimizer= holds {len(held)} parameters, and none of the {len(trained)} of "
                f"{type(self._model).__name__} that are to be trained. Give the one that was made with this model's "
                "parameters, after the last of them was added.",
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(message, TorchstormWarning, stacklevel=_caller_level())


def _has_forward(model: torch.nn.Module) -> bool:
    """Whether a module can be called: containers such as ModuleList cannot."""
    return getattr(model.forward, "__name__", "") != "_forward_unimplemented"


def _caller_level() -> int:
    """The `stacklevel` for the caller's warning that names the line of the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
        level, frame = level + 1, frame.f_back
    return level
