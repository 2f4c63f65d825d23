"""Dropout without a stored mask."""

from torchstorm.kernels.dropout.function import dropout

__all__ = ["dropout"]
