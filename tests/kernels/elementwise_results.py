"""What the interpreter says of the elementwise kernels, dropout and batch_norm_act: asked once for all test files."""

from __future__ import annotations

from functools import cache
from typing import Any

from kernels.interpreting import interpreted

GPU_VARIANTS = ("naive", "vectorised", "persistent")
_NAMES = ("relu", "sigmoid", "gelu", "gelu_tanh", "silu")


def _case(check: str, variant: str, dtype: str, **arguments: Any) -> dict[str, Any]:
    name = " ".join([check.removeprefix("check_"), *map(str, arguments.values()), variant, dtype])
    return {"name": name, "check": check, "arguments": {"variant": variant, "dtype": dtype, **arguments}}


ELEMENTWISE = [
    *(_case("check_activation", "vectorised", "float32", name=name, layout="flat") for name in _NAMES),
    *(_case("check_activation", "vectorised", "float16", name=name, layout="flat") for name in ("gelu", "silu")),
    *(_case("check_activation", "vectorised", "float32", name="silu", layout=layout)
      for layout in ("one number", "nothing", "transposed", "channels last", "every third", "expanded",
                     "six dimensions")),
    *(_case("check_activation", variant, "float16", name="gelu", layout=layout)
      for variant in ("naive", "persistent") for layout in ("odd", "every third")),
    *(_case("check_special", "vectorised", dtype, name=name)
      for name in _NAMES for dtype in (("float32", "float16") if name == "gelu" else ("float32",))),
    *(_case("check_pair", "vectorised", "float32", op="mul", pair=pair)
      for pair in ("same", "a bias", "a factor a row", "a row and a column", "one number", "of each channel",
                   "of each batch and column", "tangled", "nothing", "a long bias", "a factor for each of many rows",
                   "one number for many")),
    _case("check_pair", "vectorised", "float16", op="add", pair="a bias"),
    _case("check_pair", "persistent", "float16", op="mul", pair="same"),
    _case("check_strided_pair", "vectorised", "float16", op="mul"),
    _case("check_strided_pair", "naive", "float32", op="add"),
]  # fmt: skip
DROPOUT = [
    _case("check_dropout", "vectorised", "float32", num=5003),
    _case("check_dropout", "vectorised", "float16", num=4097, num_seeds=2),
    _case("check_dropout", "naive", "float32", num=4099, num_seeds=1),
]
BATCH_NORM = [
    _case("check_batch_norm", "two-stage", "float32", norm="of features", activation="relu"),
    _case("check_batch_norm", "two-stage", "float16", norm="of images", activation="silu"),
    _case("check_batch_norm", "two-stage", "float32", norm="of images, channels last", activation="gelu"),
    _case("check_batch_norm", "two-stage", "float32", norm="of long rows", activation=None, affine=False),
    _case("check_batch_norm", "two-stage", "float16", norm="of many rows", activation="gelu"),
    _case("check_batch_norm", "naive", "float32", norm="of many rows", activation="relu"),
    _case("check_batch_norm", "two-stage", "float32", norm="of several tiles", activation="relu"),
    _case("check_batch_norm", "two-stage", "float32", norm="of one sample", activation="silu"),
    _case("check_batch_norm", "two-stage", "float32", norm="of images, transposed", activation="relu"),
    _case("check_batch_norm", "two-stage", "float32", norm="of images", activation="silu", training=False),
]


@cache
def results() -> dict[str, Any]:
    return interpreted("elementwise_interpreted.py", [*ELEMENTWISE, *DROPOUT, *BATCH_NORM])


def names(cases: list[dict[str, Any]]) -> list[str]:
    return [str(case["name"]) for case in cases]
