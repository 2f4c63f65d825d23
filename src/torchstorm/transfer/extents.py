"""A best-fit allocator of extents in a linear address space (a pinned segment, a spill file)."""

from bisect import bisect_left


class Extents:
    """A best-fit allocator over [0, capacity) that merges neighbouring free extents. Not thread-safe.

    Args:
        capacity_bytes: size of the space.
        alignment_bytes: starts and sizes of extents are multiples of this.
    """

    def __init__(self, capacity_bytes: int, *, alignment_bytes: int = 4096) -> None:
        self._alignment = alignment_bytes
        capacity = capacity_bytes // alignment_bytes * alignment_bytes
        self._free: list[tuple[int, int]] = [(0, capacity)] if capacity else []  # (start, stop), sorted, disjoint
        self.capacity_bytes = capacity
        self.used_bytes = 0

    def rounded(self, nbytes: int) -> int:
        """`nbytes` rounded up to the alignment."""
        return -(-nbytes // self._alignment) * self._alignment

    def allocate(self, nbytes: int) -> int | None:
        """Allocates `nbytes`, rounded up. Returns the start, or None if no free extent is large enough."""
        size = self.rounded(nbytes)
        if size == 0:
            return 0
        if size > self.capacity_bytes - self.used_bytes:
            return None
        fits = [(stop - start, index) for index, (start, stop) in enumerate(self._free) if stop - start >= size]
        if not fits:
            return None
        _, index = min(fits)
        start, stop = self._free[index]
        if start + size == stop:
            del self._free[index]
        else:
            self._free[index] = (start + size, stop)
        self.used_bytes += size
        return start

    def free(self, start: int, nbytes: int) -> None:
        """Frees the extent that `allocate(nbytes)` returned as `start`."""
        size = self.rounded(nbytes)
        if size == 0:
            return
        stop = start + size
        self.used_bytes -= size
        index = bisect_left(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            start = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (start, stop))

    def largest_free_bytes(self) -> int:
        """The size of the largest free extent."""
        return max((stop - start for start, stop in self._free), default=0)
