"""Operations with kernels of their own. `import torchstorm` leaves this room alone, as it needs torch.

`mlstm` and `softmax` here are functions; their folders have the same names, and modules are imported by theirs.
"""

from torchstorm.kernels.ladders import variants
from torchstorm.kernels.mlstm import MLSTMState, mlstm, mlstm_step
from torchstorm.kernels.mlstm.ladder import Rung, mlstm_ladder
from torchstorm.kernels.norms import layer_norm, rms_norm
from torchstorm.kernels.softmax import log_softmax, softmax

__all__ = [
    "MLSTMState",
    "Rung",
    "layer_norm",
    "log_softmax",
    "mlstm",
    "mlstm_ladder",
    "mlstm_step",
    "rms_norm",
    "softmax",
    "variants",
]
