"""Operations with kernels of their own. `import torchstorm` leaves this room alone, as it needs torch.

`matmul` and `mlstm` here are the functions; their folders have the same names, and modules are imported by theirs.
"""

from torchstorm.kernels.ladders import variants
from torchstorm.kernels.matmul import matmul
from torchstorm.kernels.mlstm import MLSTMState, mlstm, mlstm_step
from torchstorm.kernels.mlstm.ladder import Rung, mlstm_ladder

__all__ = ["MLSTMState", "Rung", "matmul", "mlstm", "mlstm_ladder", "mlstm_step", "variants"]
