"""Operations with kernels of their own. `import torchstorm` leaves this room alone, as it needs torch.

`mlstm` here is the function; its folder has the same name, and its modules are imported by theirs.
"""

from torchstorm.kernels.batch_norm import batch_norm_act
from torchstorm.kernels.dropout import dropout
from torchstorm.kernels.elementwise import add, gelu, mul, relu, sigmoid, silu
from torchstorm.kernels.ladders import variants
from torchstorm.kernels.mlstm import MLSTMState, mlstm, mlstm_step
from torchstorm.kernels.mlstm.ladder import Rung, mlstm_ladder

__all__ = [
    "MLSTMState",
    "Rung",
    "add",
    "batch_norm_act",
    "dropout",
    "gelu",
    "mlstm",
    "mlstm_ladder",
    "mlstm_step",
    "mul",
    "relu",
    "sigmoid",
    "silu",
    "variants",
]
