"""Reads the records of the benches, and tells from which sources each row of a table is.

A record is JSON in benchmarks/results/, written by a run. Rows of older records lack what newer ones have; they are
shown, and what they lack is said under the table.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
LEAST_RUNS = 5

Row = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """One file.

    Attributes:
        name: below benchmarks/results, as in "h200/offload".
        content: what it holds.
    """

    name: str
    content: dict[str, Any]

    @classmethod
    def read(cls, name: str) -> Record:
        """Raises FileNotFoundError: there is no such record."""
        return cls(name, json.loads((RESULTS / f"{name}.json").read_text()))

    @property
    def rows(self) -> list[Row]:
        """Of the record; none in one that has no table."""
        return list(self.content.get("rows", []))

    def link(self, page: Path) -> str:
        """To the file, from a page."""
        up = "../" * len(page.relative_to(REPOSITORY).parent.parts)
        return f"[`{self.name}.json`]({up}benchmarks/results/{self.name}.json)"

    def machine(self) -> str:
        """Device and versions."""
        of = self.content
        if "versions" in of:  # of `torchstorm train`
            device = of["machine"]["device"]
            return f"{device}, PyTorch {of['versions']['torch']}, Python {of['versions']['python']}"
        driver = [f"driver {of['driver']}"] if of["driver"] else []
        packages = [f"{name} {version}" for name, version in of.get("packages", {}).items()]
        return ", ".join([of["device"], *driver, f"PyTorch {of['torch']}", f"Python {of['python']}", *packages])


class Notes:
    """The marks of a table's rows, and what stands under it.

    Args:
        record: that the rows are from.
        rows: all of the table.
    """

    def __init__(self, record: Record, rows: Iterable[Row]) -> None:
        self._record = record
        self._texts: list[str] = []
        rows = list(rows)
        origins = Counter(origin(row) for row in rows)
        with_hash = {text: count for text, count in origins.items() if not text.startswith(_NO_HASH)}
        self._usual = max(with_hash or origins, key=origins.__getitem__, default="")
        # Several commits may have the same sources.
        clean = {row["commit"][:7] for row in rows if origin(row) == self._usual and row.get("dirty") is False}
        self._commits = f", commit {' or '.join(f'`{commit}`' for commit in sorted(clean))}" if clean else ""

    def mark(self, row: Row, *more: str) -> str:
        """What goes behind the row's name: numbers of the notes that it needs, and of `more`; "" for none."""
        found = origin(row)
        texts = [found] * (found != self._usual)
        if row.get("step_s") is not None and row["steps"] < LEAST_RUNS:
            texts.append(f"Of {row['steps']} steps, fewer than the {LEAST_RUNS} that a median needs")
        if row.get("forecast_step_s") is not None and "corrected_step_s" not in row:
            texts.append(
                "The forecast is the last one, after steps by the plan had been measured; newer rows show the first"
            )
        if row.get("allocator"):
            texts.append(f"Allocator: `{row['allocator']}`")
        texts += [" ".join(text.split()) for text in more if text]
        self._texts += [text for text in dict.fromkeys(texts) if text not in self._texts]
        return f" <sup>{', '.join(str(self._texts.index(text) + 1) for text in texts)}</sup>" if texts else ""

    def under(self, page: Path) -> str:
        """The lines under the table: file, machine, sources, notes."""
        head = f"From {self._record.link(page)}: {self._record.machine()}. {_full_stop(self._usual + self._commits)}"
        notes = [f"<sup>{number}</sup> {_full_stop(_plain(text))}" for number, text in enumerate(self._texts, 1)]
        return "\n".join([head, *(["", *(f"- {note}" for note in notes)] if notes else [])])


_NO_HASH = "No source hash"


def origin(row: Row) -> str:
    """From which sources a row is, for people."""
    commit, sources = row.get("commit", ""), row.get("sources", "")
    if not sources:
        return f"{_NO_HASH}; the record says commit `{commit[:7]}`" if commit else f"{_NO_HASH} and no commit"
    return f"Sources `{sources}`"


def number(value: float, digits: int = 3) -> str:
    """With so many digits that count, and never as 7.5e+03."""
    before_point = math.floor(math.log10(abs(value))) + 1 if value else digits
    return f"{value:.{max(0, digits - before_point)}f}"


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """In Markdown, without the columns that are empty in every line."""
    cells = [list(line) for line in lines]
    shown = [index for index in range(len(header)) if index == 0 or any(line[index] for line in cells)]
    rows = [list(header), ["---"] * len(header), *cells]
    return "\n".join("| " + " | ".join(row[index] for index in shown) + " |" for row in rows)


def _plain(text: str) -> str:
    """Nothing in it is taken for a tag."""
    return text.replace("<", "&lt;")


def _full_stop(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
