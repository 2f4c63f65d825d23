"""The table of `make mutations`: faults that were put into the sources, and those that a test caught."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from record_tables.records import Notes, Record, table


def mutations(page: Path, name: str) -> str:
    """By room: how many faults there were, and how many a test failed with."""
    record = Record.read(name)
    faults = Counter(row["file"].split("/")[0] for row in record.rows)
    caught = Counter(row["file"].split("/")[0] for row in record.rows if row["caught_by"])
    lines = [[f"`{room}/`", str(faults[room]), str(caught[room])] for room in faults]
    return f"{table(['', 'faults', 'caught'], lines)}\n\n{Notes(record, [record.content]).under(page)}"
