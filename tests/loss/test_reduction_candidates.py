"""What a loss runs over is concluded from a few values, and nothing is concluded that they do not show."""

import math
import random

import pytest
import torch
from autoaccum._loss.reduction_candidates import Question, Rounding, Split, misfit, rounding_of, telling_split
from torch.nn import functional

from autoaccum._data.batches import Window
from autoaccum._loss.weighting import Over, Weighting

N, C, T = 9, 4, 5
EXACT = Rounding(1e-13, 1e-9)


def real(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def tokens(padded=-100):
    targets = torch.randint(0, C, (N, T), generator=torch.Generator().manual_seed(0))
    for row, sample in enumerate(targets):
        sample[: row % T] = padded
    return targets


def split_of(loss, outputs, targets, first):
    """What a loss gives for a batch and for its first samples and the others."""
    rest = len(targets) - first
    parts = list(zip(outputs.split([first, rest]), targets.split([first, rest]), strict=True))
    values = tuple(float(loss(*part)) for part in parts)
    return Split(float(loss(outputs, targets)), values, tuple({"": y} for _, y in parts), (first, rest), EXACT)


def asked(loss, outputs, targets, *firsts):
    question = Question()
    question.watch([{"": targets}])
    question.learn([split_of(loss, outputs, targets, first) for first in firsts])
    return question


def named(question):
    return list(dict.fromkeys((how.over, how.ignore_index) for how in question.candidates))


def mean_of_means(outputs, targets):
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return (losses.sum(1) / (targets != -100).sum(1).clamp(min=1)).mean()


LOSSES = {
    (Over.SUM, -100): (-100, lambda x, y: functional.cross_entropy(x, y, reduction="sum")),
    (Over.SAMPLES, -100): (-100, mean_of_means),
    (Over.COUNTED, -100): (-100, functional.cross_entropy),
    (Over.SHIFTED, -100): (-100, lambda x, y: functional.cross_entropy(x[..., :-1], y[:, 1:])),
    (Over.COUNTED, 0): (0, lambda x, y: functional.cross_entropy(x, y, ignore_index=0)),
    (Over.COUNTED, -1): (-1, lambda x, y: functional.cross_entropy(x, y, ignore_index=-1)),
    (Over.COUNTED, 255): (255, lambda x, y: functional.cross_entropy(x, y, ignore_index=255)),
    (Over.SHIFTED, 3): (3, lambda x, y: functional.cross_entropy(x[..., :-1], y[:, 1:], ignore_index=3)),
}


@pytest.mark.parametrize("truth", LOSSES, ids=str)
def test_only_the_true_candidate_remains(truth):
    padding, loss = LOSSES[truth]

    question = asked(loss, real(N, C, T), tokens(padding), 2, 5)

    assert named(question) == [truth]
    assert (question.best.over, question.best.ignore_index) == truth


def test_class_weights_leave_no_candidate():
    weight = torch.tensor([1.0, 1.0, 1.0, 0.1], dtype=torch.float64)

    question = asked(lambda x, y: functional.cross_entropy(x, y, weight=weight), real(N, C, T), tokens(-100), 3)

    assert question.candidates == []
    assert question.is_closed


def test_candidates_that_fit_alike_remain_and_the_likeliest_stands():
    full = torch.randint(1, C, (N, T), generator=torch.Generator().manual_seed(1))

    question = asked(functional.cross_entropy, real(N, C, T), full, 2, 5)

    assert question.best.over is Over.COUNTED
    assert question.best.ignore_index == -100
    assert {(Over.SAMPLES, -100), (Over.SHIFTED, -100), (Over.COUNTED, 0)} <= set(named(question))
    assert not question.is_closed


def test_candidates_that_remain_matter_only_for_windows_in_which_they_differ():
    full = torch.randint(1, C, (N, T), generator=torch.Generator().manual_seed(1))
    question = asked(functional.cross_entropy, real(N, C, T), full, 2, 5)
    padded = full.clone()
    padded[:3, 2:] = 0

    def matters(targets, sizes):
        question.watch([{"": targets}])
        return question.matters(Window([(targets, targets)]), sizes)

    assert not matters(full, [4, 5])
    assert matters(padded, [4, 5])
    assert not matters(padded[[0, 3, 4, 1, 5, 6]], [3, 3])  # as much counts in one half as in the other


def test_value_that_was_never_seen_becomes_a_candidate_when_it_comes():
    classes = torch.arange(N) % 3
    question = asked(functional.cross_entropy, real(N, C), classes, 1, 2)
    assert named(question) == [(Over.COUNTED, -100), (Over.SAMPLES, -100)]

    question.watch([{"": torch.tensor([0, 3, 1, 255])}])

    assert set(named(question)) >= {(Over.COUNTED, 3), (Over.COUNTED, 255)}


def of_identifiers(*windows):
    question = Question(frozenset({"index"}))
    for values in windows:
        question.watch([{"index": torch.tensor(values)}])
    return {how.ignore_index for how in question.candidates}


def test_numbers_of_samples_are_not_tried_as_values_to_ignore_nor_are_those_of_a_last_small_window():
    assert of_identifiers([*range(20, 32)], [40, 3]) == {-100}


def test_numbers_that_repeat_are_classes_whatever_came_before():
    assert of_identifiers([*range(12)], [1, 1]) == {-100, 0, 1}
    assert of_identifiers([*range(12)], [1, 1], [2, 0]) == {-100, 0, 1, 2}


def test_new_candidate_must_fit_what_was_seen_before():
    question = asked(functional.cross_entropy, real(N, C, T), tokens(-100), 2, 5)

    question.watch([{"": torch.full((3, T), 7)}])

    # It says that -100 counts, which was seen not to be so.
    assert named(question) == [(Over.COUNTED, -100)]


def test_classes_are_compared_with_each_other_also_when_padding_has_told_the_rest():
    question = asked(functional.cross_entropy, real(N, C), torch.tensor([0, 0, 1, -100, 1, 0, 1, -100, 0]), 4)
    assert named(question) == [(Over.COUNTED, -100)]
    assert {how.nor for how in question.candidates} == {None}

    later = torch.tensor([0, 2, 1, -100, 2, 2])
    question.watch([{"": later}])

    assert {how.nor for how in question.candidates} == {None, 2}
    assert question.matters(Window([(later, later)]), [2, 4])


def test_padding_among_many_classes_is_what_rows_end_with():
    ids = torch.arange(1000, 1000 + 8 * 6).view(8, 6)
    question = Question()
    question.watch([{"": ids}])
    assert {how.ignore_index for how in question.candidates} == {-100}

    ids[:3, 4:] = 1001
    question.watch([{"": ids}])

    assert {how.ignore_index for how in question.candidates} == {-100, 1001}


def test_mask_is_a_candidate_and_other_floating_targets_are_not():
    question = Question()
    question.watch([{"mask": torch.tensor([[1.0, 1.0], [1.0, 0.0]]), "boxes": torch.rand(2, 4) * 9}])

    found = {(how.over, how.ignore_index, how.target) for how in question.candidates}

    assert {target for over, _, target in found if over in (Over.COUNTED, Over.SHIFTED)} == {"mask"}
    assert (Over.COUNTED, 0, "mask") in found
    assert (Over.ELEMENTS, -100, "boxes") in found


def test_many_splits_tell_apart_what_the_tolerance_of_one_does_not():
    losses = torch.rand(40, generator=torch.Generator().manual_seed(0)).double() + 5
    counts = torch.full((40, 100), 1)
    counts[::3, 0] = -100  # one target in a hundred, of some samples

    def splits(count):
        for first in range(1, count + 1):
            halves = slice(0, 3 * first), slice(3 * first, 40)
            weights = [float((counts[half] != -100).sum()) for half in halves]
            values = [
                float((losses[half] * (counts[half] != -100).sum(1)).sum()) / w
                for half, w in zip(halves, weights, strict=True)
            ]
            whole = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
            yield Split(
                whole * (1 + 1e-7),
                tuple(values),
                tuple({"": counts[half]} for half in halves),
                tuple(len(counts[half]) for half in halves),
                Rounding(1e-7, 1e-2),
            )

    question = Question()
    question.watch([{"": counts}])
    question.learn(list(splits(2)))
    assert Over.SAMPLES in {how.over for how in question.candidates}

    question.learn(list(splits(10)))

    assert named(question) == [(Over.COUNTED, -100)]


def test_whether_a_loss_of_zero_is_a_sum_matters_for_every_cut():
    targets = torch.rand(4)
    question = Question()
    question.watch([{"": targets}])
    question.learn([Split(0.0, (0.0, 0.0), ({"": targets[:2]}, {"": targets[2:]}), (2, 2), EXACT)])

    assert question.matters(Window([(targets, targets)]), [2, 2])
    assert not question.matters(Window([(targets, targets)]), [4])


def test_asking_in_vain_counts_more_in_half_precision():
    question = Question()
    question.watch([{"": torch.arange(4)}])
    parts = {"": torch.tensor([0, 1])}, {"": torch.tensor([2, 3])}
    question.learn([Split(2.0, (2.0, 2.0), parts, (2, 2), rounding_of(torch.bfloat16, in_half=True))])

    question.learn([Split(2.0, (2.0, 2.0), parts, (2, 2), rounding_of(torch.float32, in_half=True))])

    assert question.in_vain == 3


def test_large_targets_are_not_kept_and_what_comes_later_is_given_a_chance():
    targets = torch.randint(0, 2, (2, 300, 300), generator=torch.Generator().manual_seed(0))
    question = Question()
    question.watch([{"": targets}])
    question.learn([Split(2.0, (1.9, 2.1), ({"": targets[:1]}, {"": targets[1:]}), (1, 1), EXACT)])

    question.watch([{"": targets + 1}])

    assert (Over.COUNTED, 2) in named(question)
    assert not any(split.named for split in question._splits)


def test_asking_that_tells_nothing_is_counted():
    question = Question()
    question.watch([{"": torch.arange(4)}])
    alike = Split(2.0, (2.0, 2.0), ({"": torch.tensor([0, 1])}, {"": torch.tensor([2, 3])}), (2, 2), EXACT)

    question.learn([alike])  # it is no sum
    question.learn([alike])

    assert question.in_vain == 1


def test_part_in_which_nothing_counts_does_not_hide_the_true_candidate():
    assert misfit(Weighting(Over.COUNTED), 2.0, [math.nan, 2.0], [0, 5]) == 0.0
    assert misfit(Weighting(Over.SAMPLES), 2.0, [math.nan, 2.0], [1, 5]) == math.inf
    assert misfit(Weighting(Over.COUNTED), 2.0, [math.nan, math.nan], [0, 0]) == math.inf


def test_loss_of_zero_fits_every_candidate():
    assert misfit(Weighting(Over.SAMPLES), 0.0, [0.0, 0.0], [1, 2]) == 0.0


def test_chosen_split_tells_a_single_sample_that_differs():
    weights = torch.ones(3, 500)
    weights[1, 123] = 0.0  # where one sample does not count

    first, second = telling_split(weights, 0, 8, random.Random(0), draws=32)  # noqa: S311 - repeatable

    assert 123 in first
    assert second
    assert not {*first} & {*second}
    assert len(first) + len(second) <= 8


def test_of_many_splits_that_is_chosen_which_tells_most_candidates_apart():
    weights = torch.ones(41, 60)
    weights[torch.arange(1, 41), torch.arange(40)] = 0.0  # each leaves another sample out

    def told(draws, seed):
        first, second = telling_split(weights, 0, 16, random.Random(seed), draws=draws)  # noqa: S311
        return len({*first, *second} & set(range(40)))

    assert sum(told(32, seed) for seed in range(10)) > 1.2 * sum(told(1, seed) for seed in range(10))


@pytest.mark.parametrize("best", [0, 1])
@pytest.mark.parametrize("samples", [5, 1000])
def test_split_that_tells_a_sum_from_a_mean_has_targets_that_count_on_both_sides(samples, best):
    counting = {0, samples // 2}
    weights = torch.zeros(2, samples)
    weights[0, sorted(counting)] = 1.0
    weights[1] = 1.0  # the sum

    for seed in range(20):
        chance = random.Random(seed)  # noqa: S311 - repeatable
        parts = telling_split(weights, best, 8, chance, draws=32, sums=[False, True])
        assert [len(counting & {*part}) for part in parts] == [1, 1]


@pytest.mark.parametrize("samples", [2, 3, 5])
def test_split_has_two_parts_however_few_samples_there_are(samples):
    for seed in range(20):
        first, second = telling_split(torch.rand(4, samples), 0, 16, random.Random(seed), draws=4)  # noqa: S311

        assert first
        assert second
        assert len({*first, *second}) == len(first) + len(second) <= samples
