"""A linear layer with its bias and activation."""

from torchstorm.kernels.linear.function import LADDER, linear

__all__ = ["LADDER", "linear"]
