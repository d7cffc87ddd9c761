"""Tests that another load of the machine can make fail: in CI they are tried a second time, with what they said shown.

A test belongs here if a real process has to do something in a time that passes whether or not it gets the processor,
and that cannot be made longer without making the test wait for it each time; or with memory that native code takes.
"""

DEPENDS_ON_LOAD = {
    # A grace of half a second, in which a command has to hear of a signal.
    "test_a_command_that_was_asked_to_end_has_its_grace_and_is_killed_then_with_its_whole_group",
    # The same of 0.3 s.
    "test_what_a_command_leaves_in_its_group_is_ended_before_it_is_started_again",
    # A page shows micro-batches of which the clock chooses the fastest.
    "test_code_of_a_page_runs_one_piece_after_the_other",
    # A process at its hard limit, in which oneDNN is lost now and then (DeviceLostError), as the docs say.
    "test_search_under_a_limit_of_the_process_fails_seldom_and_finds_most_of_what_a_fresh_process_has_room_for",
    # A rank is stopped for nearly as long as others wait for it.
    "test_rank_that_is_stopped_for_a_while_is_waited_for",
}
