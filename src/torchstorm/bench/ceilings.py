"""Measures a device's peak rates: a large copy, and a large matrix product."""

from __future__ import annotations

from typing import Literal

import torch

from torchstorm.bench.timing import median_ms


class Ceilings:
    """The peak rates of one device, each measured at its first use.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_gpu = device.type == "cuda"
        self._copy_bytes, self._size = (2**31, 8192) if is_gpu else (2**27, 2048)
        self._found: dict[torch.dtype | None, float] = {}

    def of(self, unit: Literal["FLOP/s", "B/s"], dtype: torch.dtype) -> float:
        """FLOP/s of PyTorch's product of square matrices, or bytes per second read and written by a copy."""
        key = dtype if unit == "FLOP/s" else None
        if key not in self._found:
            self._found[key] = self._copy() if key is None else self._product(key)
        return self._found[key]

    def told(self, dtype: torch.dtype) -> str:
        """Both rates as text."""
        copy, product = self.of("B/s", dtype), self.of("FLOP/s", dtype)
        size = self._size
        return (
            f"a copy of {self._copy_bytes >> 20} MiB reaches {copy / 1e9:.4g} GB/s, a product of {size} x {size} "
            f"reaches {product / 1e12:.4g} TFLOP/s"
        )

    def _copy(self) -> float:
        source = torch.randint(0, 256, (self._copy_bytes,), dtype=torch.uint8, device=self._device)
        out = source.clone()
        ms = median_ms(out.copy_, [source], self._device)
        return 2 * self._copy_bytes / ms * 1e3

    def _product(self, dtype: torch.dtype) -> float:
        size = self._size
        a, b = (torch.randn(size, size, device=self._device).to(dtype) for _ in range(2))
        out = torch.mm(a, b)
        ms = median_ms(lambda other: torch.mm(a, other, out=out), [b], self._device)
        return 2 * size**3 / ms * 1e3
