"""Operations with kernels of their own. `import torchstorm` leaves this room alone, as it needs torch.

`mlstm` here is the function; its folder has the same name, and its modules are imported by theirs. So it is with
`linear` and `linear_cross_entropy`.
"""

from torchstorm.kernels.ladders import variants
from torchstorm.kernels.linear import linear
from torchstorm.kernels.linear_cross_entropy import linear_cross_entropy
from torchstorm.kernels.mlstm import MLSTMState, mlstm, mlstm_step
from torchstorm.kernels.mlstm.ladder import Rung, mlstm_ladder

__all__ = ["MLSTMState", "Rung", "linear", "linear_cross_entropy", "mlstm", "mlstm_ladder", "mlstm_step", "variants"]
