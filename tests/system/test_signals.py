"""Interrupts wait until a block has ended, and then arrive."""

import os
import signal
import sys
import threading

import pytest

from autoaccum._system.signals import Watch, held, wrapped

SIGNALS = [signal.SIGINT, signal.SIGTERM]


class Stop(BaseException):
    """What a handler of the user's raises."""


@pytest.fixture
def sigterm_raises():
    def stop(number, frame):
        raise Stop

    before = signal.signal(signal.SIGTERM, stop)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("order", [SIGNALS, SIGNALS[::-1]], ids=["SIGINT first", "SIGTERM first"])
def test_both_signals_arrive_in_order_although_the_first_raises(order, monkeypatch):
    arrived = []

    def note(number, frame):
        arrived.append(number)
        raise Stop

    before = [signal.signal(number, note) for number in SIGNALS]
    try:
        with pytest.raises(Stop), held():  # noqa: PT012 - as above
            for number in order:
                signal.raise_signal(number)
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)

    assert arrived == order


def test_signal_that_would_end_the_process_is_left_alone():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    with held():
        inside = signal.getsignal(signal.SIGTERM)

    assert inside is signal.SIG_DFL


def test_wrapped_handlers_are_called_at_once_outside_of_a_block_and_after_it(sigterm_raises):
    done = []

    with wrapped():
        with pytest.raises(Stop):
            signal.raise_signal(signal.SIGTERM)
        for _ in range(2):
            with pytest.raises(Stop), held():  # noqa: PT012 - as above
                signal.raise_signal(signal.SIGTERM)
                done.append("the rest of the block")

    assert done == ["the rest of the block"] * 2


def test_handler_that_passes_signals_on_to_the_one_before_it_is_called_once(sigterm_raises):
    # As torch's DataLoader sets one for SIGCHLD.
    seen = []
    own = signal.getsignal(signal.SIGTERM)

    with wrapped():
        former = signal.getsignal(signal.SIGTERM)

        def chained(number, frame):
            seen.append(number)
            former(number, frame)

        signal.signal(signal.SIGTERM, chained)
        with pytest.raises(Stop), held():  # noqa: PT012 - as above
            signal.raise_signal(signal.SIGTERM)
            assert seen == []
        signal.signal(signal.SIGTERM, own)

    assert seen == [signal.SIGTERM]


def test_inner_block_hands_its_interrupt_to_the_outer_one():
    done = []

    with pytest.raises(KeyboardInterrupt), held():  # noqa: PT012 - as above
        with held():
            signal.raise_signal(signal.SIGINT)
        done.append("the rest of the outer block")

    assert done == ["the rest of the outer block"]


def test_thread_that_is_not_the_main_one_holds_nothing_and_does_not_fail():
    seen = []

    def work():
        with held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert seen == [signal.getsignal(signal.SIGINT)]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGALRM])
def test_whatever_handler_raises_waits_for_the_end_of_the_block(number):
    done = []

    def stop(number, frame):
        raise Stop

    before = signal.signal(number, stop)
    try:
        with pytest.raises(Stop), held():  # noqa: PT012 - as above
            signal.raise_signal(number)
            done.append("the rest of the block")
    finally:
        signal.signal(number, before)

    assert done == ["the rest of the block"]


# --- for the length of a training -------------------------------------------------------------------------------------


def test_sigterm_that_came_while_an_object_was_finalized_is_not_lost():
    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    process = os.fork()
    if process == 0:
        try:
            sys.unraisablehook = lambda _: None
            with Watch() as watch:
                watch.is_active = True
                Finalized()
                watch.raise_if_terminated()
        finally:
            os._exit(3)
    _, status = os.waitpid(process, 0)

    assert os.WTERMSIG(status) == signal.SIGTERM


def test_process_that_was_forked_meanwhile_is_ended_by_sigterm_as_ever():
    with Watch() as watch:
        watch.is_active = True
        process = os.fork()
        if process == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(3)
        _, status = os.waitpid(process, 0)

    assert os.WTERMSIG(status) == signal.SIGTERM
