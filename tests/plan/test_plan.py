"""Traces and plans as values: to JSON and back, and as people read them."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from plan import naive
from plan.traces import machines, trace_of, traces
from torchstorm.errors import PlanError, StorageError
from torchstorm.plan.describe import outer_block
from torchstorm.plan.forecast import Figures, Placement
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget, Plan, Workload
from torchstorm.plan.solve import solve
from torchstorm.plan.trace import Moment, Op, SavedStorage, Trace, Value, make_parcels
from torchstorm.sizes import parse_size

KIB = 1024


def storage(kib: int, made: int, needed: int, parcel: int, block: str) -> SavedStorage:
    return SavedStorage(
        nbytes=kib * KIB, made=made, owned=made, needed=needed, freed=needed + 1, parcel=parcel, block=block
    )


def example(*, parcel_bytes: tuple[int, ...] = (8 * KIB, 12 * KIB, 6 * KIB)) -> Plan:
    """Four storages in three parcels, one of them shared, and one that may not move."""
    trace = trace_of(
        "p0 p1 p2 p3 p4 u4 u3 u2 u1 u0",
        [
            storage(8, 1, 10, 0, "h.0.mlp.fc"),
            storage(12, 2, 9, 1, "h.0.attn"),
            storage(4, 3, 8, 2, "h.1.mlp"),
            storage(2, 4, 7, 2, "h.1.attn"),
            storage(1, 5, 6, -1, ""),
        ],
        seconds=[0.001] * 11,
        parcel_bytes=parcel_bytes,
    )
    return Plan(
        trace=trace,
        budget=Budget(ram=16 * KIB, disk=2**20),
        placements=(
            Placement(tier="disk", drop=3, fetch=9),
            Placement(tier="keep"),
            Placement(tier="disk", drop=5, fetch=7),
        ),
        forecast=Figures(step_ms=12.34, vram_bytes=0, ram_bytes=15 * KIB, disk_bytes=14 * KIB),
    )


def table(text: str) -> dict[str, list[int]]:
    """The rows of a printed plan: block -> bytes kept, computed again, in RAM, on disk."""
    rows = {}
    for line in text.splitlines()[2:]:
        if line.startswith("forecast"):
            break
        cells = (line[28:40], line[40:52], line[52:64], line[64:76])
        rows[line[:28].strip()] = [0 if cell.strip() == "-" else parse_size(cell.strip()) for cell in cells]
    return rows


@settings(max_examples=60, deadline=None)
@given(trace=traces(), machine=machines())
def test_what_is_written_is_read_back(trace: Trace, machine: Machine) -> None:
    assert Trace.from_json(trace.to_json()) == trace
    assert pickle.loads(pickle.dumps(trace)) == copy.deepcopy(trace) == trace
    assert Machine.from_json(machine.to_json()) == machine
    enough = max(naive.all_away_bytes(trace), naive.all_kept_bytes(trace))
    plan = solve(trace, machine, Budget(vram=enough, ram=enough, disk=1 << 40))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert (again.drops, again.fetches) == (plan.drops, plan.fetches)
    assert str(again) == str(plan)


TRACE_TEXT = example().trace.to_json()
PLAN_TEXT = example().to_json()


def changed(text: str, **fields: object) -> str:
    return json.dumps({**json.loads(text), **fields})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "3",
        "[]",
        '"text"',
        "{}",
        changed(TRACE_TEXT, extra=1),
        changed(TRACE_TEXT, moments=[{"kind": "enter"}]),
        changed(TRACE_TEXT, moments=3),
        changed(TRACE_TEXT, storages=[[]]),
        changed(TRACE_TEXT, parcels="text"),
        PLAN_TEXT,
    ],
)
def test_text_that_is_no_trace_is_a_plan_error(text: str) -> None:
    with pytest.raises(PlanError, match="the text is not a trace written by torchstorm"):
        Trace.from_json(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        TRACE_TEXT,
        changed(PLAN_TEXT, trace=None),
        changed(PLAN_TEXT, budget={"vram": 1, "tape": 2}),
        changed(PLAN_TEXT, placements=[{"drop": 1}]),
        changed(PLAN_TEXT, forecast={}),
    ],
)
def test_text_that_is_no_plan_is_a_plan_error(text: str) -> None:
    with pytest.raises(PlanError, match="the text is not a plan written by torchstorm"):
        Plan.from_json(text)


@pytest.mark.parametrize("num_placements", [0, 1, 2, 4])
def test_a_plan_whose_placements_do_not_fit_its_trace_is_a_plan_error(num_placements: int) -> None:
    placements = [{"tier": "keep", "drop": 0, "fetch": 0}] * num_placements
    with pytest.raises(
        PlanError, match=rf"has {num_placements} placements, but its trace has 3 parcels: it was changed"
    ):
        Plan.from_json(changed(PLAN_TEXT, placements=placements))


def test_values_cannot_be_changed() -> None:
    plan = example()
    for value, field in ((plan, "budget"), (plan.trace, "moments"), (plan.placements[0], "tier"), (plan.budget, "ram")):
        with pytest.raises(AttributeError, match="cannot assign"):
            setattr(value, field, None)


def test_a_plan_knows_what_moves_and_when() -> None:
    plan = example()
    assert plan.moved_bytes("disk") == 14 * KIB
    assert plan.moved_bytes("ram") == 0
    assert plan.drops == {3: [0], 5: [2]}
    assert plan.fetches == {9: [0], 7: [2]}
    assert plan.trace.saved_bytes == 27 * KIB
    assert plan.trace.compute_s == pytest.approx(0.011)


def test_a_printed_plan_names_blocks_totals_and_forecast() -> None:
    assert str(example()).splitlines() == [
        "5 saved storages, 27.00 KiB, in 3 parcels; 11 moments",
        "block                               keep   recompute         ram        disk  why",
        "h.0                            12.00 KiB           -           -    8.00 KiB  moved to make room",
        "h.1                                    -           -           -    6.00 KiB  moved to make room",
        "(model)                         1.00 KiB           -           -           -  fits",
        "total                          13.00 KiB           -           -   14.00 KiB",
        "forecast            peak      budget",
        "ram            15.00 KiB   16.00 KiB",
        "disk           14.00 KiB    1.00 MiB",
        "step             12.3 ms  0.0 ms of it recompute, 1.3 ms waiting for copies",
    ]


def test_a_printed_plan_for_a_gpu_has_its_three_tiers() -> None:
    plan = example()
    plan = replace(
        plan,
        trace=replace(plan.trace, device="cuda"),
        budget=Budget(vram=64 * KIB, ram=16 * KIB),
        placements=(Placement(tier="ram", drop=3, fetch=9), *plan.placements[1:]),
        forecast=Figures(step_ms=1.0, vram_bytes=60 * KIB, ram_bytes=8 * KIB, disk_bytes=6 * KIB),
    )
    assert str(plan).splitlines()[5:] == [
        "total                          13.00 KiB           -    8.00 KiB    6.00 KiB",
        "forecast            peak      budget",
        "vram           60.00 KiB   64.00 KiB",
        "ram             8.00 KiB   16.00 KiB",
        "disk            6.00 KiB           -",
        "step              1.0 ms  0.0 ms of it recompute, 0.0 ms waiting for copies",
    ]


@pytest.mark.parametrize("parcel_bytes", [(8 * KIB, 12 * KIB, 6 * KIB), (8 * KIB, 12 * KIB, 7 * KIB)])
def test_the_totals_of_a_printed_plan_are_its_columns(parcel_bytes: tuple[int, ...]) -> None:
    rows = table(str(example(parcel_bytes=parcel_bytes)))
    total = rows.pop("total")
    assert [sum(column) for column in zip(*rows.values(), strict=True)] == total == [13 * KIB, 0, 0, 14 * KIB]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("h.3.mlp.c_fc", "h.3"),
        ("transformer.h.11.ln_1", "transformer.h.11"),
        ("0", "0"),
        ("3.weight", "3"),
        ("lm_head", "lm_head"),
        ("model.embed.tokens", "model.embed"),
        ("layer4.conv", "layer4.conv"),
        ("", ""),
    ],
)
def test_the_outer_block_is_the_repeated_one(name: str, block: str) -> None:
    assert outer_block(name) == block


def test_a_moment_is_compared_by_what_happened_not_by_how_long_it_took() -> None:
    moment = Moment(kind="pack", storage=3, nbytes=10, compute_s=1.0, other_bytes=5)
    assert moment.signature == replace(moment, compute_s=2.0, other_bytes=7).signature == ("pack", 3, 10)
    assert replace(moment, nbytes=11).signature != moment.signature


def test_no_parcels_make_none_and_a_lone_storage_keeps_its_owner() -> None:
    assert make_parcels([], []) == ()
    lone = SavedStorage(nbytes=5, made=1, owned=3, needed=6, freed=7, parcel=0, block="x")
    (parcel,) = make_parcels([lone], [512])
    assert (parcel.nbytes, parcel.owned, parcel.num_storages, parcel.block) == (512, 3, 1, "x")


SLOW_DISK = Machine(name="a slow disk", disk_write_bytes_per_s=1e6, disk_read_bytes_per_s=1e6)
FAST_DISK = Machine(name="a fast disk", disk_write_bytes_per_s=1e12, disk_read_bytes_per_s=1e12)


def test_a_printed_plan_says_why_each_block_goes_where_it_goes() -> None:
    plan = replace(example(), machine=FAST_DISK)
    whys = {line[:28].strip(): line[78:] for line in str(plan).splitlines()[2:5]}
    assert whys == {"h.0": "hidden behind compute", "h.1": "hidden behind compute", "(model)": "fits"}
    slow = str(replace(plan, machine=SLOW_DISK)).splitlines()
    assert slow[2].endswith("stalls 13.4 ms")  # 8 KiB out, less 2 ms, and back, less 1 ms


def test_a_printed_plan_says_what_computing_again_takes() -> None:
    plan = example()
    ops = (Op(name="aten.gelu.default", compute_s=0.002, scratch_bytes=0, inputs=(1,), outputs=(0,)),)
    values = (Value(nbytes=8 * KIB, op=0, storage=0), Value(nbytes=12 * KIB, op=-1, storage=1))
    storages = (
        replace(plan.trace.storages[0], value=0),
        replace(plan.trace.storages[1], value=1, freed=11),
        *plan.trace.storages[2:],
    )
    trace = replace(plan.trace, ops=ops, values=values, storages=storages)
    placements = (Placement(tier="recompute", fetch=10), *plan.placements[1:])
    lines = str(replace(plan, trace=trace, placements=placements)).splitlines()
    assert lines[2].split("  ")[-1] == "cheap to recompute: 2.0 ms"
    assert "2.0 ms of it recompute" in lines[-1]


def test_a_plan_for_a_machine_that_is_not_here_says_that_it_is_a_forecast() -> None:
    plan = replace(example(), machine=FAST_DISK, simulated=True)
    assert str(plan).splitlines()[0].startswith("FORECAST for a fast disk, from its profile")
    assert "FORECAST" not in str(replace(plan, simulated=False))


WORKLOAD = Workload(model="GPT", num_parameters=7, shapes_sha256="ab", inputs=("4x128 int64",))


def test_a_saved_plan_is_the_same_after_loading(tmp_path: Path) -> None:
    plan = replace(example(), machine=FAST_DISK, simulated=True, workload=WORKLOAD, notes=("It was late.",))
    assert str(plan).splitlines()[-1] == "note: It was late."
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    example().save(str(tmp_path / "plan.json"))  # over the old one
    assert Plan.load(str(tmp_path / "plan.json")) == example()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(
        StorageError, match=r"missing/plan.json cannot be written: No such file .* Give a path in a folder"
    ):
        example().save(tmp_path / "missing" / "plan.json")


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe", PLAN_TEXT[: len(PLAN_TEXT) // 2].encode()])
def test_a_file_that_is_no_plan_is_named_with_the_way_out(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.json.*torchstorm\.plan\(\.\.\.\)"):
        Plan.load(path)
