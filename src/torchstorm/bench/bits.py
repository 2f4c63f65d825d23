"""Compares gradients of different runs through fingerprints: six numbers per tensor, computed on its device."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from torchstorm.offload.recompute.fingerprint import fingerprint

Bits = dict[str, tuple[int, ...] | None]


@torch.no_grad()
def fingerprints(tensors: Mapping[str, torch.Tensor | None]) -> Bits:
    """A fingerprint of each tensor's bytes; None for None."""
    sums = {
        name: fingerprint(tensor.detach().contiguous().view(-1).view(torch.uint8)).cpu()
        for name, tensor in tensors.items()
        if tensor is not None
    }
    return {name: tuple(sums[name].tolist()) if name in sums else None for name in tensors}


def differences(expected: Bits, found: Bits) -> list[str]:
    """Names whose fingerprints differ, or that exist only in one of both."""
    names = dict.fromkeys([*expected, *found])
    return [name for name in names if expected.get(name) != found.get(name) or (name in expected) != (name in found)]


def relative_error(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor | None]) -> float:
    """Norm of the difference of all tensors, relative to the expected ones; infinite if one is missing."""
    if expected.keys() != {name for name, tensor in found.items() if tensor is not None}:
        return math.inf
    off = whole = 0.0
    for name, one in expected.items():
        other = found[name]
        assert other is not None
        one = one.to(other.device).float()
        off += float((other.detach().float() - one).square().sum())
        whole += float(one.square().sum())
    return math.sqrt(off / whole) if whole else (0.0 if off == 0 else math.inf)
