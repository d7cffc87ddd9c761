"""Samples are sent to other ranks only until it is known what a loss runs over, or cannot matter."""


def test_samples_are_sent_only_until_it_is_known(crew):
    lengths = [6] * 8 + [3, 9, 4, 12, 7, 5, 11, 6, 2, 8, 10, 13]

    assert all(sent < 20 for sent in crew.run("rank_asking:texts", lengths, size=2))  # not in every window


def test_samples_are_sent_only_until_it_cannot_matter(crew):
    assert all(sent <= 2 * 4 for sent in crew.run("rank_asking:classify", size=2))  # of 20 windows, two samples each
