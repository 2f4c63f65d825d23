"""Operations with kernels of their own. `import torchstorm` leaves this room alone, as it needs torch.

`mlstm` here is the function; its folder has the same name, and its modules are imported by theirs.
"""

from torchstorm.kernels.ladders import variants
from torchstorm.kernels.mlstm import MLSTMState, mlstm, mlstm_step

__all__ = ["MLSTMState", "mlstm", "mlstm_step", "variants"]
