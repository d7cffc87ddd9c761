"""Interrupts wait until a block has ended, and then arrive."""

import os
import signal
import sys
import threading

import pytest

from autoaccum._system.signals import SignalGuard, deferred
from support.faults.modes import InterruptAtLine

SIGNALS = [signal.SIGINT, signal.SIGTERM]


class Stop(BaseException):
    """What a handler of the user's raises."""


@pytest.mark.parametrize(
    "order", [SIGNALS, SIGNALS[::-1], [signal.SIGHUP], [signal.SIGALRM]], ids=lambda order: order[0].name
)
def test_signals_wait_for_the_end_of_the_block_and_arrive_in_order_although_the_first_raises(order):
    arrived, done = [], []

    def note(number, frame):
        arrived.append(number)
        raise Stop

    before = [signal.signal(number, note) for number in order]
    try:
        with pytest.raises(Stop), deferred():  # noqa: PT012 - what is held back arrives at its end
            for number in order:
                signal.raise_signal(number)
            done.append(list(arrived))
    finally:
        for number, handler in zip(order, before, strict=True):
            signal.signal(number, handler)

    assert done == [[]]
    assert arrived == order


def test_signal_that_would_end_the_process_is_left_alone():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    with deferred():
        inside = signal.getsignal(signal.SIGTERM)

    assert inside is signal.SIG_DFL


def test_inner_block_hands_its_interrupt_to_the_outer_one():
    done = []

    with pytest.raises(KeyboardInterrupt), deferred():  # noqa: PT012 - as above
        with deferred():
            signal.raise_signal(signal.SIGINT)
        done.append("the rest of the outer block")

    assert done == ["the rest of the outer block"]


def test_block_that_was_interrupted_at_any_line_of_its_own_holds_nothing_back_later():
    def block():
        with deferred():
            pass

    listing = InterruptAtLine("_system")
    with listing:
        block()

    for line in range(1, listing.count + 1):
        with pytest.raises(KeyboardInterrupt), InterruptAtLine("_system", line):
            block()
        with pytest.raises(KeyboardInterrupt), deferred():
            signal.raise_signal(signal.SIGINT)
    assert listing.count > 20


def test_thread_that_is_not_the_main_one_holds_nothing_and_does_not_fail():
    seen = []

    def work():
        with deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert seen == [signal.getsignal(signal.SIGINT)]


# --- for the length of a training -------------------------------------------------------------------------------------


def test_sigterm_that_came_while_an_object_was_finalized_is_not_lost():
    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    process = os.fork()
    if process == 0:
        try:
            sys.unraisablehook = lambda _: None
            with SignalGuard().handling() as watch:
                watch.is_active = True
                Finalized()
                watch.raise_if_terminated()
        finally:
            os._exit(3)
    _, status = os.waitpid(process, 0)

    assert os.WTERMSIG(status) == signal.SIGTERM


def test_process_that_was_forked_meanwhile_is_ended_by_sigterm_as_ever():
    with SignalGuard().handling() as watch:
        watch.is_active = True
        process = os.fork()
        if process == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(3)
        _, status = os.waitpid(process, 0)

    assert os.WTERMSIG(status) == signal.SIGTERM


def test_handler_of_the_parent_does_not_hold_back_signals_of_a_process_forked_in_a_block():
    with deferred():
        process = os.fork()
        if process == 0:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                os._exit(0)
            finally:
                os._exit(3)
        _, status = os.waitpid(process, 0)

    assert os.waitstatus_to_exitcode(status) == 0
