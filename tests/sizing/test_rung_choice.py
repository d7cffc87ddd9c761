"""What saves memory, chosen by seconds: the ladder is climbed only where it can gain, and the fastest rung is taken."""

import pytest

from autoaccum._sizing.rung_choice import RungChoice

LEVELS = ("chunked_loss", "checkpoint:2", "checkpoint", "offload")


def choose(seconds, sizes, levels=LEVELS, target=16, most=60):
    """Run windows that take what `seconds` says by rung, and fit as `sizes` says; return the choice and its rungs."""
    choice, rungs = RungChoice(levels, measures=True), []
    for _ in range(most):
        while not sizes[choice.rung]:
            assert choice.does_not_fit(choice.rung)
        if choice.is_settled:
            return choice, rungs
        rungs.append(choice.rung)
        size = sizes[choice.rung]
        before = choice.rung
        choice.found([size], is_whole=size == target)
        if choice.rung == before and not choice.is_settled:
            choice.note(seconds[choice.rung], 1000 // size)
    raise AssertionError("never settled")


def test_nothing_is_tried_where_the_whole_window_fits_at_once():
    choice, rungs = choose({}, {(): 16})

    assert (choice.rung, rungs) == ((), [()])


def test_fastest_rung_is_taken_and_stays_in_force():
    half = ("checkpoint:2",)
    sizes = {(): 2, ("chunked_loss",): 3, half: 4, ("checkpoint",): 8, ("checkpoint", "offload"): 16}
    seconds = {(): 1.0, ("chunked_loss",): 1.5, half: 0.7, ("checkpoint",): 0.9, ("checkpoint", "offload"): 3.0}

    choice, rungs = choose(seconds, sizes)

    assert choice.rung == half
    assert set(rungs) == set(sizes)
    assert len(rungs) < 20


def test_loss_in_chunks_that_is_faster_stays_below_the_other_rungs():
    chunked, half = ("chunked_loss",), ("chunked_loss", "checkpoint:2")
    sizes = {(): 2, chunked: 4, half: 16}

    choice, rungs = choose({(): 1.0, chunked: 0.6, half: 0.5}, sizes)

    assert choice.rung == half
    assert ("checkpoint:2",) not in rungs


def test_ladder_ends_where_the_whole_window_is_one_micro_batch():
    choice, rungs = choose({(): 1.0, ("chunked_loss",): 0.5}, {(): 8, ("chunked_loss",): 16})

    assert choice.rung == ("chunked_loss",)
    assert all(len(rung) < 2 for rung in rungs)


def test_rung_that_cuts_no_larger_is_not_timed():
    sizes = {(): 4, ("checkpoint:2",): 4, ("checkpoint",): 8}

    choice, _ = choose({(): 1.0, ("checkpoint",): 0.5}, sizes, levels=("checkpoint:2", "checkpoint"))

    assert choice.rung == ("checkpoint",)
    assert choice.judged["checkpoint:2",].seconds == []


def test_rung_is_taken_where_nothing_fits_without_however_slow():
    sizes = {(): 0, ("checkpoint:2",): 0, ("checkpoint",): 1}

    choice, _ = choose({("checkpoint",): 9.0}, sizes, levels=("checkpoint:2", "checkpoint"))

    assert choice.rung == ("checkpoint",)


def test_lower_one_of_two_equally_fast_rungs_is_taken():
    sizes = {(): 4, ("checkpoint",): 8}

    choice, _ = choose({(): 1.0, ("checkpoint",): 0.99}, sizes, levels=("checkpoint",))

    assert choice.rung == ()


def test_highest_rung_that_does_not_fit_leaves_the_fastest_of_the_others():
    sizes = {(): 4, ("checkpoint",): 8, ("checkpoint", "offload"): 0}

    choice, _ = choose({(): 1.0, ("checkpoint",): 0.5}, sizes, levels=("checkpoint", "offload"))

    assert choice.rung == ("checkpoint",)


def test_nothing_is_left_where_no_rung_fits():
    choice = RungChoice(("checkpoint",), measures=True)

    assert choice.does_not_fit(())
    assert not choice.does_not_fit(("checkpoint",))


def test_chunks_that_are_refused_are_not_in_force_above():
    choice = RungChoice(LEVELS, measures=True)

    assert choice.does_not_fit(())
    assert choice.rung == ("chunked_loss",)
    assert choice.does_not_fit(choice.rung, is_refused=True)
    assert choice.rung == ("checkpoint:2",)


def test_blocks_that_are_refused_are_not_in_force_with_offload():
    choice = RungChoice(("checkpoint", "offload"), measures=True)

    assert choice.does_not_fit(())
    assert choice.does_not_fit(("checkpoint",), is_refused=True)
    assert choice.rung == ("offload",)


def test_rung_that_is_refused_once_it_is_chosen_gives_way_to_the_next_fastest():
    sizes = {(): 2, ("chunked_loss",): 4, ("chunked_loss", "checkpoint"): 8}
    seconds = {(): 1.3, ("chunked_loss",): 1.0, ("chunked_loss", "checkpoint"): 3.0}
    choice, _ = choose(seconds, sizes, levels=("chunked_loss", "checkpoint"))
    assert choice.rung == ("chunked_loss",)
    assert choice.does_not_fit(choice.rung, is_refused=True)
    assert choice.rung == ("checkpoint",)

    assert choice.does_not_fit(choice.rung, is_refused=True)

    assert choice.rung == ()


def test_rung_of_an_earlier_run_that_is_refused_gives_way_to_nothing():
    choice = RungChoice(("chunked_loss",), measures=True)
    choice.settle(("chunked_loss",))

    assert choice.does_not_fit(choice.rung, is_refused=True)
    assert choice.rung == ()
    assert not choice.does_not_fit(choice.rung)


@pytest.mark.parametrize("is_measured", [True, False])
def test_settled_rung_is_left_only_where_it_does_not_fit(is_measured):
    choice = RungChoice(LEVELS, measures=is_measured)
    choice.settle(("chunked_loss", "checkpoint:2"))

    choice.note(9.0, None)
    assert choice.rung == ("chunked_loss", "checkpoint:2")
    assert choice.does_not_fit(choice.rung)
    assert choice.rung == ("chunked_loss", "checkpoint")


@pytest.mark.parametrize("disturbed", [1, 2])
def test_other_work_on_the_machine_while_the_lowest_was_timed_does_not_decide(disturbed):
    choice = RungChoice(("checkpoint",), measures=True)
    slow = iter([3.0] * disturbed)

    while not choice.is_settled:
        choice.found([2 if choice.rung == () else 4], is_whole=False)
        seconds = next(slow, 1.0) if choice.rung == () else 1.3
        choice.note(seconds, None)

    assert choice.rung == ()
