"""Losses of many forms on ranks: the gradient of the whole batch, what is reported of it, and nobody waits."""

import contextlib
import itertools
import warnings

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from support.ranks import expect, losses, named_losses
from support.ranks.rows import SPREAD, THREE, TWO, Row, sweep, table
from support.ranks.training import assert_trained_as, texts, texts_of_one_length

# --- forms ------------------------------------------------------------------------------------------------------------

# What one rank showed, and the others did not hear of; a quotient of 0 and 0 that the others wait for.
QUICK = {
    ("three means", "of one length, but for one", TWO, 1, 24),
    ("two divisors, scaled", "of one length, but for one", TWO, 5, 7),
    ("three means", "some in which nothing counts", SPREAD, 1, 24),
    ("two means", "of one length, but for one", SPREAD, 2, 16),
    ("two divisors", "of one length, but for one", SPREAD, 2, 16),
    ("pair and mean", "of all lengths", SPREAD, 2, 16),
}


@contextlib.contextmanager
def without_warnings():
    """One process sees other samples when it warns of a loss."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


FORMS = [
    Row(
        f"the gradient of {loss} {data}, {target} samples in micro-batches of {micro_batch}",
        lambda *_, loss=loss, data=data, micro_batch=micro_batch, target=target: {
            "loss": losses.LOSSES[loss], "data": losses.DATA[data](), "micro_batch": micro_batch,
            "target_batch": target, "epochs": 2, "during": without_warnings(),
        },
        on=tuple(
            place if (loss, data, place, micro_batch, target) in QUICK else sweep(place) for place in (TWO, SPREAD)
        ),
        holds=expect.as_alone(reports=False),
    )
    for loss, data, (micro_batch, target) in itertools.product(losses.LOSSES, losses.DATA, [(1, 24), (2, 16), (5, 7)])
]  # fmt: skip


# --- what only one rank counts or evaluates ---------------------------------------------------------------------------


def with_a_class_on_one_rank(rank, size):
    """Two pairs, of which the second counts a class that only the last samples of each window have."""
    samples = [(inputs, torch.where(targets == 1, 0, targets)) for inputs, targets in texts(32)]
    for at in range(7, 32, 8):
        samples[at][1][0] = 1
    return {"loss": losses.two_pairs, "data": samples, "target_batch": 8, "micro_batch": 2}


def of_one_token(rank, size):
    """Windows in each of which a single token counts, on one of the ranks."""
    samples = texts(32)
    for at, (_, targets) in enumerate(samples):
        targets[1 if at in (2, 15, 18, 27) else 0 :] = -100
    return {"loss": losses.masked, "data": samples, "target_batch": 8, "micro_batch": 4}


def evaluated(loss, *, but=None, nothing_counts=slice(0), **given):
    """Texts of which a few show what the loss counts, to the ranks that have them."""
    samples = texts_of_one_length(32, but)
    for _, targets in samples[nothing_counts]:
        targets.fill_(-100)
    loader = DataLoader(texts_of_one_length(20, but=10), batch_size=3)
    return {"loss": losses.LOSSES[loss], "data": samples, "target_batch": 8, "epochs": 2, "val_loader": loader} | given


def ignoring(warning):
    return (pytest.mark.filterwarnings(f"ignore{warning}"),)


SHOWN_BY_SOME = [
    Row("a part in which a pair counts nothing adds nothing", with_a_class_on_one_rank),
    Row(
        "ranks on which nothing counts know no other form of a loss",
        of_one_token,
        marks=ignoring("::autoaccum.LossWarning"),  # in no choice of samples does something count in two
    ),
    Row(
        "what an evaluation shows of a list changes no gradient",
        evaluated("list", micro_batch=1, val_every=1),
        on=(TWO, sweep(THREE)),
    ),
    Row(
        "what an evaluation shows of two divisors changes no gradient",
        evaluated("two divisors, scaled", micro_batch=5, val_every=2, but=11, nothing_counts=slice(16, 20)),
        on=(sweep(TWO), THREE),
        holds=expect.as_alone(reports=False),
        marks=ignoring(":autoaccum. loss 'loss' has terms that are divided by numbers of their own"),
    ),
]


# --- mappings of losses -----------------------------------------------------------------------------------------------

NAMED = {"data": texts(), "target_batch": 25, "micro_batch": 5, "epochs": 2}


def evaluating(kind):
    loader = DataLoader(texts(20, seed=5), batch_size=3)
    return NAMED | {"loss": named_losses.LOSSES[kind], "val_loader": loader}


def only_on_rank_1(kind):
    """Entries that are no part of the loss come from one rank alone."""

    def arguments(rank, size):
        def loss(outputs, targets):
            found = named_losses.LOSSES[kind](outputs, targets)
            is_whole = size == 1 or rank == 1
            return found if is_whole else {k: v for k, v in found.items() if k in ("loss", "ce", "tokens", "size")}

        return evaluating(kind) | {"loss": loss}

    return arguments


def reports_the_same_names(run):
    found, whole = run(), run.alone()
    assert_trained_as(found, whole)
    for one in found:
        assert one["losses"] == pytest.approx(whole["losses"])
        assert one["named losses"] == found[0]["named losses"]
        assert [each.keys() for each in one["named losses"]] == [each.keys() for each in whole["named losses"]]


def divided_by_own_count(rank, size):
    """A loss that is divided by the count that each rank's batch carries: their sum is not the mean over the window."""

    def loss(outputs, batch):
        summed = functional.cross_entropy(outputs, batch["targets"], reduction="sum")
        return summed / batch["num_items_in_batch"]

    batch = {"input": torch.randn(6, 6).double(), "targets": torch.arange(6) % 3, "num_items_in_batch": 6}
    return {"loss": loss, "make_loader": lambda *_: [batch], "target_batch": 12, "shard_data": False}


def times_own_number(*, differs):
    """A mean that each rank's batch carries a factor of, as mixup's part."""

    def loss(outputs, batch):
        return batch["part"] * functional.cross_entropy(outputs, batch["targets"])

    def arguments(rank, size):
        batch = {
            "input": torch.randn(6, 6).double(),
            "targets": torch.arange(6) % 3,
            "part": 0.3 + differs * 0.6 * rank,
        }
        return {"loss": loss, "make_loader": lambda *_: [batch], "target_batch": 12, "shard_data": False}

    return arguments


OF_NAMES = [
    *(
        Row(f"what is reported of {kind} is that of the whole window", evaluating(kind), on=(THREE,))
        for kind in named_losses.LOSSES
    ),
    *(
        Row(f"an entry of {kind} that one rank reports keeps nobody waiting", only_on_rank_1(kind),
            holds=reports_the_same_names)
        for kind in named_losses.LOSSES
    ),
    Row(
        "a count of a part of the window is refused on all ranks", divided_by_own_count,
        holds=expect.refused("'num_items_in_batch', a number of a batch of the loader"),
    ),
    Row(
        "a number that multiplies a mean and is another one on each rank is refused on all",
        times_own_number(differs=True), holds=expect.refused("times a number that differs"),
    ),
    Row("a number that multiplies a mean on all ranks", times_own_number(differs=False), holds=lambda run: run()),
]  # fmt: skip

ROWS = table(__file__, *FORMS, *SHOWN_BY_SOME, *OF_NAMES)


@pytest.mark.parametrize("row", ROWS)
def test_ranks(rank_pool, row, tmp_path):
    row.check(rank_pool, tmp_path)
