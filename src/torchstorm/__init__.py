"""torchstorm: name a memory budget and train PyTorch models as if you had more VRAM."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchstorm.errors import (
        BudgetError,
        CheckpointError,
        ConfigError,
        CorruptionError,
        DataError,
        DeviceError,
        KernelError,
        OutOfVRAMError,
        PlanError,
        ShapeError,
        SizeError,
        StorageError,
        TorchstormError,
        TorchstormWarning,
        UnsupportedError,
    )
    from torchstorm.offload.preview import plan
    from torchstorm.offload.report import Report
    from torchstorm.offload.session import Session
    from torchstorm.plan.forecast import Figures
    from torchstorm.plan.plan import Plan
    from torchstorm.storage.layout import Kind
    from torchstorm.storage.loader import NVMeDataLoader
    from torchstorm.storage.nvme import NVMe
    from torchstorm.storage.volume import Volume

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "CorruptionError",
    "DataError",
    "DeviceError",
    "Figures",
    "KernelError",
    "Kind",
    "NVMe",
    "NVMeDataLoader",
    "OutOfVRAMError",
    "Plan",
    "PlanError",
    "Report",
    "Session",
    "ShapeError",
    "SizeError",
    "StorageError",
    "TorchstormError",
    "TorchstormWarning",
    "UnsupportedError",
    "Volume",
    "plan",
]

_HOMES = {
    "Figures": "torchstorm.plan.forecast",
    "Kind": "torchstorm.storage.layout",
    "NVMe": "torchstorm.storage.nvme",
    "NVMeDataLoader": "torchstorm.storage.loader",
    "Plan": "torchstorm.plan.plan",
    "Report": "torchstorm.offload.report",
    "Session": "torchstorm.offload.session",
    "Volume": "torchstorm.storage.volume",
}


class _Callable(ModuleType):
    """Makes the package `torchstorm.plan` callable, since `torchstorm.plan()` is a public function, too."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_module("torchstorm.offload.preview").plan(*args, **options)


import_module("torchstorm.plan")
sys.modules["torchstorm.plan"].__class__ = _Callable


def __getattr__(name: str) -> Any:
    # Imported on first use: the planning modules run without torch, so importing them must not import torch.
    if name not in __all__:
        raise AttributeError(f"module 'torchstorm' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "torchstorm.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
