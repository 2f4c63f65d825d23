"""train/stop.py: the first signal asks, the second one ends."""

import os
import signal
import threading
from pathlib import Path

import pytest

from torchstorm.train.stop import Stopped, StopRequest


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_ends_with_the_shells_code_and_names_the_signal(signum: signal.Signals, exit_code: int) -> None:
    stopped = Stopped(signum, 12, Path("runs/a"))
    assert stopped.exit_code == exit_code
    assert str(stopped) == f"{signum.name} after step 12; saved in runs/a"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_handlers_from_before_come_back(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    with StopRequest() as stop:
        assert stop.signum is None
        os.kill(os.getpid(), signum)
        assert stop.signum == signum
        assert signal.getsignal(signum) == before
    assert signal.getsignal(signum) == before


def test_the_second_ctrl_c_interrupts_at_once() -> None:
    # A shell starts what runs in its background with SIGINT ignored; here it is as at a terminal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopRequest():
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before, inside = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with StopRequest() as stop:
            inside.append((stop.signum, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [(None, before)]
