"""What every path must hold: any offset and length, as a plain string of bytes would."""

import random

import torch
from hypothesis import strategies as st

from torchstorm.storage.aligned import aligned_empty, byte_view
from torchstorm.storage.backend import Backend

CANARY = 0xA5
LIMIT = 40_000
OFFSETS = st.one_of(st.integers(0, LIMIT), st.integers(0, LIMIT // 4096).map(lambda block: block * 4096))
LENGTHS = st.one_of(st.integers(0, LIMIT), st.sampled_from([1, 511, 512, 4095, 4096, 4097, 8192, 16384, 32768]))
SHIFTS = st.sampled_from([0, 1, 4, 64, 512, 4096])
RANGES = st.lists(st.tuples(OFFSETS, LENGTHS, SHIFTS), min_size=1, max_size=6)
ROOM = 2 * LIMIT


def check_any_range(
    backend: Backend, writes: list[tuple[int, int, int]], reads: list[tuple[int, int, int]], seed: int
) -> None:
    """Writes and reads (offset, bytes, bytes past a page in memory) in the first ROOM bytes, beside a model of them."""
    expected = bytearray(random.Random(seed).randbytes(ROOM))
    backend.write_from(torch.frombuffer(expected, dtype=torch.uint8).clone(), 0)
    for number, (offset, nbytes, shift) in enumerate(writes):
        source = aligned_empty(nbytes + shift + 1)[shift : shift + nbytes]
        source.copy_(torch.randint(256, (nbytes,), generator=torch.Generator().manual_seed(seed + number)))
        backend.write_from(source, offset)
        expected[offset : offset + nbytes] = byte_view(source)
    for offset, nbytes, shift in [*reads, (0, ROOM, 0)]:
        around = aligned_empty(nbytes + shift + 8192).fill_(CANARY)
        out = around[shift : shift + nbytes]
        backend.read_into(out, offset)
        assert bytes(byte_view(out)) == expected[offset : offset + nbytes]
        assert bool((around[:shift] == CANARY).all())
        assert bool((around[shift + nbytes :] == CANARY).all())
