"""The mLSTM's bench on a GPU: every rung passes its check, is timed, and stands in the rows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from torchstorm.bench.mlstm import bench_mlstm
from torchstorm.bench.mlstm_ways import PEER
from torchstorm.kernels import mlstm_ladder

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_rung_is_checked_and_timed(dtype: str, tmp_path: Path) -> None:
    text, file = io.StringIO(), tmp_path / "rows.json"
    assert bench_mlstm("cuda", dtype=dtype, json_path=file, console=Console(file=text, width=500)), text.getvalue()
    rows = [row for row in json.loads(file.read_text())["rows"] if row["variant"] != PEER]
    assert [row["variant"] for row in rows] == [rung.name for rung in mlstm_ladder()] * 2
    for row in rows:
        assert row["checked"], text.getvalue()
        assert row["fwd_ms"] > 0
        assert (row["fwdbwd_ms"] is not None) == row["variant"].startswith("triton")
