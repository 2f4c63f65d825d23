"""What `mlstm` cannot take, it refuses with the sizes and the way out."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import forked
from torchstorm.errors import ConfigError, DeviceError, ShapeError
from torchstorm.kernels import MLSTMState, mlstm, variants
from torchstorm.kernels.mlstm.reference import packed_offsets

B, H, S, K, V = 2, 3, 5, 4, 6


def fitting() -> dict[str, Any]:
    q, v, gate = torch.zeros(B, H, S, K), torch.zeros(B, H, S, V), torch.zeros(B, H, S)
    return {"q": q, "k": q, "v": v, "i": gate, "f": gate}


def state(C: tuple[int, ...] = (B, H, K, V), n: tuple[int, ...] = (B, H, K), m: tuple[int, ...] = (B, H)) -> MLSTMState:
    return MLSTMState(torch.zeros(C), torch.zeros(n), torch.zeros(m))


def offsets(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"q": torch.zeros(B, S, K)}, ShapeError, r"q \(2, 5, 4\).*q, k \(B, H, S, d_qk\).*transpose"),
        ({"k": torch.zeros(B, H, S, 7)}, ShapeError, r"q \(2, 3, 5, 4\), k \(2, 3, 5, 7\)"),
        ({"v": torch.zeros(B, H, 9, V)}, ShapeError, r"v \(2, 3, 9, 6\)"),
        ({"v": torch.zeros(B, H, S, 0)}, ShapeError, r"v \(2, 3, 5, 0\).*at least 1"),
        ({"f": torch.zeros(B, S, H)}, ShapeError, r"f \(2, 5, 3\).*both gates must be \(2, 3, 5\)"),
        ({"k": torch.zeros(B, H, S, K).half()}, ShapeError, r"q is torch.float32, k torch.float16.*\.to\(dtype\)"),
        ({"q": torch.zeros(B, H, S, K, dtype=torch.int64)}, ShapeError, r"q is torch.int64"),
        ({"i": torch.zeros(B, H, S).half()}, ShapeError, r"i is torch.float16, f torch.float32.*both torch.float32"),
        ({"v": torch.zeros(B, H, S, V, device="meta")}, ShapeError, r"v is on meta, but q is on cpu"),
        ({"initial_state": state(C=(B, H, K, 5))}, ShapeError, r"C \(2, 3, 4, 5\).*need C \(2, 3, 4, 6\)"),
        ({"initial_state": state()[:2]}, ShapeError, r"has 2 parts.*\(C, n, m\)"),
        ({"initial_state": state()._replace(m=torch.zeros(B, H).long())}, ShapeError, r"m is torch.int64 on cpu"),
        ({"gate": "tanh"}, ConfigError, r"gate='tanh'.*'exp', 'sigmoid'"),
        ({"variant": "fast"}, ConfigError, r"variant='fast'.*'chunkwise'.*'auto'"),
        ({"variant": "triton-chunkwise"}, DeviceError, r"runs on a GPU, but q is on cpu.*'chunkwise'"),
        ({"chunk": 0}, ConfigError, r"chunk=0.*at least 1"),
        ({"chunk": 8, "variant": "recurrent"}, ConfigError, r"chunk=8.*'recurrent' has no chunks"),
        ({"cu_seqlens": offsets(0, 5)}, ShapeError, r"B=2, not 1"),
    ],
)
def test_what_does_not_fit(changed: dict[str, Any], error: type[Exception], says: str) -> None:
    mlstm(**fitting())
    with pytest.raises(error, match=says):
        mlstm(**(fitting() | changed))


@pytest.mark.parametrize("variant", ["chunkwise", "recurrent"])
@pytest.mark.parametrize(
    ("cu_seqlens", "says"),
    [
        (offsets(0, 5, dtype=torch.int16), r"torch.int16 \(2,\).*int32 or int64"),
        (offsets(0), r"\(1,\).*at least one"),
        (offsets(0, 5)[None], r"\(1, 2\)"),
        (offsets(0, 5).to("meta"), r"cu_seqlens is on meta, but q is on cpu"),
        (offsets(1, 5), r"cu_seqlens=\[1, 5\] of 5 packed tokens: it must start at 0"),
        (offsets(0, 4), r"end at 5"),
        (offsets(0, 4, 3, 5), r"never decrease"),
    ],
)
def test_offsets_that_do_not_fit(cu_seqlens: torch.Tensor, says: str, variant: str) -> None:
    inputs = {name: x[:1] for name, x in fitting().items()}
    mlstm(**inputs, cu_seqlens=offsets(0, 2, 5), variant=variant)
    with pytest.raises(ShapeError, match=says):
        mlstm(**inputs, cu_seqlens=cu_seqlens, variant=variant)


def test_many_offsets_are_told_in_short() -> None:
    with pytest.raises(ShapeError, match=r"cu_seqlens=\[0, 1, 2, 3, 4, 5, 6, '...', 99\] of 5"):
        packed_offsets(torch.arange(100), 5)


# Each from the start, in a fork of a process that has imported nothing but torch.
FOUND_BY_NAME = """
import importlib, os, pickle, sys
import torch

for first in ("torchstorm.kernels.mlstm.step", "torchstorm.kernels", "torchstorm.kernels.ladders"):
    child = os.fork()
    if child == 0:
        importlib.import_module(first)
        from torchstorm import kernels
        import torchstorm.kernels.mlstm.maximum
        assert callable(kernels.mlstm) and kernels.mlstm.__name__ == "mlstm", kernels.mlstm
        assert pickle.loads(pickle.dumps(torchstorm.kernels.mlstm)) is kernels.mlstm
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, first
"""


def test_the_function_is_found_by_its_name_though_its_folder_has_it_too() -> None:
    command = [sys.executable, "-c", FOUND_BY_NAME]
    done = forked.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_only_ways_to_compute_it_are_variants() -> None:
    assert variants("mlstm")[:3] == ("recurrent", "quadratic", "chunkwise")
    with pytest.raises(ConfigError, match=r"no operation 'mlsmt'.*'mlstm'"):
        variants("mlsmt")
