"""The figures of README and docs are those of the records, and no figure stands where nobody would put it right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import generate_tables
import pytest
from record_tables import records, steps
from record_tables.records import Notes, Record

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "benchmarks.md"
RECORDS = sorted((REPOSITORY / "benchmarks" / "results").rglob("*.json"))
# A number with a unit of something that is measured. "4096 x 4" is a shape.
FIGURE = re.compile(
    r"(?<![\w.^-])\d[\d.,]*\s?(?:ms|us|s|[KMGT]i?B(?:/s)?|T?FLOP/s|%|times|W|MHz|k?\s?tokens/s|x(?!\s?\d))(?!\w)"
    r"|(?<![\w.])\d+\.\d\d+(?![\w.]*\w)"  # bare, as in "1.03 to 1.08"
)
# What was chosen, not measured: sizes of inputs, limits, rules.
CHOSEN = {
    "README.md": {"3.11"},
    "CHANGELOG.md": {"64 MiB", "32 MiB"},
    "docs/benchmarks.md": {
        *("5 %", "10 %", "0.1 %"),  # how far gradients may be off
        *("40 ms", "0.4 s"),  # how long a burst is, and from when there are fewer of them
        *("2 GiB", "128 MiB", "512 MiB", "1 MiB", "64 KB", "4 KiB"),  # of tensors and requests
    },
    "docs/tutorial.md": {"1 MiB", "512 KiB"},
    "docs/architecture.md": {"90 %", "50 %", "1 MiB", "24GiB", "1.20"},
}


def unmarked_figures(text: str) -> list[str]:
    """Figures outside of tables from records, code and links."""
    for aside in (
        generate_tables.MARKED,
        re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL),
        re.compile(r"`[^`]*`"),
    ):
        text = aside.sub("", text)
    return [" ".join(found.split()) for found in FIGURE.findall(text)]


@pytest.mark.parametrize("page", CHOSEN)
def test_every_measured_figure_of_a_page_comes_from_a_record(page: str) -> None:
    found = unmarked_figures((REPOSITORY / page).read_text())
    assert [figure for figure in found if figure not in CHOSEN[page]] == []


@pytest.mark.parametrize(
    "line",
    [
        *("a step takes 1209 ms", "it takes 1.25x", "1.03 x the time", "| 46.4 GiB |", "at 52 GB/s, both ways"),
        *("busy for 99.6 % of it", "2.1 times as fast", "785 TFLOP/s", "finds in 75 s", "36.1k tokens/s", "0.9%."),
        *("some 40 us", "12.6 GiB\nof it", "GPT takes 1.03", "at 0.945."),
    ],
)
def test_a_figure_outside_of_a_table_would_be_noticed(line: str) -> None:
    assert len(unmarked_figures(f"Before.\n{line}\nAfter.")) == 1
    marked = f"<!-- table: front -->\n{line}\n<!-- end -->\n"
    assert unmarked_figures(f"Before.\n{marked}After `{line}`.\n```text\n{line}\n```\n") == []


@pytest.mark.parametrize(
    "line",
    [
        "4096 x 4 tokens",
        "10 blocks of hidden 4096",
        "2^36 products",
        "sm_90a",
        "8192x4",
        "at 1000.",
        "Triton 3.6",
        "PyTorch 2.11.0",
    ],
)
def test_what_is_no_figure_is_left_alone(line: str) -> None:
    assert unmarked_figures(line) == []


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs" / "decisions").glob("*.md")), ids=lambda page: page.stem)
def test_a_log_with_figures_says_that_they_are_of_experiments(page: Path) -> None:
    text = page.read_text()
    found = [figure for figure in unmarked_figures(text) if figure not in ("1 MiB", "4 KiB")]  # what is small
    assert not found or "Figures here are of experiments" in text.splitlines()[2]


def test_the_pages_are_what_the_records_say_now() -> None:
    command = [sys.executable, "docs/generate_tables.py", "--check"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run `make tables`\n{done.stdout}{done.stderr}"


def test_every_record_is_shown_and_every_table_is_on_a_page() -> None:
    asked = [
        match["asked"].split()
        for page in generate_tables.PAGES
        for match in generate_tables.MARKED.finditer(page.read_text())
    ]
    assert {words[0] for words in asked} == set(generate_tables.TABLES)
    shown = {word for words in asked for word in words}
    assert [file for file in RECORDS if f"{file.parent.name}/{file.stem}" not in shown] == []


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page and a record of its own."""
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(generate_tables, "REPOSITORY", tmp_path)
    monkeypatch.setattr(records, "REPOSITORY", tmp_path)
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- table: steps x -->\n| 1209 ms |\n<!-- end -->\n\nAfter.\n")
    monkeypatch.setattr(generate_tables, "PAGES", [page])
    return tmp_path


def write(house: Path, *rows: dict[str, Any], **head: Any) -> None:
    machine = {"op": "offload", "device": "a GPU", "driver": "5", "python": "3", "torch": "2", **head}
    (house / "results" / "x.json").write_text(json.dumps({**machine, "rows": rows}))


def row(**changes: Any) -> dict[str, Any]:
    figures = {
        "budget_gib": None,
        "step_s": 1.25,
        "fastest_s": 1.2,
        "slowest_s": 1.3,
        "over_unlimited": None,
        "peak_gib": 2.5,
    }
    more = dict.fromkeys(("forecast_peak_gib", "gpu_busy", "overlap", "moved_gib", "recomputed_gib", "ram_gib"))
    stamp = {"sources": "a" * 12, "commit": "b" * 40, "dirty": False, "allocator": ""}
    names = {"shape": "8x1", "way": "unlimited", "checked": True, "note": "", "steps": 5}
    return {**figures, **more, **stamp, **names, **changes}


def test_a_page_that_differs_from_its_record_is_told_and_put_right(
    house: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(house, row())
    page = house / "page.md"
    before = page.read_text()
    assert generate_tables.main(["--check"]) == 1
    told = capsys.readouterr().out
    assert "-| 1209 ms |" in told
    assert "+| everything kept | 1250 ms (1200 ms to 1300 ms) | 2.500 GiB |" in told
    assert page.read_text() == before
    assert generate_tables.main([]) == 0
    assert page.read_text().startswith("Before.\n\n<!-- table: steps x -->\n| way | step | peak |\n")
    assert page.read_text().endswith("\n<!-- end -->\n\nAfter.\n")
    assert generate_tables.main(["--check"]) == 0


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table: steps x -->\nno end\n",
        "no start\n<!-- end -->\n",
        "<!-- table: no-such-table x -->\n<!-- end -->\n",
        "In a line <!-- table: steps x --> of text\n<!-- end -->\n",
    ],
)
def test_a_mark_that_would_be_passed_over_is_an_error(house: Path, text: str) -> None:
    write(house, row())
    with pytest.raises(ValueError, match=r"a mark of a table stands alone|no table is called"):
        generate_tables.filled(house / "page.md", text)


def test_rows_of_other_sources_say_so_and_so_do_those_without_a_hash(house: Path) -> None:
    write(
        house,
        row(),
        row(way="checkpoint"),
        row(way="session", budget_gib=1.0, sources="c" * 12, dirty=True),
        {
            key: value
            for key, value in row(way="trl").items()
            if key not in ("sources", "dirty", "fastest_s", "allocator")
        },
        row(way="session", budget_gib=2.0, forecast_step_s=1.2),
        row(way="session", budget_gib=3.0, forecast_step_s=1.2, corrected_step_s=1.25),
        row(way="compile", steps=3, allocator="expandable_segments:True"),
        row(way="save_on_cpu", step_s=None, fastest_s=None, slowest_s=None, peak_gib=None, note="OutOf<Memory>"),
        row(way="unlimited-again", checked=False),
    )
    text = steps.steps(house / "page.md", "x")
    names = re.findall(r"^\| ([^|]+?) \|", text, re.MULTILINE)[2:]
    assert names == [
        "everything kept",
        "`torch.utils.checkpoint`",
        "Session <sup>1</sup>",
        "TRL's `OffloadActivations` <sup>2</sup>",
        "Session <sup>3</sup>",
        "Session",
        "torch.compile, everything kept <sup>4, 5</sup>",
        "PyTorch's `save_on_cpu` <sup>6</sup>",
        "everything kept, again <sup>7</sup>",
    ]
    assert f"a GPU, driver 5, PyTorch 2, Python 3. Sources `{'a' * 12}`, commit `bbbbbbb`.\n" in text
    notes = re.findall(r"^- <sup>\d</sup> (.*)$", text, re.MULTILINE)
    assert notes == [
        f"Sources `{'c' * 12}`.",
        "No source hash; the record says commit `bbbbbbb`.",
        "The forecast is the last one, after steps by the plan had been measured; newer rows show the first.",
        "Of 3 steps, fewer than the 5 that a median needs.",
        "Allocator: `expandable_segments:True`.",
        "OutOf&lt;Memory>.",
        "Gradients not checked.",
    ]


def test_a_table_without_any_hash_says_so_once(house: Path) -> None:
    old = [{**row(way=name), "sources": "", "dirty": None} for name in ("unlimited", "session")]
    write(house, *old)
    record = Record.read("x")
    notes = Notes(record, record.rows)
    assert [notes.mark(one) for one in record.rows] == ["", ""]
    assert notes.under(house / "page.md").endswith("No source hash; the record says commit `bbbbbbb`.")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7506.1, "7506"),
        (13640.0, "13640"),
        (5.1, "5.10"),
        (0.00432, "0.00432"),
        (99.96, "100.0"),
        (0.0, "0"),
        (-1.5, "-1.50"),
    ],
)
def test_a_number_has_three_digits_that_count_and_no_exponent(value: float, text: str) -> None:
    assert records.number(value) == text


def test_forecasts_that_did_not_come_true_are_listed_with_what_was_corrected(house: Path) -> None:
    miss = {
        "shape": "8x1",
        "way": "session",
        "budget_gib": 2.5,
        "budget_name": "peak of checkpoint",
        "what": "step",
        "forecast": 1.1,
        "measured": 1.0,
        "off": 0.1,
        "corrected": 0.99,
    }
    write(house, misses=[miss, {**miss, "what": "peak", "corrected": None}])
    listed = steps.misses(house / "page.md", "x")
    assert "| Session | 2.500 GiB, peak of checkpoint | step | 1100 ms | 1000 ms | +10.00% | 990.0 ms |" in listed
    assert "| peak | 1.100 GiB | 1.000 GiB | +10.00% | - |" in listed
    write(house, misses=[])
    assert steps.misses(house / "page.md", "x") == "Every one came true."
    write(house)
    assert steps.misses(house / "page.md", "x") == (
        "Not in the list, which their next run makes: [`x.json`](benchmarks/results/x.json)."
    )


def test_models_that_lose_are_counted() -> None:
    rows = [
        *(row(shape=shape, way="checkpoint", step_s=1.3) for shape in ("a", "b")),
        row(shape="a", way="session", step_s=1.2),
        row(shape="a", way="session", step_s=1.4),
        row(shape="b", way="session", step_s=1.2),
        row(shape="c", way="session", step_s=None),
    ]
    assert "in 1 of these 3 cases, and has no time at one of its budgets in 1." in steps.verdict(rows)


def test_a_compiled_way_is_shown_over_eager_mode_or_by_its_time(house: Path) -> None:
    full = row(way="unlimited", against="unlimited", step_s=1.0, over_unlimited=1.0)
    compiled = row(way="compile-checkpoint", against="compile", step_s=1.5, over_unlimited=3.0)
    for over, shown in (1.5, "1.50 x, "), (None, "1500 ms, "):  # a run that was cut off does not say
        write(house, full, {**compiled, "over_eager": over})
        (line,) = [one for one in steps.models(house / "page.md", "x").splitlines() if one.startswith("| 8x1")]
        assert shown in line
        assert "3.00 x" not in line


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_rows_of_a_record_with_a_hash_have_a_range_of_at_least_five(file: Path) -> None:
    content = json.loads(file.read_text())
    for one in content.get("rows", []):
        if one.get("sources"):
            assert one.get("steps", 5) >= 5 or one.get("step_s") is None, one
            for middle, low, high in (
                ("step_s", "fastest_s", "slowest_s"),
                ("ms", "fastest_ms", "slowest_ms"),
                ("bytes_per_s", "slowest_bytes_per_s", "fastest_bytes_per_s"),
            ):
                if one.get(middle) is not None:
                    assert one[low] <= one[middle] <= one[high], one
