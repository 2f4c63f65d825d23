"""All operations with our own kernels, and their variants from the simplest to the fastest."""

from __future__ import annotations

from torchstorm.errors import ConfigError
from torchstorm.kernels.batch_norm.function import VARIANTS as _BATCH_NORM
from torchstorm.kernels.dropout.function import VARIANTS as _DROPOUT
from torchstorm.kernels.elementwise.function import VARIANTS as _ELEMENTWISE
from torchstorm.kernels.linear import LADDER as _LINEAR
from torchstorm.kernels.linear_cross_entropy import LADDER as _LINEAR_CROSS_ENTROPY
from torchstorm.kernels.matmul.ladder import MATMUL as _MATMUL
from torchstorm.kernels.mlstm.function import VARIANTS as _MLSTM
from torchstorm.kernels.norms.function import NORMS as _NORMS
from torchstorm.kernels.softmax.function import SOFTMAX as _SOFTMAX
from torchstorm.kernels.variants import Ladder, names

_LADDERS: dict[str, Ladder] = {
    **dict.fromkeys(("add", "mul", "relu", "sigmoid", "gelu", "silu"), _ELEMENTWISE),
    "batch_norm_act": _BATCH_NORM,
    "dropout": _DROPOUT,
    **dict.fromkeys(("layer_norm", "rms_norm"), _NORMS),
    "linear": _LINEAR,
    "linear_cross_entropy": _LINEAR_CROSS_ENTROPY,
    "matmul": _MATMUL,
    **dict.fromkeys(("log_softmax", "softmax"), _SOFTMAX),
}
_NAMES = {"mlstm": _MLSTM, **{op: names(ladder) for op, ladder in _LADDERS.items()}}


def variants(op: str) -> tuple[str, ...]:
    """Names of the variants of an operation, in historical order. Each is a value of `variant=`.

    Raises:
        ConfigError: the operation does not exist.
    """
    if op not in _NAMES:
        raise ConfigError(f"There is no operation {op!r} with variants; there are {', '.join(map(repr, _NAMES))}.")
    return _NAMES[op]
