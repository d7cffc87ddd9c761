"""Interrupts wait until a block has ended, and then arrive."""

import signal
import threading

import pytest

from autoaccum.signals import held

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


def test_interrupt_inside_is_delivered_after_the_block():
    done = []

    with pytest.raises(KeyboardInterrupt), held():  # noqa: PT012 - where in the block it is raised is the claim
        signal.raise_signal(signal.SIGINT)
        done.append("the rest of the block")

    assert done == ["the rest of the block"]


def test_sigterm_with_a_handler_is_delivered_after_the_block(sigterm_raises):
    done = []

    with pytest.raises(Stop), held():  # noqa: PT012 - as above
        signal.raise_signal(signal.SIGTERM)
        done.append("the rest of the block")

    assert done == ["the rest of the block"]


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


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_are_put_back_however_the_block_ends(fails, sigterm_raises):
    before = [signal.getsignal(number) for number in SIGNALS]

    try:
        with held():
            if fails:
                raise ValueError  # noqa: TRY301
    except ValueError:
        pass

    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_error_of_the_block_is_the_context_of_the_late_interrupt():
    with pytest.raises(KeyboardInterrupt) as caught, held():  # noqa: PT012 - as above
        signal.raise_signal(signal.SIGINT)
        raise ValueError

    assert isinstance(caught.value.__context__, ValueError)


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
