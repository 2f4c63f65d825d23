"""Simulated annealing over choices, to leave a local optimum.

A better plan often differs in several tensors at once: one is not moved, another recomputed, a third kept. Each change
alone makes the step slower. Source: Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing", Science 220
(1983).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from torchstorm.plan.schedule import Schedule

_WARM = 0.06  # first temperature, relative to the start's time beyond the model's own compute


def anneal(
    start: Schedule,
    groups: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    attempt: Callable[[bytes, float], Schedule | None],
    *,
    compute_s: float,
    num_steps: int,
    seed: int,
    is_late: Callable[[], bool],
) -> Schedule:
    """Returns the best schedule found by simulated annealing.

    Args:
        start: a schedule within the budget. The result is not slower.
        groups: equal parcels in the order of creation, and the codes that each of them may have.
        attempt: returns a choice's schedule; None if it is impossible, or certain to take the given seconds or longer.
        compute_s: seconds of the model's own compute.
        num_steps: number of choices to try.
        seed: random seed.
        is_late: returns True to stop.
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
            if rng.random() < 0.5:  # changes at the ends of a run of equal codes help more often
                alike = [index for index, number in enumerate(members) if choice[number] == choice[members[place]]]
                place = alike[rng.choice((0, -1))]
            tier = rng.choice(tiers)
            for number in members[place : place + rng.choice((1, 1, 1, 2, 3))]:
                choice[number] = tier
        if choice == now.choice:
            continue
        # Drawn first, so that most of what is not taken need not be scheduled.
        most_s = now.seconds - temperature * math.log(1 - rng.random())
        found = attempt(bytes(choice), most_s)
        if found is None or not found.fits:
            continue
        if found.seconds < most_s:
            now = found
        if found.seconds < best.seconds:
            best = found
    return best
