"""Every error that torchstorm raises on purpose.

Each message says what was asked, what was found, the limit and the way out, with the numbers.

    TorchstormError
    ├── SizeError          (ValueError)           a size that cannot be read: "24 GB?"
    ├── DeviceError        (ValueError)           a device that is not there, or a budget for one that is not used
    ├── BudgetError        (ValueError)           a budget below what the model needs at once
    ├── DataError          (ValueError)           training text that is missing, empty, unreadable or too short
    ├── ConfigError        (ValueError)           options that contradict each other or name something unknown
    ├── CheckpointError    (ValueError)           a checkpoint that is missing, incomplete or of another model
    ├── PlanError          (ValueError)           a plan or trace that cannot be read or does not fit
    ├── UnsupportedError   (NotImplementedError)  something that cannot be done exactly, so it is not done
    └── StorageError       (OSError)              a disk that is full, not writable, or failed
        └── CorruptionError                       bytes that came back other than they left
"""


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
    ) -> None:
        super().__init__(message)
        self.tier = tier
        self.budget_bytes = budget_bytes
        self.needed_bytes = needed_bytes
        self.smallest_bytes = smallest_bytes
        self.block = block


class DataError(TorchstormError, ValueError):
    """The training text is missing, empty, unreadable or shorter than one batch."""


class ConfigError(TorchstormError, ValueError):
    """Options contradict each other or name something that does not exist."""


class CheckpointError(TorchstormError, ValueError):
    """A checkpoint is missing, incomplete, damaged or belongs to another model."""


class PlanError(TorchstormError, ValueError):
    """A plan or trace cannot be read, or does not fit the model."""


class UnsupportedError(TorchstormError, NotImplementedError):
    """What was asked cannot be done exactly, so it is not done."""


class StorageError(TorchstormError, OSError):
    """A file or disk is full, not writable or failed."""


class CorruptionError(StorageError):
    """Bytes came back from a tier other than they left."""
