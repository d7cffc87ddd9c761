"""Tests that another load of the machine can make fail: in CI they are tried a second time, with what they said shown.

A test belongs here if a real process has to do something in a time that passes whether or not it gets the processor,
and that cannot be made longer without making the test wait for it each time.
"""

DEPENDS_ON_LOAD = {
    "tests/launch/test_supervisor.py::"
    "test_a_command_that_was_asked_to_end_has_its_grace_and_is_killed_then_with_its_whole_group": "a grace of 0.5 s",
    "tests/launch/test_supervisor.py::"
    "test_what_a_command_leaves_in_its_group_is_ended_before_it_is_started_again": "a grace of 0.3 s",
    "tests/docs/test_readme.py::"
    "test_code_of_a_page_runs_one_piece_after_the_other": "a page shows sizes of which the clock chooses the fastest",
    "tests/distributed/test_data_parallel.py::"
    "test_rank_that_is_stopped_for_a_while_is_waited_for": "the longest time that ranks wait for each other",
}
