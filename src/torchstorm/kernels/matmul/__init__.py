"""Matrix products. `matmul` is the public function."""

from torchstorm.kernels.matmul.function import matmul
from torchstorm.kernels.matmul.ladder import MATMUL

__all__ = ["MATMUL", "matmul"]
