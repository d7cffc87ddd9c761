"""`fit` with models that `fully_shard` has spread over ranks, and what only those can meet.

That their gradient is that of the window is a place (SPREAD) of the rows for any model, in `test_ranks_fit.py`.
"""

import functools
from unittest import mock

import pytest
import torch
from torch.distributed import fsdp
from torch.utils.data import DataLoader

import autoaccum
from support.ranks import expect, named_losses, training
from support.ranks.lacking import lacking, lacking_on
from support.ranks.rows import SPREAD, SPREAD_1, SPREAD_3, Row, slow, sweep, table
from support.ranks.sharded import Greedy, spread
from support.ranks.training import net, texts, texts_of_one_length, vectors

ON = (SPREAD,)


def with_layer(layer, *, norm=False, **given):
    """A model with one more layer, which a function of the rank makes."""

    def arguments(rank, size):
        model = net(norm=norm)
        model.insert(2, layer(rank))
        return {"model": model} | given

    return arguments


# --- memory -----------------------------------------------------------------------------------------------------------


class GreedyInEvaluation(Greedy):
    def forward(self, inputs):
        return inputs.clone() if self.training else super().forward(inputs)


def evaluates_greedily(rank, size):
    """On a device that fails cleanly, which a host does not."""
    given = {"val_loader": DataLoader(vectors(40, seed=5), batch_size=10), "device": autoaccum.Simulated("1GiB")}
    return with_layer(lambda _: GreedyInEvaluation(3), **given)(rank, size)


def all_are_evaluated(found):
    assert [one["evaluations"][0]["samples"] for one in found] == [40, 40]


def greedy_on_rank_1(most, *, backward=False, **given):
    return with_layer(lambda rank: Greedy(most if rank == 1 else 1000, backward=backward), **given)


def sizes_are(answers):
    assert [one.micro_batch for one in answers] == [None, 8]


def sizes_grow(found):
    sizes = [max(cut) for cut in found[0]["cuts"] if len(cut) and sum(cut) == 8]
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert sizes[-1] == 8


def begun_anew(cut):
    def claim(found):
        assert found[0]["oom"] == 1
        assert {len(one["cuts"][1]) for one in found} == {cut}
        assert max(max(one["recomputed"]) for one in found) == 8  # the samples of a rank

    return claim


def lacking_each(*points):
    return lambda rank, _: {"during": lacking(*points[rank]), "micro_batch": 8, "epochs": 2}


def without_room(rank, size):
    """The host of rank 0 has no room for the second tensor of a whole state."""
    copies = []

    def cpu(tensor):
        copies.append(tensor)
        if rank == 0 and len(copies) > 1:
            raise MemoryError("for this test")
        return tensor

    return normed(rank, size) | {"during": mock.patch.object(torch.Tensor, "cpu", cpu)}


ANEW = [("enter", 2), ("transfer", 2), ("reserve", 1), ("after the passes", 1)]  # and in how many parts
EACH = [
    [("after the passes", 2), ("transfer", 3)],
    [("reserve", 2), ("reserve", 3)],
    [("enter", 2), ("reserve", 3)],
]
OF_MEMORY = [
    Row("an evaluation takes no more samples than training, since a failure would end every rank", evaluates_greedily,
        ON, expect.outcomes(all_are_evaluated)),
    *(
        Row(f"memory that runs out within a pass ends every rank, backward={backward}",
            greedy_on_rank_1(4, backward=backward, micro_batch=8), (place,),
            expect.ends((autoaccum.StartAgainError, "rank 1 ran out of memory"), wait_s=2, also=sizes_are))
        for backward, place in ((False, slow(SPREAD)), (True, SPREAD))
    ),
    *(
        Row(f"lack of memory that no smaller cut would mend is told as such, norm={norm}",
            greedy_on_rank_1(0, norm=norm, micro_batch=2 if norm else 1), (place,),
            expect.ends((autoaccum.RankFailedError,), (autoaccum.DoesNotFitError,), wait_s=2))
        for norm, place in ((False, slow(SPREAD)), (True, SPREAD))
    ),
    *(
        Row(f"sizes grow from the smallest by what smaller ones show, {optimizer.__name__}",
            {"epochs": 3, "optimizer": optimizer, "micro_batch": "auto"}, ON, expect.as_alone(also=sizes_grow))
        for optimizer in (training.sgd, training.plain_sgd)  # with and without a state
    ),
    *(
        Row(f"memory that runs out outside of a pass ({where}) begins the window anew on all ranks",
            lambda rank, size, where=where: {"micro_batch": 8, "epochs": 2} | lacking_on(0, where, 2)(rank, size), ON,
            expect.as_alone(also=begun_anew(cut)))
        for where, cut in ANEW
    ),
    *(
        Row(f"ranks may lack memory one after the other, {first[0]} and {second[0]}", lacking_each(first, second), ON)
        for first, second in EACH
    ),
    Row("rank 0 without room for the whole state tells the others", without_room, (slow(SPREAD),),
        expect.ends((MemoryError,), (autoaccum.RankFailedError, "rank 0: MemoryError"), keeps=[], wait_s=5)),
]  # fmt: skip


# --- checkpoints ------------------------------------------------------------------------------------------------------

RUN = {"target_batch": 12, "micro_batch": 4, "epochs": 2, "data": vectors(48), "optimizer": training.adam}


def normed(rank, size):
    return RUN | {"model": net(norm=True, dropout=0.3)}


class EndsAfter(autoaccum.Callback):
    """Ends a training after a step by an error, as a process does that is killed there."""

    def __init__(self, step):
        self.step = step

    def on_step(self, report, *, epoch):
        if report.step == self.step:
            raise RuntimeError("told to")


def named(kind, samples):
    """Losses by name, of which an evaluation reports each."""
    loader = DataLoader(texts(samples, seed=5), batch_size=3)
    given = {"loss": named_losses.LOSSES[kind], "data": texts(), "target_batch": 25, "micro_batch": 5, "epochs": 1}
    return given | {"val_loader": loader}


KILLED = {"callbacks": [EndsAfter(2)], "checkpoint_every": 1}
OF_CHECKPOINTS = [
    *(
        Row(f"a training goes on from the checkpoint after {steps} steps bit for bit", normed, (place,),
            expect.goes_on({"epochs": None, "max_steps": steps}, kept=steps))
        for steps, place in ((3, slow(SPREAD)), (4, SPREAD))
    ),
    Row("another number of ranks goes on after an epoch", RUN, (SPREAD_3,),
        expect.goes_on({"epochs": 1}, sizes=(3, 2), undisturbed="one process", rounding=training.FAR)),
    *(
        Row(f"models go on from each other's checkpoints, first {name}", RUN, ON,
            expect.goes_on({"epochs": None, "max_steps": 3, "is_spread": is_spread}, {"is_spread": not is_spread},
                           rounding=training.FAR, kept=3))
        for is_spread, name in ((True, "spread"), (False, "whole"))
    ),
    # No window of the process that goes on has shown the losses, nor given a rank without samples any for its passes:
    # 3 are on the first rank alone.
    *(
        Row(f"a run that goes on with an evaluation adds up the losses that were trained: {kind}, {samples}",
            named(kind, samples), (place,), expect.goes_on(KILLED, kept=2))
        for kind, samples, place in [
            ("detached", 20, SPREAD), ("detached", 3, sweep(SPREAD)), ("several", 20, sweep(SPREAD)),
        ]
    ),
]  # fmt: skip


# --- what is as with whole models, and what cannot be done ------------------------------------------------------------


def refused_in_a_pass(run):
    answers = run.answers()
    assert {type(answer) for answer in answers} == {autoaccum.InvalidInputError, autoaccum.RankFailedError}
    assert any("return the same form in every micro-batch" in str(answer) for answer in answers)


def statistics(rank, size):
    return {"model": net(norm=True), "data": vectors(48), "micro_batch": 4, "clip_grad_norm": 0.1, "epochs": 2}


def first_layer(model):
    fsdp.fully_shard(model[0])
    return model


GATHERED = {"spreads": functools.partial(spread, reshard_after_forward=False), "micro_batch": 4, "epochs": 2}
OTHERS = [
    Row("running statistics and clipping are those of whole models on the same ranks", statistics, ON,
        expect.as_whole(rounding=expect.CLIPPED)),
    Row("layers that stay gathered after a forward pass train as any others",
        GATHERED | {"val_loader": DataLoader(vectors(20, seed=5), batch_size=10)}, ON),
    Row("a loss that one rank refuses within a pass ends all at once",
        {"loss": training.tokens_if_all_count, "data": texts_of_one_length(48, but=31), "micro_batch": 2}, ON,
        refused_in_a_pass),
    Row("a noise scale is refused", {"noise_scale": 5}, ON, expect.refused("noise_scale=5 is not for a model")),
    Row("a layer that is whole and trained is refused", {"spreads": first_layer}, ON,
        expect.refused("parameter '3.weight' is trained and on every rank whole")),
    Row("one process is told to have others", {}, (SPREAD_1,),
        expect.refused("parameter '0.weight' is a DTensor")),
]  # fmt: skip

ROWS = table(__file__, *OF_MEMORY, *OF_CHECKPOINTS, *OTHERS)


@pytest.mark.parametrize("row", ROWS)
def test_ranks(rank_pool, row, tmp_path):
    row.check(rank_pool, tmp_path)


# --- one process ------------------------------------------------------------------------------------------------------

OF_SIZES = [f'{{"micro_batch": {size}}}' for size in ("-5", "0", "true", "1e400", "1" + "0" * 400, '"8"')]


@pytest.mark.parametrize("found", ["", "{", "[]", "3", "{}", "[" * 100_000, *OF_SIZES])
def test_note_of_lack_of_memory_that_nothing_here_has_written_is_passed_over(tmp_path, found):
    (tmp_path / "out-of-memory.json").write_text(found)

    trained = training.train(0, 1, target_batch=16, micro_batch=16, checkpoint=tmp_path, progress="lines")

    assert trained["cuts"][0] == (16,)
    assert "ran out of memory before" not in trained["said"]
