"""The mLSTM: `mlstm` over sequences, `mlstm_step` for one token."""

from torchstorm.kernels.mlstm.function import VARIANTS, mlstm
from torchstorm.kernels.mlstm.reference import Gate, MLSTMState
from torchstorm.kernels.mlstm.step import mlstm_step

__all__ = ["VARIANTS", "Gate", "MLSTMState", "mlstm", "mlstm_step"]
