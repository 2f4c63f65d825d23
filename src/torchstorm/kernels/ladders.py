"""Every operation with kernels of its own, and the ways to compute it, from the plainest to the fastest."""

from __future__ import annotations

from torchstorm.errors import ConfigError
from torchstorm.kernels.linear.function import LADDER as _LINEAR
from torchstorm.kernels.linear_cross_entropy.function import LADDER as _LINEAR_CROSS_ENTROPY
from torchstorm.kernels.mlstm.function import VARIANTS as _MLSTM
from torchstorm.kernels.variants import Ladder


def _names(ladder: Ladder) -> tuple[str, ...]:
    return tuple(variant.name for variant in ladder)


_LADDERS = {
    "linear": _names(_LINEAR),
    "linear_cross_entropy": _names(_LINEAR_CROSS_ENTROPY),
    "mlstm": _MLSTM,
}


def variants(op: str) -> tuple[str, ...]:
    """Names the ways in which `op` can be computed, in order of history; any is a value of its `variant=`.

    Raises:
        ConfigError: there is no such operation.
    """
    if op not in _LADDERS:
        raise ConfigError(f"There is no operation {op!r} with variants; there is {', '.join(map(repr, _LADDERS))}.")
    return _LADDERS[op]
