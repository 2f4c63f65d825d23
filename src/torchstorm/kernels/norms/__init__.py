"""LayerNorm and RMSNorm: see `function.py`."""

from torchstorm.kernels.norms.function import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
