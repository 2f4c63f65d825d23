"""Operations with kernels of their own. `import torchstorm` leaves this room alone, as it needs torch.

`mlstm` here is the function; its folder has the same name, and its modules are imported by theirs.
"""

from torchstorm.kernels.ladders import variants
from torchstorm.kernels.mlstm import MLSTMState, mlstm, mlstm_step
from torchstorm.kernels.mlstm.ladder import Rung, mlstm_ladder

__all__ = ["MLSTMState", "Rung", "mlstm", "mlstm_ladder", "mlstm_step", "variants"]
