"""Python processes that begin where torch has been imported, for tests to which it does not matter how they begin.

`Popen` and `run` take what those of `subprocess` take, with `sys.executable` as the program. The process is forked from
one that has only imported torch, which takes as long as most of these tests; it is a child of the one that asks, has a
`__main__`, arguments, variables, warnings and streams of its own, and ends as any other does. How the package is
imported, and what the C library reads as a process begins, are for tests that start theirs by `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import types
import warnings
from typing import Any

_SET_CHILD_SUBREAPER = 36


class Popen(subprocess.Popen[Any]):
    """A process forked from the one that has imported torch."""

    def _execute_child(self, command: list[Any], *options: Any) -> None:
        _, before, _, passed, cwd, env, *_ = options
        pipes = options[9:15]
        assert (before, *passed) == (None,), "a forked process runs nothing before it begins, and has no other files"
        assert command[0] == sys.executable, f"{command[0]} is another program than {sys.executable}"
        asked = {
            "arguments": list(map(str, command[1:])),
            "cwd": os.getcwd() if cwd is None else str(cwd),
            "env": dict(os.environ if env is None else env),
        }
        streams = [own if given < 0 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = _fork(json.dumps(asked).encode(), streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(
    command: list[Any],
    *,
    input: str | None = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done


# ---------------------------------------------------------------------- in the process that asks

_server: tuple[int, socket.socket] | None = None
"""The process that forks, and the way to it; of the process with that id: a fork of this one has none."""


def _fork(asked: bytes, streams: list[int]) -> int:
    global _server
    if _server is None or _server[0] != os.getpid():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        server = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        theirs.close()
        _server = os.getpid(), ours
        atexit.register(_end, server, ours, os.getpid())
    # The child of a process that ended is given to the nearest that asks for such: it becomes one of this process.
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1)
    try:
        socket.send_fds(_server[1], [asked], streams)
        return int(_server[1].recv(100))
    finally:
        libc.prctl(_SET_CHILD_SUBREAPER, 0)


def _end(server: subprocess.Popen[bytes], way: socket.socket, owner: int) -> None:
    if os.getpid() == owner:
        way.close()
        server.wait()


# ---------------------------------------------------------------------- in the process that forks


def _serve(way: socket.socket) -> dict[str, Any]:
    """Forks for whoever asks. Returns what was asked in the processes that are forked."""
    while True:
        asked, streams, _, _ = socket.recv_fds(way, 1 << 20, 3)
        if not asked:
            os._exit(0)
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(tell, str(child).encode())
                os._exit(0)
            os.close(told)
            os.close(tell)
            way.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            found: dict[str, Any] = json.loads(asked)
            return found
        os.close(tell)
        os.waitpid(between, 0)
        way.send(os.read(told, 100))
        for descriptor in (told, *streams):
            os.close(descriptor)


def _become(asked: dict[str, Any]) -> Any:
    """What remains to be done, once this process is as it was asked for."""
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    arguments = asked["arguments"]
    while arguments[0] in ("-W", "-P"):
        if arguments.pop(0) == "-W":
            sys.warnoptions.append(arguments.pop(0))
    warnings.resetwarnings()
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        code = compile(arguments[1], "<string>", "exec")
        return lambda: exec(code, main.__dict__)
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        return lambda: runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
    return lambda: runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    import torch
    import torch._dynamo  # noqa: F401 - every optimizer imports it

    gc.freeze()  # not looked through again at each end
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))()
