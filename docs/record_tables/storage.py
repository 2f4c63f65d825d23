"""Tables of `torchstorm bench storage`: every row of files, and the loader beside torch's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from record_tables.records import Notes, Record, Row, number, table

_PATTERNS = {"read": "read", "write": "write", "randread": "random read", "randwrite": "random write"}


def files(page: Path, name: str) -> str:
    """GB/s, and CPU seconds a GB, of every way at every pattern, block size and depth."""
    record = Record.read(name)
    rows = [row for row in record.rows if row["pattern"] != "load"]
    notes = Notes(record, rows)
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = []
    for key in dict.fromkeys((row["pattern"], row["block_bytes"], row["depth"]) for row in rows):
        here = {row["way"]: row for row in rows if (row["pattern"], row["block_bytes"], row["depth"]) == key}
        pattern, block_bytes, depth = key
        direct = here.get("direct")
        over = f"{direct['over']:.2f}" if direct is not None and direct["over"] is not None else ""
        cells = [_cell(here.get(way), notes) for way in ways]
        lines.append([_PATTERNS[pattern], f"{_size(block_bytes)}, {depth}", _all_bytes(here.values()), *cells, over])
    versions = dict.fromkeys(row["note"] for row in rows if row["note"].startswith("fio-"))
    named = [", ".join(versions) or way if way == "fio" else way for way in ways]
    header = ["", "block, depth", "file", *named, "direct over fio"]
    return f"{table(header, lines)}\n\n{notes.under(page)}"


def loader(page: Path, name: str) -> str:
    """GB/s of the loader and of torch's DataLoader, and by how much the best of torch's is beaten."""
    record = Record.read(name)
    rows = [row for row in record.rows if row["pattern"] == "load"]
    notes = Notes(record, rows)
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = []
    for block_bytes in dict.fromkeys(row["block_bytes"] for row in rows):
        here = {row["way"]: row for row in rows if row["block_bytes"] == block_bytes}
        over = [_over(here.get(way)) for way in ("loader", "loader-training")]
        cells = [_cell(here.get(way), notes) for way in ways]
        lines.append([_size(block_bytes), _all_bytes(here.values()), *cells, *over])
    header = ["records", "in all", *ways, "loader over torch's best", "beside training over the disk"]
    return f"{table(header, lines)}\n\n{notes.under(page)}"


def _cell(row: Row | None, notes: Notes) -> str:
    if row is None:
        return ""
    says = "" if row["note"].endswith("samples/s") or row["note"].startswith("fio-") else row["note"]
    mark = notes.mark(row, says)
    if row["bytes_per_s"] is None:
        return f"-{mark}"
    between = ""
    if row.get("slowest_bytes_per_s") is not None:
        between = f" ({number(row['slowest_bytes_per_s'] / 1e9)} to {number(row['fastest_bytes_per_s'] / 1e9)})"
    cpu = "" if row["cpu_s_per_gb"] is None else f", {number(row['cpu_s_per_gb'], 2)}"
    return f"{number(row['bytes_per_s'] / 1e9)}{between}{cpu}{mark}"


def _over(row: Row | None) -> str:
    return "" if row is None or row["over"] is None else f"{row['over']:.2f}"


def _all_bytes(rows: Iterable[Row]) -> str:
    """Of the file; "" in older records."""
    return ", ".join(dict.fromkeys(_size(row["file_bytes"]) for row in rows if row.get("file_bytes")))


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 2**20 else f"{nbytes >> 10} KiB"
