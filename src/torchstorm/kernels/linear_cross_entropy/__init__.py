"""The output layer of a classifier or language model fused with its loss, without all logits in memory."""

from torchstorm.kernels.linear_cross_entropy.function import LADDER, linear_cross_entropy

__all__ = ["LADDER", "linear_cross_entropy"]
