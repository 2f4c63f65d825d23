"""A bench's JSON file: machine and versions, and rows, whole after each of them.

A file that exists and is of the same machine and versions keeps its other rows: a bench can be run in parts, several at
once too. So each row says of which sources it is. Nobody changes such a file but by a run. What is no regular file (a
FIFO, /dev/stdout) gets one document, at the end.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Hashable, Iterator
from dataclasses import MISSING, asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from torchstorm.bench.sources import SOURCES
from torchstorm.errors import StorageError
from torchstorm.offload.measure import cpu_name
from torchstorm.paths import check_output, is_replaceable
from torchstorm.train.result import write_json
from torchstorm.train.stamp import Stamp, stamp

_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_SAME = ("op", "device", "driver", "python", "torch", "cuda")
# Beside PyTorch, what others' ways and our kernels are made of.
_PACKAGES = ("numpy", "numba", "triton", "transformers", "trl", "liger-kernel", "mlstm-kernels")


@dataclass(frozen=True, kw_only=True)
class RecordRow(Stamp):
    """What can stand in a file: a row, and which code it measured.

    Attributes:
        allocator: settings of PyTorch's allocator in the run that made the row; None in a record of before.
    """

    allocator: str | None = None

    @property
    def key(self) -> Hashable:
        """What there is one row for in a file; each kind of row has its own."""
        raise NotImplementedError


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
        self._stamp = {**vars(stamp(SOURCES[op])), "allocator": _allocator()}
        self._row_type = row_type
        self._form = form
        self._path = None if path is None else check_output(path, name="--json")
        self._row_by_row = self._path is not None and is_replaceable(self._path)
        self._say = say
        self._merges = merge and self._row_by_row
        older, others = self._read()
        self.older: list[R] = older if merge else []
        if others:
            self._say(f"{path} is of another machine or versions ({others}): its rows are replaced.")

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
        row = replace(row, **self._stamp)
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
        if self._path is None:
            return
        with _alone(self._path.parent) if self._merges else contextlib.nullcontext():
            if self._merges:
                self.older, _ = self._read()  # another run may have added rows since
            write_json(self._path, self._document())

    def _keep(self) -> None:
        """Writes what there is by now, where that takes the place of what was written before."""
        if self._row_by_row:
            self.write()

    def _document(self) -> dict[str, Any]:
        return {**self._record, "rows": [_as_json(row) for row in self.all_rows()]}

    def _read(self) -> tuple[list[R], str]:
        """The file's rows, none if they are of another machine or versions, and then which."""
        if self._path is None or not self._row_by_row or not self._path.exists():
            return [], ""
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
        here, there = self._record["packages"], record.get("packages", {})
        others += [f"{name} {of!r}" for name, of in there.items() if here.get(name, of) != of]
        if others:
            return [], ", ".join(others)
        self._record["packages"] = {**there, **here}  # of ways that this run has not installed, rows stay
        known = {field.name.rstrip("_"): field for field in fields(self._row_type)}
        needed = {name for name, field in known.items() if field.default is MISSING}
        whole = [row for row in rows if isinstance(row, dict) and needed <= row.keys() <= known.keys()]
        return [self._row_type(**{known[name].name: value for name, value in row.items()}) for row in whole], ""


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets one process at a time in, of those that enter with the same folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _as_json(row: RecordRow) -> dict[str, Any]:
    """By the names of the fields, without the "_" of those that Python keeps for itself; no infinity, as in JSON."""
    return {name.rstrip("_"): None if value == math.inf else value for name, value in asdict(row).items()}


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on besides the code: machine and versions."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "driver": _driver() if device.type == "cuda" else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _allocator() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _driver() -> str:
    """Of the GPU; "" where the command that knows it fails."""
    try:
        return subprocess.run(_DRIVER, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""
