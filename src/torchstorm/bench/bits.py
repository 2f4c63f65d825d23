"""Compares gradients between runs without keeping them: 64 bits a tensor, made where the tensor is.

The sum of all words, each times an odd number that depends on its place, modulo 2^64. One changed word always changes
it; of other differences it misses about one in 2^64. Only a part of a tensor is looked at at a time, so it needs less
than 100 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**21
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as a signed number

Bits = dict[str, int | None]


@torch.no_grad()
def fingerprint(tensors: Mapping[str, torch.Tensor | None]) -> Bits:
    """64 bits of every tensor's bytes; None where there is no tensor."""
    weights: dict[torch.device, torch.Tensor] = {}
    sums = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            device = tensor.device
            needed = min(_CHUNK, tensor.numel())
            if device not in weights or weights[device].numel() < needed:
                weights[device] = _weights(device, needed)
            sums[name] = _sum(tensor.detach(), weights[device])
    if not sums:
        return dict.fromkeys(tensors)
    numbers = dict(zip(sums, torch.stack([total.cpu() for total in sums.values()]).tolist(), strict=True))
    return {name: numbers.get(name) for name in tensors}


def differences(expected: Bits, found: Bits) -> list[str]:
    """Names whose bits differ, or that only one of both has."""
    names = dict.fromkeys([*expected, *found])
    return [name for name in names if expected.get(name) != found.get(name) or (name in expected) != (name in found)]


def relative_error(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor | None]) -> float:
    """Norm of the difference of all tensors together, by the norm of those expected; infinite where one is missing."""
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


def _weights(device: torch.device, num: int) -> torch.Tensor:
    place = torch.arange(1, num + 1, device=device) * _GOLDEN
    place ^= place >> 29
    place *= 0x94D049BB133111EB - 2**64
    return (place ^ (place >> 32)) | 1


def _sum(tensor: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    words = tensor.contiguous().view(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, start in enumerate(range(0, words.numel(), _CHUNK)):
        part = words[start : start + _CHUNK].long()
        odd = (number * _GOLDEN * 2 + 1) % 2**64
        total += (part * weights[: part.numel()]).sum() * (odd - 2**64 if odd >= 2**63 else odd)
    return total
