"""A loss divided by the count of a rank's own batch is refused on all ranks: their sum is not the mean."""

import autoaccum


def test_count_of_a_part_of_the_window_is_refused_on_all_ranks(crew):
    for answer in crew.answers("rank_counts:train", size=2):
        assert isinstance(answer, autoaccum.InvalidInputError)
        assert "'num_items_in_batch', a number of a batch of the loader" in str(answer)
