"""Context managers and notes that ask nothing of the exceptions that pass."""

import contextlib
import traceback
from dataclasses import dataclass

import pytest

from autoaccum._system import exceptions


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


@exceptions.contextmanager
def block(log, *, swallows=()):
    log.append("begin")
    try:
        yield log
    except swallows:
        log.append("swallowed")
    finally:
        log.append("end")


def test_block_runs_what_is_before_and_after_the_yield():
    with block([]) as log:
        log.append("inside")

    assert log == ["begin", "inside", "end"]


@pytest.mark.parametrize("error", [FrozenError(1), ValueError("x"), StopIteration(3), KeyboardInterrupt()], ids=repr)
def test_exception_passes_a_block_as_the_same_object_without_the_generator_in_its_traceback(error):
    log = []
    with pytest.raises(type(error)) as caught, block(log):
        raise error

    assert caught.value is error
    assert log == ["begin", "end"]
    assert "block" not in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_block_may_swallow_an_exception():
    with block([], swallows=FrozenError) as log:
        raise FrozenError(1)

    assert log == ["begin", "swallowed", "end"]


def test_exception_raised_by_the_block_itself_has_the_first_in_its_context():
    @exceptions.contextmanager
    def translating():
        try:
            yield
        except FrozenError as error:
            raise ValueError("translated") from error

    with pytest.raises(ValueError, match="translated") as caught, translating():
        raise FrozenError(1)

    assert isinstance(caught.value.__cause__, FrozenError)


def test_error_that_translates_a_stop_iteration_is_not_lost():
    stop = StopIteration()

    @exceptions.contextmanager
    def translating():
        try:
            yield
        except StopIteration as error:
            raise ValueError("translated") from error

    with pytest.raises(ValueError, match="translated"), translating():
        raise stop


@exceptions.contextmanager
def twice():
    with contextlib.suppress(ValueError):
        yield
    yield


def test_generator_that_yields_twice_is_refused():
    with pytest.raises(RuntimeError, match="yields twice"), twice():
        pass


def test_generator_that_yields_again_after_an_exception_is_refused():
    with pytest.raises(RuntimeError, match="yields twice"), twice():
        raise ValueError


def test_note_reaches_an_exception_that_refuses_attributes():
    error = FrozenError(1)

    exceptions.note(error, "first")
    exceptions.note(error, "second")

    assert error.__notes__ == ["first", "second"]
    assert traceback.format_exception_only(error)[1:] == ["first\n", "second\n"]
