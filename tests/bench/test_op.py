"""An operation's bench: nothing wrong is timed, ways that cannot run say why, and rows relate to each other."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from torchstorm.bench import op as bench
from torchstorm.bench import timing
from torchstorm.bench.cases import bench_device
from torchstorm.bench.op import bench_op
from torchstorm.bench.op_cases import Inputs, OpCase, Outputs
from torchstorm.bench.ops import OPS
from torchstorm.errors import ConfigError, DeviceError


def square_plus(inputs: Inputs) -> Outputs:
    return {"y": inputs["x"] * inputs["x"] + inputs["z"]}


def ours(inputs: Inputs, variant: str) -> Outputs:
    if variant == "elsewhere":
        raise DeviceError("it runs on another device")
    y = square_plus(inputs)["y"]
    if variant == "wrong":
        y = y * 1.01
    if variant == "wrong-gradient":
        y = y + (inputs["x"].sum() - inputs["x"].sum().detach())
    if variant == "nan":
        y = y * torch.nan
    return {"y": y}


def case(**changes: Any) -> OpCase:
    def make(device: torch.device, seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        x, z, d_y = (torch.randn(100, generator=generator, device=device, dtype=options["dtype"]) for _ in range(3))
        return {"x": x, "z": z, "d_y": d_y}

    options: dict[str, Any] = {
        "op": "square_plus",
        "shape": "100",
        "dtype": torch.float32,
        "make": make,
        "ours": ours,
        "variants": ("naive", "auto"),
        "reference": square_plus,
        "peers": {"other": lambda inputs: {"y": square_plus(inputs)["y"] * 2}},
        "differentiable": ("x",),
        "work": {"forward": 800.0, "backward": 800.0, "both": 1600.0},
        "unit": "B/s",
    } | changes
    return OpCase(**options)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SECONDS_A_TIME", 0.0)
    monkeypatch.setattr("torchstorm.bench.ceilings.Ceilings.of", lambda self, unit, dtype: 1e9)


def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *cases: OpCase, **options: Any
) -> tuple[bool, dict[tuple[str, str], dict[str, Any]], str]:
    monkeypatch.setattr(bench, "_cases", lambda op, sizes, device, dtype: cases)
    text, file = io.StringIO(), tmp_path / "rows.json"
    passed = bench_op("matmul", "cpu", json_path=file, console=Console(file=text, width=300), **options)
    rows = json.loads(file.read_text())["rows"]
    return passed, {(row["variant"], row["pass"]): row for row in rows}, text.getvalue()


def test_every_pass_of_every_way_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    passed, rows, text = run(monkeypatch, tmp_path, case())
    assert passed
    assert [key[0] for key in rows] == ["reference"] * 3 + ["other"] * 3 + ["naive"] * 3 + ["auto"] * 3
    for (variant, which), row in rows.items():
        if variant == "other":
            continue
        assert row["checked"]
        assert 0 < row["fastest_ms"] <= row["ms"] <= row["slowest_ms"]
        assert row["rate"] == pytest.approx(case().work[which] / row["ms"] * 1e3)  # type: ignore[index]
        assert row["share_of_ceiling"] == pytest.approx(row["rate"] / 1e9)
        assert row["over_pytorch"] == pytest.approx(rows["reference", which]["ms"] / row["ms"])
        assert (row["over_first"] is None) == (variant == "reference")
        assert row["where"] in (("y",) if which == "forward" else ("y", "d_x"))
    assert rows["naive", "both"]["over_first"] == 1
    assert "GB/s" in text


def test_what_is_wrong_is_not_timed_and_only_ours_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timed: list[Any] = []
    take = bench.take_in_turn
    monkeypatch.setattr(bench, "take_in_turn", lambda prepare, device: timed.extend(prepare) or take(prepare, device))
    variants = ("wrong", "wrong-gradient", "nan", "elsewhere")
    passed, rows, text = run(monkeypatch, tmp_path, case(variants=variants))
    assert not passed
    wrong = [("other", "forward"), ("wrong", "forward"), ("nan", "both"), ("wrong-gradient", "backward")]
    for key in (*wrong, ("elsewhere", "forward")):
        assert rows[key]["ms"] is rows[key]["rate"] is None
        assert not rows[key]["checked"]
    assert rows["wrong-gradient", "forward"]["checked"]
    assert rows["wrong-gradient", "backward"]["where"] == "d_x"
    assert rows["nan", "both"]["error"] is None
    assert "another device" in rows["elsewhere", "forward"]["note"]
    assert timed == [*(("reference", each) for each in ("forward", "backward", "both")), ("wrong-gradient", "forward")]
    assert "y is off by" in text
    passed, _, _ = run(monkeypatch, tmp_path, case())
    assert passed  # `other` is wrong, and not ours


def test_a_truth_of_its_own_is_what_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    passed, rows, _ = run(monkeypatch, tmp_path, case(truth=lambda inputs: {"y": square_plus(inputs)["y"] + 1}))
    assert not passed
    assert not rows["reference", "forward"]["checked"]


def test_forward_alone_needs_no_gradients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, rows, _ = run(monkeypatch, tmp_path, case(differentiable=(), work={"forward": 1.0}))
    assert {which for _, which in rows} == {"forward"}


def test_a_file_made_in_parts_keeps_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, first, _ = run(monkeypatch, tmp_path, case(), variant_names="reference")
    _, rows, _ = run(monkeypatch, tmp_path, case(), variant_names="naive")
    assert {variant for variant, _ in rows} == {"reference", "naive"}
    assert rows["reference", "both"] == first["reference", "both"]


def test_some_ways_and_a_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, rows, _ = run(monkeypatch, tmp_path, case(), variant_names="auto", plot=tmp_path / "a.png")
    assert {variant for variant, _ in rows} == {"auto"}
    assert rows["auto", "forward"]["over_pytorch"] is None
    assert (tmp_path / "a.png").stat().st_size > 1000
    for options, message in (({"variant_names": "none"}, "--variant 'none'"), ({"dtype": "int8"}, "--dtype 'int8'")):
        with pytest.raises(ConfigError, match=message):
            run(monkeypatch, tmp_path, case(), **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("huge", "--sizes 'huge', but .* takes small, target, or shapes .*; not 'huge'"),
        ("9", "not '9'"),
        ("4x0x3", "not '4x0x3'"),
        ("2x3x4x5x6", "not '2x3x4x5x6'"),
        ("256x²x3", "not '256x²x3'"),
        ("64x1000,", "not"),
        ("target", "--sizes target has shapes for a GPU"),
    ],
)
@pytest.mark.parametrize("name", sorted(name for name, op in OPS.items() if "cpu" not in op.targets))
def test_sizes_that_are_not_there(name: str, sizes: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench_op(name, "cpu", sizes=sizes, console=Console(file=io.StringIO()))


@pytest.mark.parametrize("name", OPS)
def test_any_shape_may_be_timed_and_every_way_is_checked_at_it(name: str) -> None:
    shapes = {"matmul": "5x3x2,2x4x3x5", "elementwise": "3x5", "norms": "3x130"}.get(name, "9x6x5")
    text = io.StringIO()
    assert bench_op(
        name,
        "cpu",
        sizes=shapes,
        variant_names="reference,auto",
        console=Console(file=text, width=300),
    )
    shown = {line.split()[1].rstrip(",") for line in text.getvalue().splitlines() if line.endswith(" float32")}
    assert shown == set(shapes.split(","))


def test_sizes_may_name_shapes() -> None:
    cases = bench._cases("matmul", "256x256x256,1024x1024x1024", torch.device("cpu"), torch.float32)
    assert [each.shape for each in cases] == ["256x256x256", "1024x1024x1024"]
    forms = bench._cases("elementwise", "64x1000", torch.device("cpu"), torch.float32)
    assert {each.shape for each in forms if each.op == "gelu"} == {"64x1000", "64x1000, tanh"}
    with pytest.raises(ConfigError, match="'256x256x256,3x3', but matmul takes small, target, or shapes MxNxK or BxMx"):
        bench._cases("matmul", "256x256x256,3x3", torch.device("cpu"), torch.float32)


def test_times_are_taken_in_turn_and_what_fails_later_keeps_its_reason() -> None:
    order: list[str] = []

    def fail() -> None:
        raise RuntimeError("no more memory")

    prepare = {"a": lambda: lambda: order.append("a"), "b": lambda: lambda: order.append("b"), "c": lambda: fail}
    found = timing.take_in_turn(prepare, torch.device("cpu"))
    assert str(found["c"]) == "no more memory"
    assert order[:4] == ["a", "a", "b", "b"]  # the first runs
    rounds = list(zip(order[4::2], order[5::2], strict=True))
    assert len(rounds) == timing._ROUNDS
    assert set(rounds) == {("a", "b"), ("b", "a")}  # not always one after the same other
    assert isinstance(found["a"], timing.Took)
    assert found["a"].host_ms is found["a"].extra_bytes is None


def test_what_takes_long_runs_in_fewer_turns_and_still_has_a_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SECONDS_LONG", 0.01)
    calls: list[str] = []

    def slow() -> None:
        calls.append("slow")
        time.sleep(0.02 + 0.001 * len(calls))

    prepare = {"slow": lambda: slow, "quick": lambda: lambda: calls.append("quick")}
    found = timing.take_in_turn(prepare, torch.device("cpu"))
    assert calls.count("slow") == 2 + 5
    assert calls.count("quick") == 2 + timing._ROUNDS
    took = found["slow"]
    assert isinstance(took, timing.Took)
    assert 20 < took.fastest_ms < took.ms < took.slowest_ms


def test_ceilings_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(timing, "_SECONDS_A_TIME", 0.0)
    found = bench.Ceilings(torch.device("cpu"))
    found._copy_bytes, found._size = 2**20, 64
    assert found.of("B/s", torch.float32) > 1e6
    assert found.of("FLOP/s", torch.float32) > 1e6
    assert found.of("B/s", torch.float32) == found.of("B/s", torch.bfloat16)
    assert "TFLOP/s" in found.told(torch.float32)


def test_a_benchmark_leaves_no_setting_behind_that_slows_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert bench_device("cpu") == torch.device("cpu")
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
