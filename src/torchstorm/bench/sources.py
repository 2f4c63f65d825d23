"""Which sources the figures of each bench depend on: a record carries their hash (`train.stamp`).

In it are the rooms that run while the clock does, and of this room what makes the work and what times it; not what
prints and writes.
"""

from __future__ import annotations

from torchstorm.bench.ops import OPS
from torchstorm.train.stamp import TRAINING

_STEPS = (
    *(*TRAINING, "bench/bits.py", "bench/cases.py", "bench/intervals.py", "bench/measure.py", "bench/sessions.py"),
    "bench/ways.py",
)
_SIDE_BY_SIDE = (*_STEPS, "bench/side_by_side.py")
_KERNELS = (
    "errors.py",
    "nvrtc.py",
    "kernels",
    "transfer/engine.py",
    "offload/step/clock.py",
    "bench/accuracy.py",
    "bench/timing.py",
)
_OPERATIONS = (*_KERNELS, "bench/ceilings.py", "bench/op.py", "bench/op_cases.py")


def _file(function: str) -> str:
    """Of "torchstorm.bench.x:f", "bench/x.py"."""
    return function.partition(":")[0].removeprefix("torchstorm.").replace(".", "/") + ".py"


SOURCES: dict[str, tuple[str, ...]] = {
    "offload": (*_SIDE_BY_SIDE, "bench/peers.py", "bench/offload.py"),
    "wall": (*_SIDE_BY_SIDE, "bench/trainings.py", "bench/wall.py"),
    "models": (*_SIDE_BY_SIDE, "bench/peers.py", "bench/model_cases.py", "bench/models.py"),
    "xlstm": (*_SIDE_BY_SIDE, "bench/trainings.py", "bench/xlstm.py"),
    "host": (*_STEPS, "bench/model_cases.py", "bench/host.py"),
    "chunks": (*_STEPS, "bench/chunks.py"),
    "learn": (*TRAINING, "train", "bench/learn.py"),
    "storage": ("errors.py", "sizes.py", "transfer", "storage", "bench/loading.py", "bench/storage.py"),
    "mlstm": (
        *(*_KERNELS, "bench/mlstm.py", "bench/mlstm_cases.py", "bench/mlstm_checks.py"),
        "bench/mlstm_ways.py",
    ),
    **{name: (*_OPERATIONS, _file(op.cases)) for name, op in OPS.items()},
}
"""Files and folders below the package's folder, by the record's `op`."""
