"""Opens cuFile's driver once, in a process that may hang or crash, and prints the result as JSON.

`gds_guard` runs it as a script, so it imports nothing of this package. CUDA is initialized here and not in the caller,
since a process that has initialized CUDA cannot be forked.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys


def count_gpus(libcuda: str) -> tuple[int, str]:
    """(number of GPUs by the driver library, error message or "")."""
    try:
        cuda = ctypes.CDLL(libcuda)
    except OSError as error:
        return 0, f"the CUDA driver cannot be loaded ({error})"
    count = ctypes.c_int(0)
    for name, arguments in (("cuInit", (0,)), ("cuDeviceGetCount", (ctypes.byref(count),))):
        if code := getattr(cuda, name)(*arguments):
            return 0, f"{name} of {libcuda} returned CUDA error {code}"
    return count.value, ""


def open_driver(libcufile: str) -> str:
    """The reason why cuFile's driver could not be opened, or ""."""
    try:
        if libcufile:
            ctypes.CDLL(libcufile, mode=ctypes.RTLD_GLOBAL)  # the bindings use a library that is already loaded
        cufile = importlib.import_module("cuda.bindings.cufile")
        cufile.driver_open()
    except Exception as error:  # a missing library, a missing function or an error code
        return f"cuFileDriverOpen failed: {error}"
    return ""


def main(libcuda: str, libcufile: str) -> None:
    """Prints {"gpus", "reason", "closed_stdin"}."""
    gpus, reason = count_gpus(libcuda)
    closed_stdin = False
    if not reason and gpus:
        reason = open_driver(libcufile)
        try:
            os.fstat(0)
        except OSError:
            closed_stdin = True
    print(json.dumps({"gpus": gpus, "reason": reason, "closed_stdin": closed_stdin}), flush=True)
    os._exit(0)  # skips the driver's clean-up, which may hang


if __name__ == "__main__":
    main(*sys.argv[1:])
