"""Every error that torchstorm raises on purpose.

Each message says what was asked, what was found, the limit and the way out, with the numbers.

    TorchstormError
    ├── SizeError          (ValueError)           a size that cannot be read: "24 GB?"
    ├── DeviceError        (ValueError)           a device that is not there, or a budget for one that is not used
    ├── BudgetError        (ValueError)           a budget below what the model needs at once
    ├── DataError          (ValueError)           training text that is missing, empty, unreadable or too short
    ├── ConfigError        (ValueError)           options that contradict each other or name something unknown
    ├── CheckpointError    (ValueError)           a checkpoint that is missing, incomplete or of another model
    ├── ShapeError         (ValueError)           tensors whose sizes, dtypes or devices do not fit together
    ├── PlanError          (ValueError)           a plan or trace that cannot be read or does not fit
    ├── OutOfVRAMError     (RuntimeError)         the device ran out of memory within a step, which must be repeated
    ├── KernelError        (RuntimeError)         a GPU kernel that cannot be compiled, loaded or launched
    ├── UnsupportedError   (NotImplementedError)  something that cannot be done exactly, so it is not done
    └── StorageError       (OSError)              a disk that is full, not writable, or failed
        └── CorruptionError                       bytes that came back other than they left
"""

from __future__ import annotations


class TorchstormError(Exception):
    """Base of all errors that torchstorm raises on purpose."""


class SizeError(TorchstormError, ValueError):
    """A size is neither a positive number of bytes nor a number with a unit."""


class DeviceError(TorchstormError, ValueError):
    """The named device does not exist here, or does not fit the model or the budget."""


class BudgetError(TorchstormError, ValueError):
    """The budget is below what the model needs at once.

    Attributes:
        tier: the tier whose budget is too small: "vram", "ram" or "disk".
        budget_bytes: what was given.
        needed_bytes: what is needed at the worst moment.
        smallest_bytes: the smallest budget for this tier that would do, or None where it is not known.
        block: the module that needs it, "" where it is not known.
        micro_batch: the most samples of the batch that would fit at once, 0 where not even one does, None where that
            is not known.
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
        self._message = message  # without a micro-batch
        self.micro_batch = micro_batch
        self.tier = tier
        self.budget_bytes = budget_bytes
        self.needed_bytes = needed_bytes
        self.smallest_bytes = smallest_bytes
        self.block = block

    def with_micro_batch(self, hint: str, micro_batch: int) -> BudgetError:
        """The same error, which also says what micro-batch would fit, in place of what it may have said of that."""
        found = BudgetError(
            f"{self._message} {hint}",
            tier=self.tier,
            budget_bytes=self.budget_bytes,
            needed_bytes=self.needed_bytes,
            smallest_bytes=self.smallest_bytes,
            block=self.block,
            micro_batch=micro_batch,
        )
        found._message = self._message
        return found


class DataError(TorchstormError, ValueError):
    """The training text is missing, empty, unreadable or shorter than one batch."""


class ConfigError(TorchstormError, ValueError):
    """Options contradict each other or name something that does not exist."""


class CheckpointError(TorchstormError, ValueError):
    """A checkpoint is missing, incomplete, damaged or belongs to another model."""


class ShapeError(TorchstormError, ValueError):
    """Tensors do not fit an operation or each other in their sizes, dtypes or devices."""


class PlanError(TorchstormError, ValueError):
    """A plan or trace cannot be read, or does not fit the model."""


class OutOfVRAMError(TorchstormError, RuntimeError):
    """The device ran out of memory within a step; the step was dropped, and must be repeated.

    A RuntimeError, as torch.OutOfMemoryError is, from which it is raised.

    Attributes:
        allocated_bytes: in tensors, when it was noticed. On a CPU, of saved tensors.
        reserved_bytes: what PyTorch's allocator held of the device, those included.
        free_bytes: of the device, held by nobody.
        asked_bytes: of the allocation that failed; 0 where that is not known.
        budget_bytes: what the Session may fill; 0 without a budget.
        planned_anew: whether the plan for such steps now keeps more of the budget free.
        lost_gradients: names of parameters whose gradients existed before the step and hold a part of it now.
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
    """A GPU kernel cannot be compiled, loaded or launched; says what compiler or driver said."""


class UnsupportedError(TorchstormError, NotImplementedError):
    """What was asked cannot be done exactly, so it is not done."""


class StorageError(TorchstormError, OSError):
    """A file or disk is full, not writable or failed.

    Attributes:
        extent: (start, stop) of the file's bytes that could not be read or written; None where that is not known.
    """

    extent: tuple[int, int] | None = None


class CorruptionError(StorageError):
    """Bytes came back from a tier other than they left."""
