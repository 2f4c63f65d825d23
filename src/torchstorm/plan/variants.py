"""What a compiled block saves for backward, and what its backward recomputes, in each of a few variants.

The backward of a compiled block unpacks all its saved tensors at once, and its recomputation is fixed at compile time.
So equal blocks are compiled in a few variants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

SAVE, CHEAP, LEAN, INPUTS, LEAST = "save", "cheap", "lean", "inputs", "least"
VARIANTS = (SAVE, CHEAP, LEAN, INPUTS, LEAST)
"""Variant names, from the one that saves most to the one that recomputes most."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The saved tensors and the recomputation of one block in one variant, without its inputs, outputs and weights.

    Attributes:
        name: one of `VARIANTS`.
        sizes: bytes of every saved storage of at least 1 KiB.
        small_bytes: total bytes of smaller ones.
        backward_flops: floating-point operations of matrix products that take as long as what backward recomputes.
        backward_bytes: bytes that recomputed operations write in backward.
        peak_bytes: peak memory of backward, saved tensors included.
        forward_s: seconds that the forward takes a GPU by itself; 0.0 where that was not timed.
        backward_s: the same of backward.
    """

    name: str
    sizes: tuple[int, ...]
    small_bytes: int = 0
    backward_flops: int = 0
    backward_bytes: int = 0
    peak_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def saved_bytes(self) -> int:
        """Total bytes saved."""
        return sum(self.sizes) + self.small_bytes

    def scaled(self, ratio: Fraction) -> Variant:
        """The same for sizes that are larger by a ratio."""
        numbers = ("small_bytes", "backward_flops", "backward_bytes", "peak_bytes")
        sizes = tuple(round(size * ratio) for size in self.sizes)
        larger = replace(self, sizes=sizes, **{name: round(getattr(self, name) * ratio) for name in numbers})
        return replace(larger, forward_s=float(self.forward_s * ratio), backward_s=float(self.backward_s * ratio))

    def then(self, other: Variant) -> Variant:
        """The sum of two graphs of one block, which run one after the other in forward."""
        return Variant(
            name=self.name,
            sizes=self.sizes + other.sizes,
            small_bytes=self.small_bytes + other.small_bytes,
            backward_flops=self.backward_flops + other.backward_flops,
            backward_bytes=self.backward_bytes + other.backward_bytes,
            peak_bytes=max(self.peak_bytes + other.saved_bytes, other.peak_bytes + self.saved_bytes),
        )


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """One block's variants.

    Attributes:
        name: qualified name, as in the trace.
        variants: variants by name, without those that save no less than the previous one.
        forward_flops: of its forward, counted as `Variant.backward_flops`.
        kind: an equal value for blocks with equal structure, which take equally long.
    """

    name: str
    variants: Mapping[str, Variant]
    forward_flops: int
    kind: int = 0

    def scaled(self, ratio: Fraction) -> BlockTable:
        """The same block for sizes that are larger by a ratio, as those of more tokens are."""
        return replace(
            self,
            variants={name: one.scaled(ratio) for name, one in self.variants.items()},
            forward_flops=round(self.forward_flops * ratio),
        )

    def nearest(self, name: str) -> Variant:
        """The variant of that name, or else the next one that saves more, or else the one that saves most."""
        known = [other for other in VARIANTS if other in self.variants]
        more = [other for other in known if VARIANTS.index(other) <= VARIANTS.index(name)]
        return self.variants[more[-1] if more else known[0]]
