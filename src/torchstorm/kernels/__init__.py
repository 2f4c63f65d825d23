"""Operations with kernels of their own. `import torchstorm` leaves this room alone, as it needs torch."""

from torchstorm.errors import ConfigError
from torchstorm.kernels.mlstm import VARIANTS as _MLSTM_VARIANTS
from torchstorm.kernels.mlstm import (
    MLSTMState,
    mlstm,
    mlstm_step,
)  # `mlstm` from here on is the function, not its folder

__all__ = ["MLSTMState", "mlstm", "mlstm_step", "variants"]

_VARIANTS = {"mlstm": _MLSTM_VARIANTS}


def variants(op: str) -> tuple[str, ...]:
    """Names the ways in which `op` can be computed, in order of history; any is a value of its `variant=`.

    Raises:
        ConfigError: there is no such operation.
    """
    if op not in _VARIANTS:
        raise ConfigError(f"There is no operation {op!r} with variants; there is {', '.join(map(repr, _VARIANTS))}.")
    return _VARIANTS[op]
