"""The short way through a settled step in C++: built when a Session is first made, and kept for later processes.

The host's work in such a step lies in PyTorch's calls and in objects, not in Python's interpreter (docs/decisions/0015
and 0021), so it is C++ against PyTorch's own headers, which no wheel can bring for all of its versions. A compiler
builds it beside training, in a process of its own. Without one, and until it is there, Python takes the same way.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Hashable, Mapping, Set
from pathlib import Path
from typing import Any, Protocol, cast

import torch

_NAME = "torchstorm_native"
_HERE = Path(__file__).parent
# PyTorch is built with NDEBUG: without it, some of its classes have more in them.
_OPTIONS = ("-std=c++20", "-O2", "-DNDEBUG", "-shared", "-fPIC", "-w")
_NO_COMPILER = "there is no C++ compiler (g++, c++, clang++, or what CXX names)"


class KnownOperators(Protocol):
    """What is known of the operators that recorded functions call."""

    def covered(self) -> list[int] | None:
        """The moments all of whose recorded calls are seen as operators; None if these are as they were last said."""


class Way(Protocol):
    """What C++ keeps of a settled step, as `KeptTensors` does."""

    def is_waiting(self) -> bool:
        """Whether autograd has let go of something that is still counted."""

    def holds(self, address: int, /) -> bool:
        """Whether the storage at an address is among it."""

    def settle(self) -> None:
        """Uncounts what autograd has let go of."""

    def bring_over(self) -> None:
        """From now on `KeptTensors` has all of it."""


class Library(Protocol):
    """What the C++ gives."""

    Lock: Callable[[], threading.Lock]
    Moments: Callable[..., object]
    Way: Callable[..., Way]
    Operators: Callable[[Set[int]], KnownOperators]

    def look(self, *tensors: list[Any]) -> int | None:
        """A number that is another one where a model's tensors, in lists, are; None where it does not know them."""

    def holds(self, modules: list[Any], held: list[Any], items: list[Any]) -> bool:
        """As `inputs.holds`."""

    def may_have_hooks(self, module: torch.nn.Module, /) -> bool:
        """Whether a module, or one within it, may have hooks: `torch_private.hook_numbers` tells which."""

    def kinds(self, value: object, sizes: list[int], otherwise: Callable[[object, list[int]], Hashable], /) -> Hashable:
        """As `agreement.kinds_of`; what it does not know is `otherwise` asked for."""

    def hooks(self, saved_tensors: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """In place of `SavedTensors.pack` and `unpack`."""

    def run(self, repeats: Any, tape: Any, number: int, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """As `Repeats.run`; what `use` was told as `long_way` where that must be called."""

    def again(self, call: Any, there: Any) -> Any:
        """As `replay.run`; likewise."""

    def over(self, view: Any, base: torch.Tensor) -> torch.Tensor | None:
        """As `View.over`; None where that must be called."""

    def watch(
        self,
        mode: Any,
        tape: Any,
        progress: Any,
        moment: int,
        counts: dict[int, int],
        numbers: Set[int],
        names: Set[int],
        moments: Set[int],
        present: Set[int] | None,
        operators: KnownOperators | None,
    ) -> Any:
        """In place of `WatchedCalls.__torch_function__`; None where it does not know the progress. The mode leaves the
        stack after moments that are not among the `present` ones; the `operators` stand in for it there. Where those
        moments are not known, its `leave` returns the ones that have come within functions which may call others."""

    def see_writes(self, whether: bool, /) -> bool:
        """From now on, in this thread, the tape is told of what operations write to while a mode is away, or no more.
        Returns whether it is."""

    def own_memory(self, whether: bool, /) -> bool:
        """A step begins: from now on PyTorch's large tensors on the CPU are in memory of ours, or no more. Returns
        whether they are."""

    def own_memory_of(self, nbytes: int, /) -> torch.Tensor | None:
        """Allocates (nbytes,) uint8 there, uninitialized, at the begin of a page; None where PyTorch's own would not be
        there."""

    def own_memory_figures(self) -> tuple[int, int]:
        """Bytes of what is allocated there, and of what the system has given for it."""

    def use(self, classes: Mapping[str, object]) -> None:
        """Tells it what it makes and reads."""


class _Building:
    """What is known of the library in this process."""

    def __init__(self) -> None:
        self.found: Library | None = None
        self.why_not = ""
        self.thread: threading.Thread | None = None
        self.compiler: subprocess.Popen[str] | None = None


_building = _Building()
_lock = threading.Lock()


def library() -> Library | None:
    """The library, if it is there by now."""
    return _building.found


def new_lock() -> threading.Lock:
    """A lock; one that C++ takes without a call of Python, where that is there."""
    found = _building.found
    return found.Lock() if found is not None else threading.Lock()


def hooks_of(saved_tensors: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What autograd is to call: `pack` and `unpack` of a `SavedTensors`, by way of C++ where that is there."""
    found = _building.found
    return found.hooks(saved_tensors) if found is not None else (saved_tensors.pack, saved_tensors.unpack)


def begin(classes: Callable[[], Mapping[str, object]]) -> None:
    """Loads the library, or begins to build it; once in a process.

    Args:
        classes: what the C++ makes and reads, by the names that it has for them.
    """
    with _lock:
        if _building.found is not None or _building.thread is not None or _building.why_not:
            return
        if why_not := _why_never():
            _building.why_not = why_not
        elif (path := _path()).exists():
            _load(path, classes())
        else:
            given = path, classes()
            building = threading.Thread(target=_build_and_load, args=given, name="torchstorm-build", daemon=True)
            building.start()
            _building.thread = building


def is_building() -> bool:
    """Whether a compiler is at it, or what it has built is being loaded."""
    thread = _building.thread
    return thread is not None and thread.is_alive()


def wait() -> str:
    """Waits until the library is there, if anybody has begun it; returns why it is not, or ""."""
    thread = _building.thread
    if thread is not None:
        thread.join()
    return _building.why_not


def folder() -> Path:
    """Where it is kept: $XDG_CACHE_HOME/torchstorm/native, or the same under ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path("~/.cache").expanduser()) / "torchstorm" / "native"


def describe() -> str:
    """Which way settled steps take, as a sentence for people."""
    why_not = _building.why_not or _why_never()
    if not why_not and _building.found is None and not _path().exists():
        compiler = _compiler()
        if compiler is not None:
            return f"settled steps: by C++, which {compiler} builds beside the first Session, for {folder()}"
        why_not = _NO_COMPILER
    return f"settled steps: by Python, since {why_not}" if why_not else f"settled steps: by C++, from {folder()}"


def _why_never() -> str:
    if os.environ.get("TORCHSTORM_NATIVE") == "0":
        return "TORCHSTORM_NATIVE=0"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this Python has no global interpreter lock"
    try:
        folder()
    except RuntimeError as error:
        return f"there is no folder to keep it in: {error}"
    return ""


@functools.cache
def _sources() -> tuple[Path, ...]:
    return tuple(sorted([*_HERE.glob("*.h"), *_HERE.glob("*.cpp")]))


def _path() -> Path:
    """Of the library for these sources, this PyTorch and this Python."""
    key = hashlib.sha256()
    for one in _sources():
        key.update(one.name.encode() + b"\0" + one.read_bytes())
    key.update("\0".join(_OPTIONS).encode())
    versions = torch.__version__, str(torch.version.git_version), sys.implementation.cache_tag, platform.machine()
    key.update("\0".join(versions).encode())
    return folder() / key.hexdigest()[:24] / f"{_NAME}.so"


def _command(compiler: str, out: Path) -> list[str]:
    at = Path(torch.__file__).parent
    includes = [at / "include", at / "include" / "torch" / "csrc" / "api" / "include"]
    return [
        *([nice, "-n", "10"] if (nice := shutil.which("nice")) else []),
        *(compiler, *_OPTIONS),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{one}" for one in (*includes, sysconfig.get_paths()["include"])),
        *(str(one) for one in _sources() if one.suffix == ".cpp"),
        *("-o", str(out), f"-L{at / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"),
    ]


def _compiler() -> str | None:
    names = os.environ.get("CXX") or "g++", "c++", "clang++"
    return next((found for name in names if (found := shutil.which(name))), None)


def _build_and_load(path: Path, classes: Mapping[str, object]) -> None:
    try:
        _build(path)
    except OSError as error:
        _building.why_not = f"it cannot be written: {error}"
    except _BuildError as error:
        _building.why_not = str(error)
    else:
        _load(path, classes)


class _BuildError(Exception):
    """No compiler, or one that fails."""


def _build(path: Path) -> None:
    """Compiles it, unless another process does just now, which is waited for."""
    compiler = _compiler()
    if compiler is None:
        raise _BuildError(_NO_COMPILER)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_suffix(f".{os.getpid()}")
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        try:
            null = subprocess.DEVNULL
            with subprocess.Popen(
                _command(compiler, part), stdin=null, stdout=null, stderr=subprocess.PIPE, text=True
            ) as process:
                _building.compiler = process
                _, said = process.communicate()
            if process.returncode:
                errors = [line for line in said.splitlines() if "error" in line]
                raise _BuildError(f"{compiler} failed: {(errors or said.splitlines() or ['it said nothing'])[0]}")
            os.replace(part, path)
        finally:
            _building.compiler = None
            part.unlink(missing_ok=True)


def _load(path: Path, classes: Mapping[str, object]) -> None:
    try:
        spec = importlib.util.spec_from_file_location(_NAME, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = cast(Library, module)
        found.use(classes)
    except (ImportError, AttributeError, KeyError, TypeError) as error:  # as of a PyTorch that was built anew
        _building.why_not = f"it cannot be loaded: {error}"
        with contextlib.suppress(OSError):
            path.unlink()  # the next process builds another one
    else:
        _building.found = found


@atexit.register
def _stop() -> None:
    """The process ends: what it compiles is of no use."""
    compiler = _building.compiler
    if compiler is not None:
        with contextlib.suppress(OSError):
            compiler.kill()
