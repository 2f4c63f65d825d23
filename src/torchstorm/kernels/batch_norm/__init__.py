"""Batch normalization with an activation."""

from torchstorm.kernels.batch_norm.function import batch_norm_act

__all__ = ["batch_norm_act"]
