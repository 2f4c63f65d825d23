"""Looks for cyclic garbage less often while a step runs.

A step makes thousands of small objects that live until its backward, so Python's collector runs dozens of times and,
every few steps, through all objects of the process: 130 ms a time beside PyTorch and transformers, while the GPU waits.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NUM_OBJECTS = 50_000  # more objects made than freed, before the collector runs; Python's own default is 700 to 2000

MANY_MOMENTS = 500  # of a step: some hundreds of tensors are saved and asked for

_lock = threading.Lock()
_num_steps = 0
_before = gc.get_threshold()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Within it the collector runs once for 50 000 new objects; afterwards as before, when the last step has ended."""
    global _num_steps, _before
    with _lock:
        if not _num_steps:
            _before = gc.get_threshold()
            if 0 < _before[0] < _NUM_OBJECTS:
                gc.set_threshold(_NUM_OBJECTS, *_before[1:])
        _num_steps += 1
    try:
        yield
    finally:
        with _lock:
            _num_steps -= 1
            if not _num_steps and gc.get_threshold()[0] == _NUM_OBJECTS:
                gc.set_threshold(*_before)


def collect_early(num_moments: int) -> None:
    """Runs the collector through all objects of the process, at the end of a step that takes long anyway.

    A step that is traced and planned leaves objects that live on, for a large model tens of thousands. Python runs
    through everything when those that are new to it are a quarter of all, which would be in one of the next steps.
    Those of a small model are too few for that.

    Args:
        num_moments: of the step.
    """
    if gc.isenabled() and num_moments >= MANY_MOMENTS:
        gc.collect()
