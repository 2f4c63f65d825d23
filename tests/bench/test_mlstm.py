"""The mLSTM's bench: every way is checked against float64, and what fails is not timed."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from torchstorm.bench import mlstm as bench
from torchstorm.bench import mlstm_cases, mlstm_checks, timing
from torchstorm.bench.mlstm import bench_mlstm
from torchstorm.bench.mlstm_cases import MLSTMCase
from torchstorm.bench.mlstm_ways import PEER, Way, peers, ways_for
from torchstorm.cli import app
from torchstorm.errors import ConfigError
from torchstorm.kernels import mlstm, mlstm_ladder

TINY = MLSTMCase(batch=2, heads=3, seq=9, d_qk=4, d_v=5)
TARGET = MLSTMCase(batch=8, heads=16, seq=8192, d_qk=128, d_v=256)
SHORT = MLSTMCase(batch=64, heads=16, seq=1024, d_qk=128, d_v=256)
LONG = MLSTMCase(batch=2, heads=16, seq=32768, d_qk=128, d_v=256)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlstm_cases, "_SMALL_CPU", (TINY,))
    monkeypatch.setattr(timing, "_SECONDS_A_TIME", 0.0)


def run(tmp_path: Path, **options: Any) -> tuple[bool, list[dict[str, Any]], str]:
    text, file = io.StringIO(), tmp_path / "rows.json"
    passed = bench_mlstm("cpu", json_path=file, console=Console(file=text, width=500), **options)
    return passed, json.loads(file.read_text())["rows"], text.getvalue()


def plain(*inputs: Tensor) -> Tensor:
    return mlstm(*inputs, variant="quadratic")


def without_normalizer(q: Tensor, *inputs: Tensor) -> Tensor:
    """Right outputs, but no gradient through the normaliser."""
    h = plain(q, *inputs)
    return h + (q.sum() - q.sum().detach())


def with_peer(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """Ours, and a peer that is installed: a module of its name, found by the process that it runs in."""
    package = folder / "installed" / PEER
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "torch.py").write_text(
        "import os\nfrom torchstorm.kernels import mlstm\n"
        f"def kernel(q, k, v, i, f, chunk_size):\n    {body}\n"
        "def get_mlstm_kernel(name):\n    return kernel\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    (peer,) = peers()
    replaced(monkeypatch, Way(name="ours", function=plain), peer)


def replaced(monkeypatch: pytest.MonkeyPatch, *ways: Way) -> None:
    monkeypatch.setattr(bench, "ways_for", lambda device: ways)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_is_checked_and_timed(dtype: str, tmp_path: Path) -> None:
    passed, rows, text = run(tmp_path, dtype=dtype)
    assert passed
    assert [row["variant"] for row in rows] == ["recurrent", "quadratic", "chunkwise"]
    for row in rows:
        assert row["checked"], row
        assert row["shape"] == "2x3x9 4/5"
        assert row["dtype"] == dtype
        assert row["fwd_ms"] > 0
        assert row["fwdbwd_ms"] > 0
        assert 0 < row["error"] <= row["allowed"]
        assert 0 < row["gradient_error"] <= row["gradient_allowed"]
        assert row["gradient"] in ("dq", "dk", "dv", "di", "df")
        assert row["tflops"] > 0
        assert row["peer"] is row["best_known_ms"] is None
    assert rows[0]["over_first"] == 1
    assert rows[1]["over_first"] == pytest.approx(rows[0]["fwdbwd_ms"] / rows[1]["fwdbwd_ms"])
    assert [line.split()[0] for line in text.splitlines() if "checked" in line] == [row["variant"] for row in rows]


def test_a_bench_made_in_parts_keeps_its_rows_and_relates_to_them(tmp_path: Path) -> None:
    _, (first, _, chunkwise), _ = run(tmp_path)
    _, rows, _ = run(tmp_path, sizes="2x3x9 4/5", variant_names="chunkwise,quadratic")
    assert [row["variant"] for row in rows] == ["recurrent", "quadratic", "chunkwise"]
    assert rows[0] == first
    assert rows[2]["fwdbwd_ms"] != chunkwise["fwdbwd_ms"]
    for row in rows:
        assert row["over_first"] == pytest.approx(first["fwdbwd_ms"] / row["fwdbwd_ms"])


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times: list[Any] = []
    monkeypatch.setattr(bench, "take_alone", lambda *given: times.append(given))
    replaced(
        monkeypatch,
        Way(name="wrong", function=without_normalizer),
        Way(name="nan", function=lambda *x: plain(*x) * torch.nan),
    )
    passed, (wrong, nan), text = run(tmp_path)
    assert not passed
    assert not times
    for row in (wrong, nan):
        assert not row["checked"]
        assert row["fwd_ms"] is row["fwdbwd_ms"] is row["tflops"] is None
    assert wrong["error"] < 1e-6
    assert wrong["gradient"] == "dq"
    assert wrong["note"].startswith("dq is off by")
    assert nan["note"].startswith("h is off by inf%")
    assert nan["error"] is nan["gradient_error"] is None
    assert "NOT CHECKED; dq is off by" in text


def test_the_peer_stands_beside_ours_and_its_mistakes_are_not_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_peer(
        monkeypatch,
        tmp_path,
        "h = mlstm(q, k, v, i, f, variant='quadratic')\n    return h + (q.sum() - q.sum().detach())",
    )
    passed, (ours, theirs), _ = run(tmp_path)
    assert passed
    assert ours["checked"]
    assert not theirs["checked"]
    assert theirs["fwd_ms"] is not None
    assert theirs["fwdbwd_ms"] is None
    assert "dq is off by" in theirs["note"]
    assert "ms with backward" in theirs["note"]
    assert ours["peer"] == theirs["peer"]
    assert ours["peer"][0] == theirs["fwd_ms"]


@pytest.mark.no_cover
def test_a_peer_that_takes_its_process_down_leaves_the_others_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_peer(monkeypatch, tmp_path, "os.abort()")
    passed, (ours, theirs), _ = run(tmp_path)
    assert passed
    assert ours["checked"]
    assert theirs["fwd_ms"] is ours["peer"] is None
    assert "BrokenProcessPool" in theirs["note"]


def test_the_peer_is_found_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert [way.name for way in ways_for(cuda)] == [rung.name for rung in mlstm_ladder()]
    asked: list[dict[str, Any]] = []

    def kernel(**given: Any) -> tuple[Tensor, None]:
        asked.append(given)
        return given["v"], None

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == PEER else find(name))
    monkeypatch.setitem(sys.modules, PEER, SimpleNamespace(__path__=[]))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, f"{PEER}.torch", SimpleNamespace(get_mlstm_kernel=lambda name: kernel))  # type: ignore[arg-type]
    *_, peer = ways_for(cuda)
    assert (peer.name, peer.is_ours) == (PEER, False)
    inputs = TINY.make(torch.device("cpu"), torch.float32, 0)
    assert peer.function(*peer.given(inputs)) is inputs["v"]
    assert set(asked[0]) == {"q", "k", "v", "i", "f", "chunk_size"}


def test_a_way_that_fails_is_a_row_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*inputs: Tensor) -> Tensor:
        raise RuntimeError("no such\nkernel")

    replaced(monkeypatch, Way(name="broken", function=broken), Way(name="ours", function=plain))
    passed, (first, second), _ = run(tmp_path)
    assert passed
    assert first["note"] == "RuntimeError: no such kernel"
    assert first["error"] is None
    assert second["checked"]
    assert second["over_first"] == 1


def test_a_step_of_the_ladder_is_checked_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = [
        Way(name=rung.name, function=rung.reference, inputs=rung.inputs, reference=rung.reference, has_backward=False)
        for rung in mlstm_ladder()[:4]
    ]
    off = Way(
        name="off",
        function=lambda q, k_t: 1.1 * (q @ k_t),
        inputs=("q", "k_t"),
        reference=torch.matmul,
        has_backward=False,
    )
    replaced(monkeypatch, *steps, off)
    passed, rows, _ = run(tmp_path)
    assert not passed
    assert [row["checked"] for row in rows] == [True] * 4 + [False]
    assert [row["over_first"] for row in rows] == [None] * 3 + [1, None]
    assert all(row["fwdbwd_ms"] is None and row["gradient"] == "" for row in rows)


def test_ways_that_take_too_long_or_too_much_are_left_out() -> None:
    ways = {way.name: way for way in ways_for(torch.device("cuda"))}

    def left_out(case: MLSTMCase, dtype: torch.dtype = torch.bfloat16) -> set[str]:
        return {name for name, way in ways.items() if way.why_not(case, dtype)}

    assert left_out(SHORT) == set()
    assert left_out(TARGET) == {"qk_v", "triton-quadratic"}
    slow = {"matmul_tiles", "qk_v", "causal", "gated", "triton-quadratic"}
    assert left_out(LONG) == slow
    assert left_out(LONG, torch.float32) == slow | {"triton-quadratic-tensor-cores"}
    assert "GiB" in ways["matmul_tiles"].why_not(LONG, torch.bfloat16)
    assert "s a time" in ways["triton-quadratic"].why_not(LONG, torch.bfloat16)


def test_what_there_is_to_do_is_counted() -> None:
    case = MLSTMCase(batch=2, heads=1, seq=64, d_qk=8, d_v=16)
    assert case.flops("product", backward=False) == 2 * 2 * 64 * 64 * 8
    assert case.flops("pairs", backward=False) == 2 * 2 * 64 * 64 * (8 + 16)
    assert case.flops("causal", backward=False) == case.flops("pairs", backward=False) / 2
    assert case.flops("causal", backward=True) == 2 * 2 * 64 * 32 * (4 * 8 + 3 * 16)
    assert case.flops("chunkwise", backward=False) == 2 * 2 * 64 * (2 * 8 * 16 + 32 * 24)
    assert case.flops("recurrent", backward=True) == 2 * 2 * 64 * 6 * 8 * 16
    tokens = 2 * 64
    assert case.input_bytes(torch.bfloat16) == tokens * (8 + 8 + 16 + 2) * 2
    assert case.least_bytes("causal", torch.bfloat16, backward=False) == tokens * (34 + 16) * 2
    assert case.least_bytes("causal", torch.bfloat16, backward=True) == tokens * (3 * 34 + 2 * 16) * 2
    assert case.least_bytes("product", torch.bfloat16, backward=False) == tokens * (8 + 8 + 64) * 2


def test_inputs_are_random_and_taken_in_turn_past_the_cache() -> None:
    assert TARGET.num_sets(torch.bfloat16) == 1
    small = MLSTMCase(batch=1, heads=4, seq=8192, d_qk=128, d_v=128)
    assert small.num_sets(torch.bfloat16) * small.input_bytes(torch.bfloat16) >= 120e6
    first, again, other = (TINY.make(torch.device("cpu"), torch.float32, seed) for seed in (0, 0, 1))
    for name, x in first.items():
        assert torch.equal(x, again[name])
        assert not torch.equal(x, other[name])
    assert {name: tuple(x.shape) for name, x in first.items()} == {
        "q": (2, 3, 9, 4), "k": (2, 3, 9, 4), "v": (2, 3, 9, 5), "i": (2, 3, 9), "f": (2, 3, 9), "dh": (2, 3, 9, 5)
    }  # fmt: skip


def test_every_target_has_times_to_beat_in_bf16_alone() -> None:
    cases = mlstm_cases.mlstm_cases("target", torch.device("cuda"))
    assert len(cases) == 9
    assert all(case.best_known_ms(torch.bfloat16) for case in cases)
    assert TARGET.best_known_ms(torch.bfloat16) == (3.64, 11.13)
    assert TARGET.best_known_ms(torch.float16) is None
    assert len(mlstm_cases.mlstm_cases("all", torch.device("cuda"))) == 11


def test_the_truth_of_long_sequences_is_chunkwise(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = TINY.make(torch.device("cpu"), torch.float32, 0)
    whole = mlstm_checks.Truth(inputs)
    for name, most in (("_MOST_PAIRS", 4), ("_MOST_STEPS", 2)):
        monkeypatch.setattr(mlstm_checks, name, most)
    long = mlstm_checks.Truth(inputs)
    assert (whole.num_heads, long.num_heads) == (2, 1)
    found = mlstm_checks.outputs_and_gradients(plain, inputs)
    for name, error in whole.check(found).errors.items():
        assert error < 1e-5, name
        assert long.check(found).errors[name] < 1e-5, name


def test_a_yardstick_that_is_lost_lets_nothing_pass() -> None:
    right = torch.ones(4, dtype=torch.float64)
    assert mlstm_checks.allowed([right * 3], right, torch.bfloat16) == 0.1
    assert mlstm_checks.allowed([right * torch.nan], right, torch.float32) == 1e-3
    assert mlstm_checks.allowed([right * 1.01], right, torch.bfloat16) == pytest.approx(0.02)
    assert mlstm_checks.allowed([right], right, torch.bfloat16) == torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sizes": "huge"}, "--sizes 'huge', but it takes small, target, all, or shapes BxHxS d_qk/d_v; not 'huge'"),
        ({"sizes": "2x3x0 4/5"}, "not '2x3x0 4/5'"),
        ({"sizes": "target"}, "has shapes for a GPU"),
        ({"dtype": "float64"}, "--dtype 'float64'"),
        ({"variant_names": "fast"}, r"--variant 'fast' names \['fast'\]; known names are recurrent"),
        ({"plot": Path("bars.xyz")}, "'.xyz' is not one of"),
    ],
)
def test_mistakes_are_told_before_anything_runs(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, **options)
    assert not (tmp_path / "rows.json").exists()


def test_the_command_writes_rows_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows, picture = tmp_path / "mlstm.json", tmp_path / "mlstm.png"
    options = ["--device", "cpu", "--variant", "quadratic,chunkwise", "--json", str(rows), "--plot", str(picture)]
    done = CliRunner().invoke(app, ["bench", "mlstm", *options])
    assert done.exit_code == 0, done.output
    assert [row["variant"] for row in json.loads(rows.read_text())["rows"]] == ["quadratic", "chunkwise"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_fails_where_a_check_of_ours_does(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, Way(name="wrong", function=without_normalizer))
    assert CliRunner().invoke(app, ["bench", "mlstm", "--device", "cpu"]).exit_code == 1


def test_without_matplotlib_a_picture_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"torchstorm\[plot\]"):
        run(tmp_path, plot=tmp_path / "a.png")
