"""Softmax and log-softmax: see `function.py`."""

from torchstorm.kernels.softmax.function import log_softmax, softmax

__all__ = ["log_softmax", "softmax"]
