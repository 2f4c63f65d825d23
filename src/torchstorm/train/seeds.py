"""Derives a random seed for each purpose from the run's seed.

No generator is kept from one step to the next. So a resumed run draws the same numbers as an uninterrupted one without
generator state in the checkpoint, and validations do not affect training.
"""

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Returns a seed in [0, 2**63) that depends on `seed` and each part of `purpose`, e.g. ("batch", step)."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
