"""One owner of the limit of the process: whoever sets one and however it ends, the last puts everything back."""

import sys

import pytest

from memory._child import run_checks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="host memory limits require Linux")


@pytest.fixture(scope="module")
def found():
    return run_checks(
        "second_thread_is_refused",
        "limits_nest_and_end_in_any_order",
        "limit_within_a_lifted_one_holds",
        "interrupt_at_every_line_leaves_no_limit",
        "limit_that_cannot_be_set_leaves_nothing",
        "processes_do_not_inherit_the_limit",
        "fit_in_a_second_thread_and_in_a_callback",
        "hard_limit_that_was_lowered_meanwhile_stays",
    )


def test_limit_in_a_second_thread_is_refused_and_both_leave_the_process_as_it_was(found):
    seen = found["second_thread_is_refused"]

    assert "the thread 'first' already has a limit" in seen["refusal"]
    assert seen["limited"] != seen["before"]
    assert seen["after"] == seen["before"]
    assert seen["afterwards"] == "limited"


def test_tightest_of_nested_limits_holds_and_the_last_to_end_puts_everything_back(found):
    seen = found["limits_nest_and_end_in_any_order"]

    assert seen["inner"] < seen["outer"]
    assert seen["wider"] == seen["outer"]
    assert seen["outer_ended_first"] == seen["inner"]
    assert seen["after"] == seen["before"]
    assert seen["thresholds"] == [131072] * 4 + [33554432]


def test_limit_within_a_lifted_one_is_the_tightest_of_both(found):
    seen = found["limit_within_a_lifted_one_holds"]

    assert seen["lifted"] == seen["before"]
    assert seen["within"] == seen["outer"]
    # The limit is what was held when it began and 200 MiB. What the heap has given back since (some pages, by
    # malloc_trim) is room too.
    assert seen["room"] <= 201 * 2**20
    assert seen["lifted_again"] == seen["before"]
    assert seen["lowered_again"] == seen["outer"]


def test_interrupt_at_any_line_of_entry_and_exit_leaves_no_limit(found):
    seen = found["interrupt_at_every_line_leaves_no_limit"]

    assert seen["tries"] > 60
    assert seen["left"] == []


def test_limit_that_the_system_refuses_leaves_nothing_behind(found):
    seen = found["limit_that_cannot_be_set_leaves_nothing"]

    assert seen["said"] == "ValueError: refused"
    assert seen["after"] == seen["before"]
    assert seen["next"] == "limited"


def test_hard_limit_that_was_lowered_under_a_limit_is_no_error_at_its_end(found):
    seen = found["hard_limit_that_was_lowered_meanwhile_stays"]

    assert seen["after"] == seen["hard"] == 2**40


@pytest.mark.parametrize("how", ["fork in a step", "multiprocessing fork in a step", "callback", "loader"])
def test_process_that_is_started_under_a_limit_gets_what_there_was_before(found, how):
    seen = found["processes_do_not_inherit_the_limit"]

    assert seen["limited"] != seen["before"]
    assert seen[how] == seen["before"]


def test_fits_in_two_threads_and_within_a_callback_leave_no_limit(found):
    seen = found["fit_in_a_second_thread_and_in_a_callback"]

    assert seen["steps"] == [3, 3]
    assert seen["in_a_callback"] == 3
    assert seen["refusals"] == 0 or "one after the other" in seen["said"]
    assert seen["after"] == seen["before"]
