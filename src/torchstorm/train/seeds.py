"""Seeds for everything that is drawn, each made from the run's seed and what it is for.

No generator lives from one step to the next, so a resumed run draws what an uninterrupted one draws, with no generator
state in the checkpoint, and a validation in between disturbs nothing.
"""

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Gives a seed in [0, 2**63) that depends on `seed` and each part of `purpose`, e.g. ("batch", step)."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
