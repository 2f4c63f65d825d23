"""Tables of the operations' benches and of the mLSTM's."""

from __future__ import annotations

from pathlib import Path

from record_tables.records import Notes, Record, Row, number, table

_PYTORCH = "PyTorch"
_NAMES = {"reference": _PYTORCH, "liger": "Liger"}
_BESIDE = ("auto", "torch.compile", "liger", "parallel", "reference")
_CHUNKWISE, _QUADRATIC, _PEER = "triton-chunkwise", "triton-quadratic-tensor-cores", "mlstm_kernels"


def ladder(page: Path, name: str, passes: str, shapes: str, more: str = "") -> str:
    """Milliseconds of every variant.

    Args:
        page: that the table is on.
        name: of the record.
        passes: with commas between; each cell has them in this order.
        shapes: "DTYPE:SHAPE;..." for the columns.
        more: behind the time of the last pass: "rate", "memory" or "over" (the first of our variants).
    """
    record = Record.read(name)
    columns = [tuple(each.split(":", 1)) for each in shapes.split(";")]
    names = passes.split(",")
    rows = [row for row in record.rows if (row["dtype"], row["shape"]) in columns and row["pass"] in names]
    notes = Notes(record, rows)
    cells = {(row["variant"], row["dtype"], row["shape"], row["pass"]): row for row in rows}
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        line = []
        for dtype, shape in columns:
            here = [cells.get((variant, dtype, shape, each)) for each in names]
            line.append(_times(here, more, notes))
        lines.append([_NAMES.get(variant, variant), *line])
    header = ["", *(f"{shape}, {dtype}" for dtype, shape in columns)]
    return f"{table(header, lines)}\n\n{notes.under(page)}"


def beside(page: Path, name: str, unit: str, dtype: str, shape: str = "") -> str:
    """Forward / backward of "auto" and of others, one line for each operation and shape.

    Args:
        page: that the table is on.
        name: of the record.
        unit: "us", or "%" of the ceiling.
        dtype: of the rows.
        shape: of the rows; "" for all.
    """
    record = Record.read(name)
    rows = [row for row in record.rows if row["dtype"] == dtype and shape in ("", row["shape"].split(",")[0])]
    rows = [row for row in rows if row["variant"] in _BESIDE and row["pass"] != "both"]
    notes = Notes(record, rows)
    ways = [way for way in _BESIDE if any(row["variant"] == way for row in rows)]
    cells = {(row["op"], row["shape"], row["variant"], row["pass"]): row for row in rows}
    lines = []
    for op, of in dict.fromkeys((row["op"], row["shape"]) for row in rows):
        here = [[cells.get((op, of, way, each)) for each in ("forward", "backward")] for way in ways]
        lines.append([f"{op} {of}", *(" / ".join(_part(row, unit, notes) for row in pair) for pair in here)])
    header = ["", *(_NAMES.get(way, way) for way in ways)]
    return f"{table(header, lines)}\n\n{notes.under(page)}"


def mlstm(page: Path, name: str) -> str:
    """Forward / with backward of the mLSTM's kernels, in ms, beside the peer's, and the errors of both."""
    record = Record.read(name)
    notes = Notes(record, record.rows)
    lines = []
    for shape in dict.fromkeys(row["shape"] for row in record.rows):
        here = {row["variant"]: row for row in record.rows if row["shape"] == shape}
        ours, peer, quadratic = (here.get(each) for each in (_CHUNKWISE, _PEER, _QUADRATIC))
        their_ms = None if peer is None or peer["peer"] is None else peer["peer"]
        our_ms = None if ours is None else (ours["fwd_ms"], ours["fwdbwd_ms"])
        known = None if ours is None else ours["best_known_ms"]
        lines.append(
            [
                shape + ("" if ours is None else notes.mark(ours)),
                _pair(our_ms),
                _pair(their_ms) + ("" if peer is None else notes.mark(peer)),
                "-"
                if our_ms is None or their_ms is None
                else _pair([b / a for a, b in zip(our_ms, their_ms, strict=True)]),
                _pair(known),
                "-"
                if quadratic is None
                else _pair((quadratic["fwd_ms"], quadratic["fwdbwd_ms"])) + notes.mark(quadratic),
                _errors(ours),
                _errors(peer),
            ]
        )
    header = [
        "",
        _CHUNKWISE,
        _PEER,
        "its time by ours",
        "best known",
        "quadratic, tensor cores",
        "our errors",
        "its errors",
    ]
    return f"{table(header, lines)}\n\n{notes.under(page)}"


def gpu_beside_cpu(page: Path) -> str:
    """1024 x 1024 x 1024 in float32, forward: two cores and an H200, milliseconds and how many times as fast."""
    records = [Record.read(name) for name in ("cpu/matmul", "h200/matmul")]
    found = [{row["variant"]: row["ms"] for row in record.rows if _is_small_product(row)} for record in records]
    cpu, gpu = found
    ours = [
        {key: ms for key, ms in each.items() if key not in ("reference", "torch", "cublas", "auto")} for each in found
    ]
    pairs = {
        "naive on both": (cpu["naive"], gpu["naive"]),
        "the best of each": (min(cpu.values()), min(gpu.values())),
        "the best of our own code": (min(ours[0].values()), min(ours[1].values())),
    }
    lines = [[title, f"{number(a)}", f"{number(b)}", f"{a / b:.0f}"] for title, (a, b) in pairs.items()]
    under = [Notes(record, filter(_is_small_product, record.rows)).under(page) for record in records]
    return "\n\n".join([table(["", "CPU, ms", "H200, ms", "times"], lines), *under])


def _is_small_product(row: Row) -> bool:
    wanted = ("1024x1024x1024", "float32", "forward")
    return (row["shape"], row["dtype"], row["pass"]) == wanted and row["ms"] is not None


def _times(rows: list[Row | None], more: str, notes: Notes) -> str:
    there = [row for row in rows if row is not None]
    if not any(row["ms"] for row in there):
        return "".join(dict.fromkeys("-" + notes.mark(row, row["note"]) for row in there))
    times = " / ".join("-" if row is None or row["ms"] is None else f"{number(row['ms'])}" for row in rows)
    last = there[-1]
    extra = ""
    if more == "rate":
        extra = f" ({number(last['rate'] / 1e12)})" if last["unit"] == "FLOP/s" else f" ({number(last['rate'] / 1e9)})"
    elif more == "memory" and last["extra_bytes"] is not None:
        extra = f", {number(last['extra_bytes'] / 2**30)} GiB"
    elif more == "over":
        over = " / ".join(
            "-" if row is None or row["over_first"] is None else f"{number(row['over_first'])}" for row in rows
        )
        extra = f" ({over})" if any(row["over_first"] for row in there) else ""
    return times + extra + "".join(dict.fromkeys(notes.mark(row) for row in there))


def _part(row: Row | None, unit: str, notes: Notes) -> str:
    if row is None:
        return "-"
    if row["ms"] is None:
        return "-" + notes.mark(row, row["note"])
    return (f"{row['share_of_ceiling']:.0%}" if unit == "%" else f"{number(row['ms'] * 1e3)}") + notes.mark(row)


def _pair(values: list[float | None] | tuple[float | None, ...] | None) -> str:
    return "-" if values is None else " / ".join("-" if value is None else f"{number(value)}" for value in values)


def _errors(row: Row | None) -> str:
    if row is None:
        return "-"
    both = (row["error"], row["gradient_error"])
    return " / ".join("-" if error is None else f"{error:.2%}" for error in both)
