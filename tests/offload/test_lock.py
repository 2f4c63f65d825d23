"""The lock of a Session's hooks, which C++ takes without a call of Python."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from torchstorm.offload.native import library
from torchstorm.offload.native.classes import classes


@pytest.fixture(params=["C++", "Python"])
def lock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> threading.Lock:
    library.begin(classes)
    assert library.wait() == ""
    if request.param == "Python":
        monkeypatch.setattr(library._building, "found", None)
    found = library.new_lock()
    assert (type(found).__module__ == "torchstorm_native") == (request.param == "C++")
    return found


def test_who_does_not_wait_is_told_whether_it_has_the_lock(lock: threading.Lock) -> None:
    assert lock.acquire(blocking=False)
    assert not lock.acquire(blocking=False)
    lock.release()
    with lock:
        assert not lock.acquire(False)
    assert lock.acquire()
    lock.release()


def test_it_is_given_back_where_the_block_fails(lock: threading.Lock) -> None:
    with pytest.raises(KeyError), lock:
        raise KeyError
    assert lock.acquire(blocking=False)


def test_a_lock_that_nobody_has_cannot_be_given_back(lock: threading.Lock) -> None:
    with pytest.raises(RuntimeError, match="release unlocked lock"):
        lock.release()


def test_only_one_thread_at_a_time_has_it(lock: threading.Lock) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            with lock:
                inside += 1
                most = max(most, inside)
                time.sleep(0)  # lets others run
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert (most, inside) == (1, 0)


class Asked(Exception):
    """What a signal's handler raises."""


def test_a_signal_ends_the_waiting(lock: threading.Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise Asked

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        lock.acquire()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Asked):
            lock.acquire()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    lock.release()
    assert lock.acquire(blocking=False)
