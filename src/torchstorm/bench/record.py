"""A bench's JSON file: machine and versions, and rows, whole after each of them.

A file that exists and is of the same machine and versions keeps its other rows: a bench can be run in parts. What is no
regular file (a FIFO, /dev/stdout) gets one document, at the end.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Hashable
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from torchstorm.errors import StorageError
from torchstorm.offload.measure import cpu_name
from torchstorm.paths import check_output, is_replaceable
from torchstorm.train.result import write_json

_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_SAME = ("op", "device", "driver", "python", "torch", "cuda")


class RecordRow(Protocol):
    """A dataclass that can stand in a file."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def commit(self) -> str:
        """Of the code that was measured."""

    @property
    def key(self) -> Hashable:
        """What there is one row for in a file."""


R = TypeVar("R", bound=RecordRow)


class Record(Generic[R]):
    """The rows of one run, printed and written as they come.

    Args:
        op: the bench's name.
        device: where it runs.
        row_type: of the rows.
        form: a row as a line of text.
        path: JSON file; None for none. Rows in it of the same machine and versions stay, unless they are made anew.
            What is no regular file is not read, and gets its rows by `write` alone.
        say: told every line.
        merge: whether rows of an existing file stay; else it is replaced.

    Raises:
        StorageError: `path` exists and is not a bench's record, or cannot be written.
    """

    def __init__(
        self,
        op: str,
        device: torch.device,
        row_type: type[R],
        form: Callable[[R], str],
        *,
        path: Path | None,
        say: Callable[[str], None],
        merge: bool = True,
    ) -> None:
        self.rows: list[R] = []
        self._record = {"op": op, **environment(device)}
        self._row_type = row_type
        self._form = form
        self._path = None if path is None else check_output(path, name="--json")
        self._row_by_row = self._path is not None and is_replaceable(self._path)
        self._say = say
        older = self._read() if self._path is not None and self._row_by_row and self._path.exists() else []
        self.older = older if merge else []

    def __setitem__(self, name: str, value: Any) -> None:
        """Adds something to the record besides the rows."""
        self._record[name] = value

    @property
    def device(self) -> str:
        """The device's name."""
        return str(self._record["device"])

    def say(self, line: str) -> None:
        """Prints a line that is no row."""
        self._say(line)

    def add(self, row: R) -> R:
        """Adds, prints and writes a row."""
        row = replace(row, commit=str(self._record["commit"]))
        self.rows.append(row)
        self._say(self._form(row))
        self._keep()
        return row

    def change(self, function: Callable[[R], R]) -> None:
        """Puts function(row) in the place of every row of this run; writes."""
        self.rows[:] = [function(row) for row in self.rows]
        self._keep()

    def all_rows(self) -> list[R]:
        """This run's rows, and those of the file that it did not make anew."""
        return list({row.key: row for row in self.older + self.rows}.values())

    def write(self) -> None:
        """Writes all rows; a bench's last act.

        Raises:
            StorageError: the file cannot be written.
        """
        if self._path is not None:
            write_json(self._path, {**self._record, "rows": [_as_json(row) for row in self.all_rows()]})

    def _keep(self) -> None:
        """Writes what there is by now, where that takes the place of what was written before."""
        if self._row_by_row:
            self.write()

    def _read(self) -> list[R]:
        assert self._path is not None
        try:
            record = json.loads(self._path.read_text())
            rows, op = list(record["rows"]), record["op"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StorageError(
                f"--json {self._path} exists and is not what this bench writes ({type(error).__name__}: {error}): name "
                "another file."
            ) from error
        if op != self._record["op"]:
            raise StorageError(f"--json {self._path} holds the rows of `torchstorm bench {op}`: name another file.")
        others = [f"{name} {record.get(name)!r}" for name in _SAME if record.get(name) != self._record[name]]
        if others:
            self._say(f"{self._path} is of another machine or versions ({', '.join(others)}): its rows are replaced.")
            return []
        known = {field.name.rstrip("_"): field for field in fields(self._row_type)}
        needed = {name for name, field in known.items() if field.default is MISSING}
        whole = [row for row in rows if isinstance(row, dict) and needed <= row.keys() <= known.keys()]
        return [self._row_type(**{known[name].name: value for name, value in row.items()}) for row in whole]


def _as_json(row: RecordRow) -> dict[str, Any]:
    """By the names of the fields, without the "_" of those that Python keeps for itself; no infinity, as in JSON."""
    return {name.rstrip("_"): None if value == math.inf else value for name, value in asdict(row).items()}


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on besides the code: machine and versions, and the commit where git knows it."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "driver": _told_by(*_DRIVER) if device.type == "cuda" else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "",
        "commit": _told_by("git", "rev-parse", "HEAD"),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _told_by(*command: str) -> str:
    """The first word that a command prints, "" where there is none or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""
