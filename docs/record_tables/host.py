"""The table of `torchstorm bench host`: one line for every row of the record, in its order."""

from __future__ import annotations

from pathlib import Path

from record_tables.records import Notes, Record, number, table

_NAMES = {"none": "the model alone", "checkpoint": "its own checkpointing"}


def small_steps(page: Path, name: str) -> str:
    """Every row of a record: times, and the causes that a profile names."""
    record = Record.read(name)
    causes = list(record.rows[0]["causes"])
    lines = []
    for row in record.rows:
        median, least, most = (number(row[key] * 1e3) for key in ("step_s", "fastest_s", "slowest_s"))
        does = [str(row[key]) if row[key] else "" for key in ("num_moved", "num_recomputed")]
        shares = [f"{row['causes'][cause]:.0%}" if row["causes"][cause] >= 0.005 else "" for cause in causes]
        way = _NAMES.get(row["way"], row["way"].replace("session", "Session"))
        lines.append([row["model"], way, f"{median} ms ({least} to {most})", f"{row['ratio']:.2f}", *does, *shares])
    header = ["model", "way", "step", "over the model alone", "moved", "computed again", *causes]
    return f"{table(header, lines)}\n\n{Notes(record, record.rows).under(page)}"
