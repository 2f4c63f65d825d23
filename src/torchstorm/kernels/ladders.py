"""Every operation with kernels of its own, and the ways to compute it, from the plainest to the fastest."""

from __future__ import annotations

from torchstorm.errors import ConfigError
from torchstorm.kernels.matmul.ladder import MATMUL
from torchstorm.kernels.mlstm.function import VARIANTS as _MLSTM
from torchstorm.kernels.variants import names

_LADDERS = {
    "matmul": names(MATMUL),
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
