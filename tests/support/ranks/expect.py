"""What must hold of a row of `rows.py`: functions of a `Run`, which trains what the row says."""

import pytest
import torch

import autoaccum
from support.ranks.training import FAR, assert_alike, assert_trained_as, far
from support.training.long_runs import checkpoints

# PyTorch 2.8 adds up the norms of shards in float32.
CLIPPED = FAR if torch.__version__ >= "2.9" else 1e-6


def as_alone(*, also=None, rounding=FAR, reports=True, **changes):
    """Ranks end alike, and as one process that has memory for whole windows (and these changes).

    Without `reports` that is only said of parameters.
    """

    def holds(run):
        found, expected = run(), run.alone(**changes)
        if reports:
            assert_same(found, expected, rounding)
        assert_trained_as(found, expected, rounding)
        if also is not None:
            also(found)

    return holds


def as_whole(*, rounding=FAR):
    """Ranks with a model that is spread over them end as those with whole ones."""

    def holds(run):
        found, whole = run(), run(is_spread=False)[0]
        assert_same(found, whole, rounding)
        for mine, theirs in zip(found[0]["buffers"], whole["buffers"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=rounding, atol=0.0)

    return holds


def alike(run):
    """Ranks end alike."""
    assert_alike(run())


def outcomes(claim=None, **of_each):
    """Ranks end alike, each with these outcomes, and a claim about what all return holds."""

    def holds(run):
        found = run()
        assert_alike(found)
        for name, value in of_each.items():
            assert [one[name] for one in found] == [value] * run.size
        if claim is not None:
            claim(found)

    return holds


def ends(*of_ranks, keeps=None, wait_s=30, also=None):
    """Each rank ends with an error and words of it, one pair for all or one for each; so many checkpoints are kept."""

    def holds(run):
        changes = {} if keeps is None else {"checkpoint": run.folder}
        answers = run.answers(wait_s=wait_s, **changes)
        for answer, (kind, *texts) in zip(answers, of_ranks * (run.size if len(of_ranks) == 1 else 1), strict=True):
            assert isinstance(answer, kind), answers
            assert all(text in str(answer) for text in texts), answers
        if keeps is not None:
            assert checkpoints(run.folder) == [f"step-{step:08}" for step in keeps]
        if also is not None:
            also(answers)

    return holds


def refused(*texts):
    return ends((autoaccum.InvalidInputError, *texts))


def ends_on(who, error, *, size=2, text="the user's own", **settings):
    """One rank ends with an error, and the others with word of it."""
    others = (autoaccum.RankFailedError, f"rank {who}: {error.__name__}", text)
    return ends(*((error, text) if rank == who else others for rank in range(size)), **settings)


def goes_on(first, then=None, *, sizes=(None, None), undisturbed="ranks", rounding=0.0, kept=None):
    """A run that ends with these arguments and goes on with those ends as one that was never disturbed.

    `sizes` are of the first part and the second. What is undisturbed are as many ranks, or "one process".
    """

    def holds(run):
        then_, (before, after) = then or {}, sizes
        given = {**then_, "size": after}
        expected = run(**given) if undisturbed == "ranks" else [run.alone(**then_)]
        ended = run.answers(size=before, checkpoint=run.folder, **{**then_, **first})
        assert not any(isinstance(one, autoaccum.AutoaccumError) for one in ended), ended
        found = run(checkpoint=run.folder, **given)
        assert_alike(found)
        steps = found[0]["resumed from"]
        assert steps is not None if kept is None else steps == kept
        assert far(found[0]["parameters"], expected[0]["parameters"]) <= rounding
        for mine, theirs in zip(found[0]["buffers"], expected[0]["buffers"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=rounding, atol=0.0)
        assert found[0]["losses"] == pytest.approx(expected[0]["losses"][steps:], rel=rounding * 1e3)
        if rounding == 0.0:
            assert [one["cuts"] for one in found] == [one["cuts"][steps:] for one in expected]
        assert_evaluations(found[0]["evaluations"][-1:], expected[0]["evaluations"][-1:], rounding)

    return holds


def assert_same(found, expected, rounding=FAR):
    """Parameters, and what reports and evaluations say, are the same on all ranks and near what is expected."""
    assert_trained_as(found, expected, rounding)
    near = {"rel": max(1e-9, rounding), "abs": 1e-14}
    for one in found:
        assert one["losses"] == pytest.approx(expected["losses"], **near)
        assert one["norms"] == pytest.approx(expected["norms"], **near)
        assert one["samples"] == expected["samples"]
        assert one["evaluations"] == found[0]["evaluations"]
    for one, other in zip(found[0]["named losses"], expected["named losses"], strict=True):
        assert one == pytest.approx(other, **near)
    assert_evaluations(found[0]["evaluations"], expected["evaluations"], rounding)


def assert_evaluations(found, expected, rounding=FAR):
    near = {"rel": max(1e-9, rounding), "abs": 1e-14}
    for one, other in zip(found, expected, strict=True):
        assert one["samples"] == other["samples"]
        assert one["loss"] == pytest.approx(other["loss"], **near)
        assert one["losses"] == pytest.approx(other["losses"], **near)
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-6)  # torchmetrics counts in single precision
