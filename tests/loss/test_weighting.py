"""The loss of a window is rebuilt from its micro-batches, whatever the loss runs over."""

import contextlib
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from autoaccum._loss.weighting import (
    ELEMENTWISE,
    Over,
    Weighting,
    check_pair,
    constants,
    of_loss_module,
    shares,
    weight_of_pair,
)
from autoaccum.errors import InvalidInputError

N, C, T = 9, 4, 5
CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 2.5, 7.0], dtype=torch.float64)


def generator():
    return torch.Generator().manual_seed(0)


def real(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=generator())


def classes(*shape, padded=None):
    targets = torch.randint(0, C, shape, generator=generator())
    if padded is not None:
        # Sample i has i targets that do not count; of the last ones none counts.
        for row, sample in enumerate(targets):
            sample[: row if targets.dim() > 1 else 0] = padded
    return targets


def probabilities(*shape):
    return real(*shape).softmax(1)


def signs(*shape):
    return real(*shape).sign()


def multi_label(n, c):
    """Class numbers, ended by -1, of a different length for each sample."""
    targets = torch.full((n, c), -1)
    for row in range(n):
        targets[row, : row % c] = torch.arange(row % c)
    return targets


# Every kind of loss that is read, in every setting that changes what its mean runs over.
CASES = {
    "CrossEntropyLoss": (nn.CrossEntropyLoss, {}, real(N, C), classes(N)),
    "CrossEntropyLoss tokens": (nn.CrossEntropyLoss, {}, real(N, C, T), classes(N, T, padded=-100)),
    "CrossEntropyLoss ignore_index": (nn.CrossEntropyLoss, {"ignore_index": 2}, real(N, C), classes(N)),
    "CrossEntropyLoss class weights": (nn.CrossEntropyLoss, {"weight": CLASS_WEIGHTS}, real(N, C), classes(N)),
    "CrossEntropyLoss smoothing": (
        nn.CrossEntropyLoss,
        {"label_smoothing": 0.1},
        real(N, C, T),
        classes(N, T, padded=-100),
    ),
    "CrossEntropyLoss everything": (
        nn.CrossEntropyLoss,
        {"label_smoothing": 0.1, "weight": CLASS_WEIGHTS, "ignore_index": 1},
        real(N, C, T),
        classes(N, T, padded=1),
    ),
    "CrossEntropyLoss probabilities": (nn.CrossEntropyLoss, {}, real(N, C), probabilities(N, C)),
    "CrossEntropyLoss probabilities, weights": (
        nn.CrossEntropyLoss,
        {"weight": CLASS_WEIGHTS, "label_smoothing": 0.1},
        real(N, C, T),
        probabilities(N, C, T),
    ),
    "NLLLoss": (nn.NLLLoss, {}, real(N, C).log_softmax(1), classes(N)),
    "NLLLoss everything": (
        nn.NLLLoss,
        {"weight": CLASS_WEIGHTS, "ignore_index": 0},
        real(N, C, T).log_softmax(1),
        classes(N, T, padded=0),
    ),
    "MSELoss": (nn.MSELoss, {}, real(N, 3), real(N, 3) + 1),
    "L1Loss": (nn.L1Loss, {}, real(N, 3), real(N, 3) + 1),
    "SmoothL1Loss": (nn.SmoothL1Loss, {}, real(N), real(N) + 1),
    "HuberLoss": (nn.HuberLoss, {"delta": 0.5}, real(N, 3), real(N, 3) + 1),
    "BCELoss": (nn.BCELoss, {"weight": CLASS_WEIGHTS}, real(N, C).sigmoid(), probabilities(N, C)),
    "BCEWithLogitsLoss": (
        nn.BCEWithLogitsLoss,
        {"weight": CLASS_WEIGHTS, "pos_weight": CLASS_WEIGHTS},
        real(N, C),
        probabilities(N, C),
    ),
    "PoissonNLLLoss": (nn.PoissonNLLLoss, {"full": True}, real(N, 3), 2 * probabilities(N, 3)),
    "SoftMarginLoss": (nn.SoftMarginLoss, {}, real(N, 3), signs(N, 3)),
    "KLDivLoss": (nn.KLDivLoss, {}, real(N, C).log_softmax(1), probabilities(N, C)),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss, {"margin": 0.7}, real(N, 3), signs(N, 3)),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss, {}, real(N, C), multi_label(N, C)),
    "MultiMarginLoss": (nn.MultiMarginLoss, {"weight": CLASS_WEIGHTS}, real(N, C), classes(N)),
    "MultiLabelSoftMarginLoss": (
        nn.MultiLabelSoftMarginLoss,
        {"weight": CLASS_WEIGHTS},
        real(N, C),
        probabilities(N, C).round(),
    ),
}
REDUCTIONS = [(name, reduction) for name in CASES for reduction in ("mean", "sum")] + [("KLDivLoss", "batchmean")]

cuts = st.sets(st.integers(1, N - 1)).map(
    lambda stops: [b - a for a, b in zip([0, *sorted(stops)], [*sorted(stops), N], strict=True)]
)


def tallied(weighting, targets, sizes):
    return [weighting.tally(len(part), {"": part}) for part in targets.split(sizes)]


def rebuilt(loss, outputs, targets, sizes):
    """The window's loss from those of its micro-batches; one of weight 0 may be NaN and is left out."""
    how = of_loss_module(loss)
    factors = shares(how, tallied(how, targets, sizes), N)
    losses = [loss(*parts) for parts in zip(outputs.split(sizes), targets.split(sizes), strict=True)]
    return sum(float(value) * factor for value, factor in zip(losses, factors, strict=True) if factor)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both")
@pytest.mark.parametrize(("name", "reduction"), REDUCTIONS)
@settings(max_examples=12)
@given(sizes=cuts)
def test_shares_of_any_cut_rebuild_the_full_batch_loss(name, reduction, sizes):
    make, arguments, outputs, targets = CASES[name]
    loss = make(reduction=reduction, **arguments)

    assert rebuilt(loss, outputs, targets, sizes) == pytest.approx(float(loss(outputs, targets)), rel=1e-12)


@settings(max_examples=12)
@given(sizes=cuts)
@pytest.mark.parametrize("name", [name for name in CASES if "Cross" in name or "NLL" in name])
def test_vector_of_losses_is_averaged_over_the_samples(name, sizes):
    make, arguments, outputs, targets = CASES[name]
    loss = make(reduction="none", **arguments)
    per_sample = loss(outputs, targets).reshape(N, -1).sum(1)
    how = of_loss_module(loss)

    factors = shares(how, tallied(how, targets, sizes), N)

    means = [float(part.mean()) for part in per_sample.split(sizes)]
    assert how.over is Over.VECTOR
    assert sum(f * m for f, m in zip(factors, means, strict=True)) == pytest.approx(float(per_sample.mean()), rel=1e-12)


def test_micro_batch_in_which_nothing_counts_has_no_share():
    targets = torch.tensor([[1, 2], [-100, -100], [-100, 3], [-100, -100]])
    how = of_loss_module(nn.CrossEntropyLoss())

    assert shares(how, tallied(how, targets, [1, 1, 1, 1]), 4) == [2 / 3, 0.0, 1 / 3, 0.0]


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.CrossEntropyLoss(), torch.full((4, 3), -100)),
        (nn.NLLLoss(ignore_index=2), torch.full((4,), 2)),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0])), torch.ones(4, dtype=torch.long)),
    ],
    ids=["ignored", "ignored class", "class of weight 0"],
)
def test_window_in_which_nothing_counts_is_refused(loss, targets):
    how = of_loss_module(loss)

    with pytest.raises(InvalidInputError, match=f"2 micro-batches counts.*ignore_index={how.ignore_index}.*leave"):
        shares(how, tallied(how, targets, [3, 1]), 4)


def test_sum_over_targets_that_do_not_count_is_no_error():
    assert shares(of_loss_module(nn.CrossEntropyLoss(reduction="sum")), [0, 0], 2) == [1.0, 1.0]


def test_class_weights_are_summed_in_float64():
    weights = torch.tensor([1e-8, 1.0])
    targets = torch.tensor([1] + [0] * 1000)
    how = of_loss_module(nn.CrossEntropyLoss(weight=weights))

    assert how.weigh(1001, {"": targets}) == pytest.approx(1 + 1000 * float(weights[0]), rel=1e-14)


@pytest.mark.parametrize(
    "loss",
    [
        None,
        functional.cross_entropy,
        lambda outputs, targets: outputs.mean(),
        type("Weighted", (nn.CrossEntropyLoss,), {})(),
        nn.TripletMarginLoss(),
        nn.Linear(1, 1),
    ],
    ids=["none", "function", "lambda", "subclass", "another loss", "another module"],
)
def test_loss_that_may_compute_what_it_likes_is_not_read(loss):
    assert of_loss_module(loss) is None


def test_every_loss_that_would_broadcast_is_guarded_against_it():
    broadcasts = set()
    for make, *_ in CASES.values():
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
            make()(torch.rand(4, 1), torch.rand(4))
            broadcasts.add(make)

    assert {nn.MSELoss, nn.PoissonNLLLoss} <= broadcasts
    assert broadcasts <= set(ELEMENTWISE)


def test_targets_are_not_looked_at_where_they_do_not_matter():
    for over in (Over.SUM, Over.SAMPLES, Over.VECTOR, Over.PAIR):
        assert Weighting(over).weigh(7, {"": None}) == 7.0


def test_named_target_is_the_one_that_counts():
    targets = {"noise": torch.zeros(3, 2), "labels": torch.tensor([[1, -100], [1, 1], [-100, 2]])}

    assert Weighting(Over.COUNTED, target="labels").weigh(3, targets) == 4.0
    assert Weighting(Over.SHIFTED, target="labels").weigh(3, targets) == 2.0


@given(sizes=cuts)
def test_shares_of_a_mean_sum_up_to_one(sizes):
    factors = shares(Weighting(Over.SAMPLES), sizes, N)

    assert sum(factors) == pytest.approx(1.0, rel=1e-15)
    assert factors == [size / N for size in sizes]


@settings(max_examples=60)
@given(first=st.integers(1, 5), data=st.data(), seed=st.integers(0, 99))
@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_share_of_a_micro_batch_is_the_same_to_the_last_bit_however_the_rest_is_cut(ignore_index, first, data, seed):
    targets = torch.randint(0, 50, (40, 3), generator=torch.Generator().manual_seed(seed))
    targets[5:9] = ignore_index
    weight = torch.rand(50, generator=torch.Generator().manual_seed(seed)) ** 8
    how = of_loss_module(nn.CrossEntropyLoss(weight=weight, ignore_index=ignore_index))
    stops = sorted(data.draw(st.sets(st.integers(first + 1, 39))))
    rest = [b - a for a, b in zip([first, *stops], [*stops, 40], strict=True)]

    one, other = (shares(how, tallied(how, targets, [first, *sizes]), 40) for sizes in (rest, [40 - first]))

    assert one[0] == other[0]


def test_masks_are_targets_whose_zeros_do_not_count():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    for kind in (mask, mask.bool(), mask.float()):
        assert Weighting(Over.COUNTED, 0, target="mask").weigh(2, {"mask": kind}) == 3.0
        assert Weighting(Over.SHIFTED, 0, target="mask").weigh(2, {"mask": kind}) == 1.0


def test_counts_of_each_sample_add_up_to_the_tally():
    targets = {"labels": classes(N, T, padded=-100)}
    for over in (Over.SUM, Over.SAMPLES, Over.ELEMENTS, Over.COUNTED, Over.SHIFTED):
        how = Weighting(over, target="labels")
        assert how.tally_each(N, targets).sum() == how.tally(N, targets)


def test_constants_are_the_tensors_that_hold_one_value_alone():
    targets = {"a": torch.full((3, 2), 7), "b": torch.arange(3), "c": torch.zeros(3).bool(), "d": torch.zeros(3, 0)}

    assert constants(targets) == {("a", 7), ("c", 0)}


def test_opaque_loss_leaves_out_what_makes_it_no_number_and_changes_no_other_factor():
    how = Weighting(Over.OPAQUE, void=frozenset([frozenset([("", 0)])]))
    targets = torch.tensor([1, 2, 0, 0, 2, 1])

    assert shares(how, tallied(how, targets, [2, 2, 2]), 6) == [1 / 3, 0.0, 1 / 3]
    assert shares(how, tallied(how, targets, [2, 4]), 6) == [1 / 3, 2 / 3]


# --- pairs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "found"),
    [
        (torch.rand(4, 3), "a tensor of shape \\(4, 3\\)"),
        (torch.ones((), requires_grad=True), "a tensor with a gradient"),
        (torch.ones(()).bool(), "a tensor of type torch.bool"),
        (True, "a bool"),
        ({"accuracy": 0.5}, "a dict"),
        (None, "a NoneType"),
        ("12", "a str"),
    ],
)
def test_what_cannot_be_a_weight_is_refused_and_it_is_said_what_a_pair_means(weight, found):
    with pytest.raises(InvalidInputError, match=f"'mine' is a pair whose second half is {found}; a pair means"):
        weight_of_pair("mine", weight)


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor(3), torch.tensor([3.0]), np.float32(3), np.int64(3)])
def test_any_single_number_can_be_a_weight(weight):
    assert float(weight_of_pair("mine", weight)) == 3.0


def test_pairs_that_add_up_are_taken():
    check_pair("mine", (9.0, 3.0), [(4.0, 1.0), (5.0, 2.0)], 1e-9)
    check_pair("mine", (0.0, 0.0), [(0.0, 0.0), (0.0, 0.0)], 1e-9)


@pytest.mark.parametrize(
    ("whole", "parts", "found"),
    [
        ((9.0, 0.5), [(4.0, 1.0), (5.0, 0.25)], "second halves do not add up: 0.5 .* 1.25"),
        ((4.5, 3.0), [(4.0, 1.0), (4.75, 2.0)], "first half is a mean \\(4.5 for a batch, 4 and 4.75"),
    ],
    ids=["accuracy", "mean"],
)
def test_pairs_that_do_not_add_up_are_refused(whole, parts, found):
    with pytest.raises(InvalidInputError, match=f"{found}.*a pair means \\(sum, weight\\)"):
        check_pair("mine", whole, parts, 1e-9)


@pytest.mark.parametrize(
    ("how", "found"),
    [
        (Weighting(Over.WEIGHED), r"split.weight\(batch\) is 0 for all of this window of 2 micro-batches"),
        (Weighting(Over.SUMMED, target="lengths"), "divided by the sum of 'lengths'"),
        (Weighting(Over.COUNTED), "no target of this window of 2 micro-batches counts"),
    ],
)
def test_window_in_which_nothing_counts_is_refused_by_what_did_not_count(how, found):
    with pytest.raises(InvalidInputError, match=found):
        shares(how, [0, 0], 8)
