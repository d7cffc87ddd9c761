"""Windows of tokens: whole samples, as near to the target as they come, each sample once and in order."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autoaccum
from autoaccum._data.token_windows import TokenTarget, stream_of_tokens
from autoaccum.errors import InvalidInputError
from ragged import padded, texts


def batches_of(lengths, size):
    each = texts(*lengths)
    return [padded(each[at : at + size]) for at in range(0, len(each), size)]


def windows_of(batches, tokens, **options):
    counter = options.pop("counter", None)
    return list(stream_of_tokens(batches, TokenTarget(tokens, counter), **options))


def tokens_of(window):
    return [int((row != -100).sum()) for batch in window for row in batch["labels"]]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    size=st.integers(1, 7),
    target=st.integers(1, 120),
)
def test_no_other_end_of_a_window_is_nearer_to_its_target(lengths, size, target):
    windows = [tokens_of(window) for window in windows_of(batches_of(lengths, size), target)]

    assert [count for window in windows for count in window] == lengths
    for window, after in itertools.pairwise(windows):
        miss = abs(sum(window) - target)
        assert miss <= abs(sum(window) + after[0] - target)
        if len(window) > 1:
            assert miss <= abs(sum(window[:-1]) - target)


def test_last_window_that_ends_early_is_left_out_on_demand():
    batches = batches_of([5, 5, 5, 5, 5], 2)

    assert [sum(tokens_of(window)) for window in windows_of(batches, 10)] == [10, 10, 5]
    assert [sum(tokens_of(window)) for window in windows_of(batches, 10, drop_last=True)] == [10, 10]


def test_last_samples_of_which_nothing_counts_are_no_window():
    batches = [padded(texts(4, 6)), padded(texts(3, 3))]
    batches[1]["labels"][:] = -100

    assert [window.samples for window in stream_of_tokens(batches, TokenTarget(10))] == [2]


def test_first_samples_are_skipped():
    batches = batches_of([5, 6, 7, 8], 4)

    assert [tokens_of(window) for window in windows_of(batches, 15, skip=1)] == [[6, 7], [8]]


def test_sample_above_the_target_is_a_window():
    assert [tokens_of(window) for window in windows_of(batches_of([50, 2, 3], 3), 5)] == [[50], [2, 3]]


def test_labels_are_counted_before_the_mask_and_a_function_before_both():
    batch = padded(texts(4, 6))
    batch["labels"][:, :2] = -100

    def counted(**options):
        return TokenTarget(1, **options).counts(autoaccum.Along(0).piece(batch))

    assert counted() == [2, 4]
    assert counted(counter=lambda batch: batch["attention_mask"].sum(1)) == [4, 6]
    del batch["labels"]
    assert counted() == [4, 6]
    del batch["attention_mask"]
    assert counted(lengths=lambda batch: [3, 5]) == [3, 5]
    with pytest.raises(InvalidInputError, match=r"pass tokens=, a function of a batch"):
        counted()


def test_targets_of_a_pair_are_counted():
    targets = torch.tensor([[1, 2, -100], [1, -100, -100]])

    assert TokenTarget(1).counts(autoaccum.Along(0).piece((torch.zeros(2, 3), targets))) == [2, 1]


def test_samples_of_lists_are_counted_one_by_one():
    samples = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [1], "labels": [1]}]
    split = autoaccum.ListOfSamples(list)

    (window,) = stream_of_tokens([samples], TokenTarget(10), split=split)

    assert window.samples == 2
    assert TokenTarget(1).counts(window.spans[0].piece) == [2, 1]


@pytest.mark.parametrize("sample", [lambda ids: ids, lambda ids: {"input_ids": ids}, lambda ids: (ids, 1), list])
def test_samples_of_lists_without_labels_count_as_long_as_they_are(sample):
    samples = [sample(torch.ones(length)) for length in (3, 1)]

    (window,) = stream_of_tokens([samples], TokenTarget(10), split=autoaccum.ListOfSamples(list))

    assert TokenTarget(1).counts(window.spans[0].piece) == [3, 1]


@pytest.mark.parametrize("found", [[1], [1, -1], None, ["a", "b"], torch.zeros(3), [2.7, 1], [float("inf"), 1], "12"])
def test_counts_that_cannot_be_are_refused(found):
    with pytest.raises(InvalidInputError, match=r"tokens= gave .* for a batch of 2 samples"):
        windows_of([padded(texts(4, 6))], 5, counter=lambda batch: found)


def test_windows_of_tokens_for_a_loop_are_in_order_of_length():
    first, second = autoaccum.windows(batches_of([2, 5, 4, 6, 3], 2), target_tokens=12)

    assert first.lengths == (5, 4, 2)
    assert second.lengths == (6, 3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "there is no target"),
        ({"target_batch": 4, "target_tokens": 10}, "two targets of one update"),
        ({"target_tokens": 0}, "target_tokens must be"),
        ({"target_tokens": 1.5}, "target_tokens must be"),
        ({"target_batch": 4, "tokens": len}, "tokens= counts for target_tokens="),
        ({"target_batch": 4, "lengths": "lengths"}, "pass order='length' as well"),
        ({"target_batch": 4, "order": "size"}, "order='size'"),
        ({"target_tokens": 4, "tokens": 3}, "tokens=3"),
        ({"target_tokens": 4, "lengths": 3}, "lengths=3"),
    ],
)
def test_targets_that_cannot_be_are_refused(given, told):
    for call in (autoaccum.windows, lambda loader, **given: autoaccum.fit(torch.nn.Linear(1, 1), loader, **given)):
        with pytest.raises(InvalidInputError, match=told):
            call(batches_of([2, 5], 2), **given)
