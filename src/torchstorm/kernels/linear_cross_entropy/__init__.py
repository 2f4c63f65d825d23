"""The last layer of a classifier or language model and its loss, without the logits as a whole."""

from torchstorm.kernels.linear_cross_entropy.function import LADDER, linear_cross_entropy

__all__ = ["LADDER", "linear_cross_entropy"]
