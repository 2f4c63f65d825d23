"""Opens cuFile's driver once, in a process that may hang or break, and prints what happened as JSON.

Run as a script by `gds_guard`, so it imports nothing of this package. CUDA is asked here and not in the caller, since a
process that has asked CUDA can no longer be forked.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys


def count_gpus(libcuda: str) -> tuple[int, str]:
    """(GPUs that the driver library counts, "" or why there is no count)."""
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
    """ "" or why cuFile's driver could not be opened."""
    try:
        if libcufile:
            ctypes.CDLL(libcufile, mode=ctypes.RTLD_GLOBAL)  # the bindings take a cuFile that is loaded already
        cufile = importlib.import_module("cuda.bindings.cufile")
        cufile.driver_open()
    except Exception as error:  # the bindings raise several kinds: no library, no function, a code
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
    os._exit(0)  # the driver's own clean-up is no part of the question, and may hang


if __name__ == "__main__":
    main(*sys.argv[1:])
