"""Operations with our own kernels. `import torchstorm` does not import this package, since it needs torch.

Functions here have the same names as their folders, whose modules are imported by their full names.
"""

from torchstorm.kernels.batch_norm import batch_norm_act
from torchstorm.kernels.dropout import dropout
from torchstorm.kernels.elementwise import add, gelu, mul, relu, sigmoid, silu
from torchstorm.kernels.ladders import variants
from torchstorm.kernels.linear import linear
from torchstorm.kernels.linear_cross_entropy import linear_cross_entropy
from torchstorm.kernels.matmul import matmul
from torchstorm.kernels.mlstm import MLSTMState, mlstm, mlstm_step
from torchstorm.kernels.mlstm.ladder import Rung, mlstm_ladder
from torchstorm.kernels.norms import layer_norm, rms_norm
from torchstorm.kernels.softmax import log_softmax, softmax

__all__ = [
    "MLSTMState",
    "Rung",
    "add",
    "batch_norm_act",
    "dropout",
    "gelu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "matmul",
    "mlstm",
    "mlstm_ladder",
    "mlstm_step",
    "mul",
    "relu",
    "rms_norm",
    "sigmoid",
    "silu",
    "softmax",
    "variants",
]
