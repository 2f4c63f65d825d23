"""Tells whether bytes on a device changed, without bringing them to the host and without a second copy."""

from __future__ import annotations

import torch

_ROWS = 64


def fingerprint(row: torch.Tensor) -> torch.Tensor:
    """Sums of the bytes as 64-bit words, weighted by where they lie; wraps around.

    A change of any word changes it for sure, several at once nearly always (a random chance of 2^-64 a sum); so does
    moving words about. Meant for bytes that changed by mistake, not on purpose.

    Args:
        row: (nbytes,) uint8, on any device.

    Returns:
        (6,) int64 on the same device. The host does not wait.
    """
    if row.storage_offset() % 8:
        row = row.clone()  # words must be aligned
    # The top bits of two words would cancel: each counts 2^63, whatever its weight. So these are summed as well, as the
    # bytes of other words.
    signs = row[: row.nbytes // 8 * 8].view(torch.int64) < 0
    return torch.stack([*_sums(row), *_sums(signs.view(torch.uint8))])


def _sums(row: torch.Tensor) -> list[torch.Tensor]:
    """Three of them, whatever the number of bytes: so many fingerprints can be stacked."""
    nbytes = row.nbytes
    whole = nbytes // 8
    words = row[: whole * 8].view(torch.int64)
    # With few columns and many rows, a GPU would take twice the tensor's memory to sum the columns.
    num_columns = whole // _ROWS
    table = words[: _ROWS * num_columns].view(_ROWS, num_columns)
    columns, rows = _weighted(table.sum(0)), _weighted(table.sum(1))
    if _ROWS * num_columns * 8 == nbytes:  # nearly always: few launches, for a traced step has thousands of these
        return [columns, rows, rows]
    return [columns, rows, _weighted(torch.cat([words[_ROWS * num_columns :], row[whole * 8 :].to(torch.int64)]))]


def _weighted(words: torch.Tensor) -> torch.Tensor:
    # Odd weights, so that no single change of a word is lost modulo 2^64.
    return (words * torch.arange(1, 2 * words.numel() + 1, 2, device=words.device)).sum()
