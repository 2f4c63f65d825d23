"""Tables of the benches that train: one line for every row of the record, in its order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from record_tables.records import Notes, Record, Row, number, table

_NAMES = {
    "unlimited": "everything kept",
    "checkpoint": "`torch.utils.checkpoint`",
    "selective": "`torch.utils.checkpoint`, selective",
    "session": "Session",
    "session-run": "`Session.run`",
    "session-compiled": "Session, `storm.compile`",
    "compile": "torch.compile, everything kept",
    "compile-checkpoint": "torch.compile, `torch.utils.checkpoint`",
    "trl": "TRL's `OffloadActivations`",
    "save_on_cpu": "PyTorch's `save_on_cpu`",
}
_COLUMNS = (
    *("budget", "step", "over", "over eager", "host", "forward and backward", "forecast", "corrected to"),
    *("peak", "forecast of it", "corrected to", "GPU busy", "copies hidden", "moved", "computed again", "RAM"),
)


def steps(page: Path, name: str, shape: str = "") -> str:
    """Every row of a record, or of one shape in it."""
    record = Record.read(name)
    shapes = [shape] if shape else list(dict.fromkeys(row["shape"] for row in record.rows))
    # Two runs at once that fill a record take turns in it.
    rows = [row for one in shapes for row in record.rows if row["shape"] == one]
    notes = Notes(record, rows)
    lines = []
    for row in rows:
        mark = notes.mark(
            row, row["note"], *(["Gradients not checked"] if row["step_s"] and not row["checked"] else [])
        )
        first = [row["shape"]] if len(shapes) > 1 else []
        lines.append([*first, way(row) + mark, *_cells(row)])
    header = [*(["shape"] if len(shapes) > 1 else []), "way", *_COLUMNS]
    said = f"\n\n{verdict(rows)}" if record.content["op"] == "models" else ""
    return f"{table(header, lines)}{said}\n\n{notes.under(page)}"


def front(page: Path) -> str:
    """README's first table: the ways of the first shape, two by two."""
    record = Record.read("h200/offload")
    shape = "32768x1"
    budgets = sorted(row["budget_gib"] for row in record.rows if (row["shape"], row["way"]) == (shape, "session"))
    tightest = budgets[1::-1]
    named = " / ".join(f'`Session(vram="{gib:.4g}GiB")`' for gib in tightest)
    pairs = [
        ("everything kept", [("unlimited", None)]),
        (named, [("session", gib) for gib in tightest]),
        ("`torch.utils.checkpoint`, each block", [("checkpoint", None)]),
        ("TRL's `OffloadActivations` / PyTorch's `save_on_cpu`", [("trl", None), ("save_on_cpu", None)]),
    ]
    found = [(title, [find(record, shape, *key) for key in keys]) for title, keys in pairs]
    notes = Notes(record, [row for _, rows in found for row in rows if row is not None])
    lines = []
    for title, rows in found:
        there = [row for row in rows if row is not None]
        times = " / ".join("-" if row is None else _of(row, "step_s", _ms, "-") for row in rows)
        peaks = " / ".join("-" if row is None else _of(row, "peak_gib", lambda gib: f"{gib:.1f}", "-") for row in rows)
        marks = "".join(dict.fromkeys(notes.mark(row) for row in there))
        lines.append([title + marks, f"{times} ms", f"{peaks} GiB"])
    is_exact = all(row["checked"] for _, rows in found for row in rows if row is not None)
    exact = ", gradients bit-identical in the same run" if is_exact else ", **not all gradients as they must be**"
    said = " ".join(line.removeprefix("- ") for line in notes.under(page).splitlines()[1:] if line)
    head = table(["10 GPT blocks, hidden 4096, 32768 tokens, one H200", "step", "peak VRAM"], lines)
    every = "([all rows](docs/benchmarks.md#offloading-gpt-blocks-on-one-gpu))"
    return f"{head}\n\n{f'Measured by `torchstorm bench offload`{exact} {every}. {said}'.rstrip()}"


_OF_MODELS = ("checkpoint", "session", "compile-checkpoint", "session-compiled")


def models(page: Path, name: str) -> str:
    """README's table of whole models, from the record of that name: step over everything kept in eager mode, and peak
    over it."""
    record = Record.read(name)
    notes = Notes(record, record.rows)
    lines = []
    for shape in dict.fromkeys(row["shape"] for row in record.rows):
        rows = [row for row in record.rows if row["shape"] == shape and row["way"] != "unlimited-again"]
        full = next(row for row in rows if row["way"] == "unlimited")
        of_ways = [
            sorted((row for row in rows if row["way"] == way), key=lambda row: -(row["budget_gib"] or 0))
            for way in _OF_MODELS
        ]
        cells = ["; ".join(_share(row, full["peak_gib"]) + notes.mark(row) for row in found) for found in of_ways]
        kept = f"{_of(full, 'step_s', _time, '-')}, {_of(full, 'peak_gib', _gib, '-')}"
        lines.append([f"{shape}{notes.mark(full)}", kept, *cells])
    header = ["model", "everything kept", *(_NAMES[way] for way in _OF_MODELS)]
    return f"{table(header, lines)}\n\n{verdict(record.rows)}\n\n{notes.under(page)}"


def verdict(rows: list[Row]) -> str:
    """Of how many models a Session is slower than checkpointing, and of how many it has no time."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    slower = failed = 0
    for shape in shapes:
        times = {row["way"]: row["step_s"] for row in rows if row["shape"] == shape}
        sessions = [row["step_s"] for row in rows if (row["shape"], row["way"]) == (shape, "session")]
        theirs = times.get("checkpoint")
        slower += theirs is not None and any(ours is not None and ours > theirs for ours in sessions)
        failed += None in sessions
    return (
        f"A Session is slower than the model's own checkpointing in {slower} of these {len(shapes)} cases, "
        f"and has no time at one of its budgets in {failed}."
    )


def demands(page: Path, name: str) -> str:
    """What `torchstorm bench wall` must hold to, and what it found."""
    record = Record.read(name)
    verdicts = {True: "holds", False: "**fails**", None: "does not apply"}
    lines = [
        [one["name"], one["must"], "-" if one["found"] is None else f"{one['found']:.4g}", verdicts[one["holds"]]]
        for one in record.content["demands"]
    ]
    return table(["demand", "must be", "found", "verdict"], lines)


def speeds(page: Path, name: str) -> str:
    """Tokens a second by model and context, with everything kept and within a budget."""
    record = Record.read(name)
    lines = []
    for one in record.content["speeds"]:
        budget = "everything kept" if one["budget_gib"] is None else f"within {_gib(one['budget_gib'])}"
        over = "" if one["over_gpt"] is None else f"{one['over_gpt']:.2f}"
        lines.append([one["shape"], budget, _of(one, "tokens_per_s", lambda rate: f"{rate:,.0f}", "-"), over])
    return table(["model, tokens x sequences", "memory", "tokens/s", "over the GPT's"], lines)


def find(record: Record, shape: str, name: str, budget_gib: float | None = None) -> Row | None:
    """The row of a way at a shape; None where the record has none."""
    rows = (row for row in record.rows if (row["shape"], row["way"], row["budget_gib"]) == (shape, name, budget_gib))
    return next(rows, None)


def way(row: Row) -> str:
    """What a way is called."""
    name, again, _ = row["way"].partition("-again")
    if name.startswith("compile-budget-"):
        name = f"torch.compile, memory budget {name.removeprefix('compile-budget-')}"
    return _NAMES.get(name, name) + (", again" if again else "")


def misses(page: Path, *names: str) -> str:
    """Every forecast in some records that did not come true."""
    lines, older = [], []
    for name in names:
        record = Record.read(name)
        if "misses" not in record.content:
            older.append(record.link(page))
        for miss in record.content.get("misses", []):
            form = _time if miss["what"] == "step" else _gib
            forecast, measured, corrected = (_of(miss, key, form, "-") for key in ("forecast", "measured", "corrected"))
            first = [f"{record.content['op']} {miss['shape']}", way(miss), _budget(miss), miss["what"]]
            lines.append([*first, forecast, measured, f"{miss['off']:+.2%}", corrected])
    header = ["bench and shape", "way", "budget", "what", "forecast", "measured", "off by", "corrected to"]
    said = [table(header, lines)] if lines else ["Every one came true."] if not older else []
    if older:
        said.append(f"Not in the list, which their next run makes: {', '.join(older)}.")
    return "\n\n".join(said)


def _budget(row: Row) -> str:
    return ", ".join(each for each in (_of(row, "budget_gib", _gib), row.get("budget_name", "")) if each)


def _cells(row: Row) -> list[str]:
    time = _of(row, "step_s", _time, "-")
    if row.get("fastest_s") is not None:
        time += f" ({_time(row['fastest_s'])} to {_time(row['slowest_s'])})"
    elif row["step_s"] is not None:
        time += f" (at most {_time(row['slowest_s'])})"
    forecasts = [_of(row, key, _time) for key in ("forward_backward_s", "forecast_step_s", "corrected_step_s")]
    peaks = [_of(row, key, _gib) for key in ("forecast_peak_gib", "corrected_peak_gib")]
    return [
        _budget(row),
        time,
        *(_of(row, key, lambda over: f"{over:.3f}") for key in ("over_unlimited", "over_eager")),
        _of(row, "host_s", _time),
        *forecasts,
        _of(row, "peak_gib", _gib, "-"),
        *peaks,
        *(_of(row, key, lambda part: f"{part:.1%}") for key in ("gpu_busy", "overlap")),
        *(_of(row, key, _gib) for key in ("moved_gib", "recomputed_gib", "ram_gib")),
    ]


def _share(row: Row, full_gib: float | None) -> str:
    if row["step_s"] is None:
        return _reason(row["note"])
    over = row["over_unlimited"] if row["against"] == "unlimited" else row["over_eager"]
    if over is None or row["peak_gib"] is None or not full_gib:  # everything kept does not fit, or a run was cut off
        return f"{_time(row['step_s'])}, {_of(row, 'peak_gib', _gib, '-')}"
    return f"{over:.2f} x, {row['peak_gib'] / full_gib:.0%}"


def _reason(note: str) -> str:
    """Why there is no time, in a few words."""
    if "OutOf" in note:
        return "out of memory"
    if "Smallest feasible" in note:
        return (
            "refused: smallest feasible " + note.partition("Smallest feasible: ")[2].partition("(")[2].partition(")")[0]
        )
    return "has none" if "no gradient checkpointing" in note else "failed"


def _of(row: Row, key: str, form: Callable[[float], str], instead: str = "") -> str:
    """One figure of a row, which rows of older records may lack."""
    value = row.get(key)
    return instead if value is None else form(value)


def _time(seconds: float) -> str:
    return f"{number(seconds, 4)} s" if seconds >= 10 else f"{_ms(seconds)} ms"


def _ms(seconds: float) -> str:
    return number(seconds * 1e3, 4)


def _gib(gib: float) -> str:
    return f"{number(gib, 4)} GiB"
