"""Leaves a local optimum: simulated annealing over choices.

A better plan often moves one tensor less, computes another again and keeps a third: each change alone makes the step
slower. Source: Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing", Science 220 (1983).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from torchstorm.plan.schedule import Schedule

_WARM = 0.06  # the first temperature, as a share of what the start costs beyond the model's own compute


def annealed(
    start: Schedule,
    groups: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    attempt: Callable[[bytes], Schedule | None],
    *,
    compute_s: float,
    num_steps: int,
    seed: int,
    is_late: Callable[[], bool],
) -> Schedule:
    """The best schedule met on a random walk that goes uphill ever less.

    Args:
        start: a schedule that fits; what is returned is no slower.
        groups: parcels that are alike, in the order of making, and the tiers that each of them may have.
        attempt: places a choice; None where it is impossible.
        compute_s: seconds of the model's own compute.
        num_steps: choices to try.
        seed: of the walk; the same one walks the same way.
        is_late: whether to stop.
    """
    rng = random.Random(seed)
    now = best = start
    for step in range(num_steps):
        if step % 16 == 0 and is_late():
            break
        temperature = _WARM * (start.seconds - compute_s) * (1 - step / num_steps) ** 2
        choice = bytearray(now.choice)
        for _ in range(rng.choice((1, 1, 2, 2, 3))):
            members, tiers = rng.choice(groups)
            place = rng.randrange(len(members))
            if rng.random() < 0.5:  # where a run of one tier begins or ends, more is to be gained
                alike = [index for index, number in enumerate(members) if choice[number] == choice[members[place]]]
                place = alike[rng.choice((0, -1))]
            tier = rng.choice(tiers)
            for number in members[place : place + rng.choice((1, 1, 1, 2, 3))]:
                choice[number] = tier
        if choice == now.choice:
            continue
        found = attempt(bytes(choice))
        if found is None or found.over_bytes or found.slow_over_bytes:
            continue
        slower = found.seconds - now.seconds
        if slower < 0 or (temperature > 0 and rng.random() < math.exp(-slower / temperature)):
            now = found
        if found.seconds < best.seconds:
            best = found
    return best
