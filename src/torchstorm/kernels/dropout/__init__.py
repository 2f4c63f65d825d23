"""Dropout without a mask in memory."""

from torchstorm.kernels.dropout.function import dropout

__all__ = ["dropout"]
