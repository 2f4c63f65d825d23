"""The tables of `make mutations` and `make test-families`: what the tests were shown to hold."""

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


def families(page: Path, name: str) -> str:
    """What became of every family of models under `storm.compile`."""
    record = Record.read(name)
    by_family: dict[str, list[dict[str, object]]] = {}
    for row in record.rows:
        by_family.setdefault(row["family"], []).append(row)
    lines = [
        [
            family,
            str(len(rows)),
            "yes" if all(row["smallest_survived"] for row in rows) else "no",
            ", ".join(sorted({variant for row in rows for variant in row["picked"].values()})),
        ]
        for family, rows in by_family.items()
    ]
    header = ["family", "cases, all bit-identical", "smallest variant used", "variants that plans picked"]
    return f"{table(header, lines)}\n\n{Notes(record, [record.content]).under(page)}"
