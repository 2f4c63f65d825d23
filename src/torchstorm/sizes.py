"""Conversion between sizes as text and bytes: "24GiB" <-> 25769803776."""

import re
from fractions import Fraction

from torchstorm.errors import SizeError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: int | str, *, name: str = "size") -> int:
    """Parses a size.

    Args:
        value: bytes as an int (12000000), or a string. Digits alone are bytes. The units are B, KB, MB, GB, TB
            (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024), in any letter case.
        name: name of the option or argument, for the error message.

    Returns:
        The size in bytes, at least 1. A fraction of a byte is rounded down.

    Raises:
        SizeError: the value cannot be parsed, or is not positive.
    """
    way_out = f'write bytes (12000000) or a number with a unit ("24GiB", "800MB"; units: {", ".join(_display_units())})'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise SizeError(f"{name}={value!r} is not a size: {way_out}.")
    if isinstance(value, int):
        size_bytes = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None or match[2].upper() not in _UNITS:
            raise SizeError(f"{name}={value!r} is not a size: {way_out}.")
        size_bytes = int(Fraction(match[1]) * _UNITS[match[2].upper()])
    if size_bytes <= 0:
        raise SizeError(f"{name}={value!r} is {size_bytes} bytes, but a size must be at least 1 byte: {way_out}.")
    return size_bytes


def format_size(size_bytes: float) -> str:
    """Formats a size: 25769803776 -> "24.00 GiB". Below 1 KiB it is in whole bytes."""
    sign, rest = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if rest >= factor:
            return f"{sign}{rest / factor:.2f} {unit}"
    return f"{sign}{rest:.0f} B"


def _display_units() -> list[str]:
    return ["B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]
