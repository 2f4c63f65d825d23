"""The exceptions that torchstorm raises.

Each message names the request, the value found, the limit and a remedy, with numbers.

    TorchstormError
    ├── SizeError          (ValueError)           a size that cannot be parsed: "24 GB?"
    ├── DeviceError        (ValueError)           a device that does not exist, or a budget for an unused device
    ├── BudgetError        (ValueError)           a budget below the model's minimum
    ├── DataError          (ValueError)           training text that is missing, empty, unreadable or too short
    ├── ConfigError        (ValueError)           contradictory options, or an unknown option value
    ├── CheckpointError    (ValueError)           a checkpoint that is missing, incomplete or from another model
    ├── ShapeError         (ValueError)           tensors with incompatible sizes, dtypes or devices
    ├── PlanError          (ValueError)           a plan or trace that cannot be read, or does not match the model
    ├── OutOfVRAMError     (RuntimeError)         the device ran out of memory; repeat the step
    ├── KernelError        (RuntimeError)         a GPU kernel that cannot be compiled, loaded or launched
    ├── UnsupportedError   (NotImplementedError)  a request that is not supported, or cannot be computed exactly
    └── StorageError       (OSError)              a disk that is full, not writable or failing
        └── CorruptionError                       bytes read differ from the bytes written, or were never written

What gives correct results, but keeps no budget or trains nothing, is a TorchstormWarning (UserWarning).
"""

from __future__ import annotations


class TorchstormError(Exception):
    """Base class of torchstorm's exceptions."""


class TorchstormWarning(UserWarning):
    """A use that gives the right results, and yet not what a Session is for. Each kind is told once a Session."""


class SizeError(TorchstormError, ValueError):
    """A size is not a positive number of bytes, or not a number with a known unit."""


class DeviceError(TorchstormError, ValueError):
    """The named device does not exist, or does not match the model or the budget."""


class BudgetError(TorchstormError, ValueError):
    """The budget is below the model's minimum.

    Attributes:
        tier: the tier whose budget is too small: "vram", "ram" or "disk".
        budget_bytes: the given budget.
        needed_bytes: the peak that the model needs.
        smallest_bytes: the smallest sufficient budget for this tier; None if unknown.
        block: name of the module with that peak; "" if unknown.
        micro_batch: the largest number of samples that would fit; 0 if a single sample does not fit; None if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        tier: str = "",
        budget_bytes: int = 0,
        needed_bytes: int = 0,
        smallest_bytes: int | None = None,
        block: str = "",
        micro_batch: int | None = None,
    ) -> None:
        super().__init__(message)
        self._message = message  # without the micro-batch hint
        self.micro_batch = micro_batch
        self.tier = tier
        self.budget_bytes = budget_bytes
        self.needed_bytes = needed_bytes
        self.smallest_bytes = smallest_bytes
        self.block = block

    def with_micro_batch(self, hint: str, micro_batch: int) -> BudgetError:
        """Returns a copy of this error whose message ends with `hint`. An earlier hint is replaced."""
        found = self._saying(f"{self._message} {hint}")
        found._message, found.micro_batch = self._message, micro_batch
        return found

    def with_reason(self, reason: str) -> BudgetError:
        """Returns a copy of this error whose message ends with `reason`, without a hint."""
        return self._saying(f"{self._message} {reason}")

    def _saying(self, message: str) -> BudgetError:
        return BudgetError(
            message,
            tier=self.tier,
            budget_bytes=self.budget_bytes,
            needed_bytes=self.needed_bytes,
            smallest_bytes=self.smallest_bytes,
            block=self.block,
        )


class DataError(TorchstormError, ValueError):
    """The training text is missing, empty, unreadable or shorter than one batch."""


class ConfigError(TorchstormError, ValueError):
    """Options contradict each other, or have an unknown value."""


class CheckpointError(TorchstormError, ValueError):
    """A checkpoint is missing, incomplete, damaged or from another model."""


class ShapeError(TorchstormError, ValueError):
    """Tensors have sizes, dtypes or devices that the operation does not accept."""


class PlanError(TorchstormError, ValueError):
    """A plan or trace cannot be read, or does not match the model."""


class OutOfVRAMError(TorchstormError, RuntimeError):
    """The device ran out of memory during a step. The step and its new gradients are dropped: repeat it.

    Buffers that the step had changed, and values that it had added to existing gradients, remain. It is raised from
    torch.OutOfMemoryError, and is a RuntimeError like that one.

    Attributes:
        allocated_bytes: bytes of tensors at the failure. On a CPU: bytes of saved tensors.
        reserved_bytes: memory that PyTorch's allocator had reserved on the device, `allocated_bytes` included.
        free_bytes: free memory of the device.
        asked_bytes: size of the failed allocation; 0 if unknown.
        budget_bytes: the Session's budget; 0 without a budget.
        planned_anew: whether the Session has a new plan, which leaves more of the budget free.
        lost_gradients: parameters whose earlier gradients now also contain a part of the failed step.
    """

    def __init__(
        self,
        message: str,
        *,
        allocated_bytes: int = 0,
        reserved_bytes: int = 0,
        free_bytes: int = 0,
        asked_bytes: int = 0,
        budget_bytes: int = 0,
        planned_anew: bool = False,
        lost_gradients: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.free_bytes = free_bytes
        self.asked_bytes = asked_bytes
        self.budget_bytes = budget_bytes
        self.planned_anew = planned_anew
        self.lost_gradients = lost_gradients


class KernelError(TorchstormError, RuntimeError):
    """A GPU kernel cannot be compiled, loaded or launched. The message quotes the compiler or the driver."""


class UnsupportedError(TorchstormError, NotImplementedError):
    """The request is not supported, or cannot be computed exactly."""


class StorageError(TorchstormError, OSError):
    """A file or disk is full, not writable or failing.

    Attributes:
        extent: (start, stop) of the bytes of the file that could not be read or written; None if unknown.
    """

    extent: tuple[int, int] | None = None


class CorruptionError(StorageError):
    """The bytes read from a tier or a volume differ from the bytes written, or were never written."""
