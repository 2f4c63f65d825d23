"""Elementwise operations for CPUs and GPUs."""

from torchstorm.kernels.elementwise.function import add, gelu, mul, relu, sigmoid, silu

__all__ = ["add", "gelu", "mul", "relu", "sigmoid", "silu"]
