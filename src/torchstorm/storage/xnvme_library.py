"""Loads libxnvme with ctypes, and declares the part of its interface that `xnvme.py` uses.

The structures are those of xNVMe 0.7, which `make xnvme` builds. Other versions are refused, since their structures may
have another layout.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from torchstorm.errors import StorageError
from torchstorm.paths import user_path

VERSION = (0, 7)
FLUSH = 0x00  # NVM command set, opcode
CONVENTIONAL = 1  # geometry type: sectors that can be written in any order

# Offsets in `struct xnvme_cmd_ctx`: the completion's result, and its status, whose lowest bit is the phase bit.
_RESULT_OFFSET = 64
_STATUS_OFFSET = 78
_COMMAND_CONTEXT_BYTES = 128
_OPTIONS_BYTES = 512  # larger than in any 0.7 release, since the library writes the structure

Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class Options(ctypes.Structure):
    """The first fields of `struct xnvme_opts`, with space for the rest."""

    _fields_ = (
        ("backend", ctypes.c_char_p),
        ("device", ctypes.c_char_p),
        ("memory", ctypes.c_char_p),
        ("synchronous", ctypes.c_char_p),
        ("asynchronous", ctypes.c_char_p),
        ("admin", ctypes.c_char_p),
        ("namespace", ctypes.c_uint32),
        ("read_only", ctypes.c_uint8),
        ("write_only", ctypes.c_uint8),
        ("read_write", ctypes.c_uint8),
        ("create", ctypes.c_uint8),
        ("truncate", ctypes.c_uint8),
        ("direct", ctypes.c_uint8),
        ("rest", ctypes.c_uint8 * _OPTIONS_BYTES),
    )


class Geometry(ctypes.Structure):
    """`struct xnvme_geo`."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("num_groups", ctypes.c_uint32),
        ("num_units", ctypes.c_uint32),
        ("num_zones", ctypes.c_uint32),
        ("num_sectors", ctypes.c_uint64),
        ("sector_data_bytes", ctypes.c_uint32),
        ("sector_metadata_bytes", ctypes.c_uint32),
        ("total_bytes", ctypes.c_uint64),
        ("sector_shift", ctypes.c_uint64),
        ("largest_transfer_bytes", ctypes.c_uint32),
        ("sector_bytes", ctypes.c_uint32),
        ("metadata_interleaved", ctypes.c_uint8),
        ("protection_type", ctypes.c_uint8),
        ("rest", ctypes.c_uint8 * 6),
    )


class CommandContext(ctypes.Structure):
    """`struct xnvme_cmd_ctx` for a synchronous command."""

    _fields_ = (
        ("opcode", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("command", ctypes.c_uint16),
        ("namespace", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * ((_COMMAND_CONTEXT_BYTES - 8) // 8)),
    )


_pointer = ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "xnvme_ver_major": (ctypes.c_int, []),
    "xnvme_ver_minor": (ctypes.c_int, []),
    "xnvme_ver_patch": (ctypes.c_int, []),
    "xnvme_opts_set_defaults": (None, [ctypes.POINTER(Options)]),
    "xnvme_dev_open": (_pointer, [ctypes.c_char_p, ctypes.POINTER(Options)]),
    "xnvme_dev_close": (None, [_pointer]),
    "xnvme_dev_get_geo": (ctypes.POINTER(Geometry), [_pointer]),
    "xnvme_dev_get_nsid": (ctypes.c_uint32, [_pointer]),
    "xnvme_dev_get_opts": (ctypes.POINTER(Options), [_pointer]),
    "xnvme_buf_alloc": (_pointer, [_pointer, ctypes.c_size_t]),
    "xnvme_buf_free": (None, [_pointer, _pointer]),
    "xnvme_queue_init": (ctypes.c_int, [_pointer, ctypes.c_uint16, ctypes.c_int, ctypes.POINTER(_pointer)]),
    "xnvme_queue_term": (ctypes.c_int, [_pointer]),
    "xnvme_queue_set_cb": (ctypes.c_int, [_pointer, Callback, _pointer]),
    "xnvme_queue_get_cmd_ctx": (_pointer, [_pointer]),
    "xnvme_queue_put_cmd_ctx": (ctypes.c_int, [_pointer, _pointer]),
    "xnvme_queue_poke": (ctypes.c_int, [_pointer, ctypes.c_uint32]),
    "xnvme_cmd_ctx_from_dev": (CommandContext, [_pointer]),
    "xnvme_cmd_pass": (
        ctypes.c_int,
        [ctypes.POINTER(CommandContext), _pointer, ctypes.c_size_t, _pointer, ctypes.c_size_t],
    ),
    "xnvme_nvm_read": (
        ctypes.c_int,
        [_pointer, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint16, _pointer, _pointer],
    ),
    "xnvme_nvm_write": (
        ctypes.c_int,
        [_pointer, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint16, _pointer, _pointer],
    ),
}


def load_library(path: str | os.PathLike[str] | None = None) -> tuple[ctypes.CDLL, str]:
    """Loads libxnvme.

    Args:
        path: path of the library; None tries `XNVME_LIBRARY_PATH`, the folder of `make xnvme`, then the system.

    Returns:
        The library with its functions declared, and its version: "0.7.5".

    Raises:
        StorageError: it does not exist, cannot be loaded, or is not of version 0.7.
    """
    named = path if path is not None else os.environ.get("XNVME_LIBRARY_PATH")
    built = Path(__file__).parents[3] / ".xnvme" / "lib" / "libxnvme.so"
    candidates = (
        [str(user_path(named, name="XNVME_LIBRARY_PATH"))] if named else [str(built), "libxnvme.so.0", "libxnvme.so"]
    )
    tried = []
    for candidate in candidates:
        try:
            library = ctypes.CDLL(candidate, use_errno=True)
        except OSError as error:
            tried.append(str(error))
            continue
        return library, _declared(library, candidate)
    raise StorageError(
        f"The xNVMe library is needed and cannot be loaded: {'; '.join(tried)}. Build it with `make xnvme`, or set "
        "XNVME_LIBRARY_PATH=/path/to/libxnvme.so."
    )


def _declared(library: ctypes.CDLL, path: str) -> str:
    try:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise StorageError(
            f"{path} is not an xNVMe library of version 0.7: {error}. `make xnvme` builds one."
        ) from error
    version = tuple(getattr(library, f"xnvme_ver_{part}")() for part in ("major", "minor", "patch"))
    spelled = ".".join(map(str, version))
    if version[:2] != VERSION:
        raise StorageError(
            f"{path} is xNVMe {spelled}, whose structures may differ; 0.7 is needed. `make xnvme` builds it."
        )
    return spelled


def clear_completion(context: int) -> None:
    """Clears the result of the context's last command, since some of the library's paths write only failures."""
    ctypes.memset(context + _RESULT_OFFSET, 0, _STATUS_OFFSET + 2 - _RESULT_OFFSET)


def completion(context: int) -> tuple[int, int, int]:
    """(status code type, status code, result) of the ended command; a status of zeros means success."""
    status = ctypes.c_uint16.from_address(context + _STATUS_OFFSET).value
    return status >> 9 & 7, status >> 1 & 0xFF, ctypes.c_uint64.from_address(context + _RESULT_OFFSET).value
