"""save_memory="auto" on several ranks: the one that lacks memory saves it, and the training is that of one process."""

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, default_collate

import autoaccum
from support.ranks import expect, savings
from support.ranks.rows import TWO, Row, slow, table

# Rank 1 is too small for one sample with nothing saved, and rank 0 is not.
MEMORY = ["16MiB", "4MiB"]


def on_unlike_devices(rank, size):
    device, save_memory = (autoaccum.Simulated(MEMORY[rank]), "auto") if size > 1 else ("cpu", None)
    given = {"model": savings.net(), "device": device, "save_memory": save_memory, "optimizer": savings.sgd}
    return given | {"micro_batch": "auto"}


def training(rank, size):
    samples = [sample for batch in savings.data(8) for sample in zip(*batch, strict=True)]
    given = on_unlike_devices(rank, size) | {"target_batch": 8, "make_loader": lambda *_: DataLoader(samples, 8)}

    def is_plain():
        return all("forward" not in vars(module) for module in given["model"].modules())

    return given | {"told": is_plain}


def loop(rank, size):
    def batch(rank, size, number):
        part = slice(rank * 8 // size, (rank + 1) * 8 // size)
        return tuple(each[part] for each in savings.data(8)[number])

    loss = (functional.cross_entropy, None)
    return on_unlike_devices(rank, size) | {"by": "loops", "loss": loss, "batch": batch, "steps": 8}


class Holding(autoaccum.Callback):
    """Takes memory after the sixth step."""

    held = None

    def on_step(self, report, *, epoch):
        if report.step == 6:
            self.held = torch.zeros(36 * 2**20, dtype=torch.uint8)


def later(rank, size, *, lists):
    batches = [tuple(each[rank::size].contiguous() for each in batch) for batch in savings.data(12)]
    if lists:
        batches = [list(zip(*batch, strict=True)) for batch in batches]
    given = on_unlike_devices(rank, size) | {"device": autoaccum.Simulated("40MiB"), "shard_data": False}
    given |= {"callbacks": [Holding()] if rank == 1 else [], "micro_batch": 4, "target_batch": 8}
    split = autoaccum.ListOfSamples(default_collate) if lists else None
    return given | {"make_loader": lambda *_: batches, "split": split}


def rank_1_saves(found):
    assert found[0]["savings"] == () != found[1]["savings"]


def rank_1_saves_and_models_are_plain(found):
    rank_1_saves(found)
    assert all(one["told"] for one in found)


def kept_by_those_that_go_on(run):
    first, second = (run(max_steps=steps, checkpoint=run.folder) for steps in (5, 8))
    assert [one["savings"] for one in second] == [one["savings"] for one in first]
    assert len(second[0]["losses"]) == 3


ROWS = table(
    __file__,
    Row("the rank that lacks memory saves it by itself", training,
        holds=expect.as_alone(also=rank_1_saves_and_models_are_plain)),
    *(
        Row(f"a rank that lacks memory later saves it while the other waits, lists={lists}",
            lambda rank, size, lists=lists: later(rank, size, lists=lists), (place,), expect.outcomes(rank_1_saves))
        for lists, place in [(False, TWO), (True, slow(TWO))]
    ),
    Row("ranks that go on keep what was chosen", training, (slow(TWO),), kept_by_those_that_go_on),
    Row("accumulators agree, and have the gradients of one process", loop, (slow(TWO),),
        expect.as_alone(also=rank_1_saves)),
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_ranks(rank_pool, row, tmp_path):
    row.check(rank_pool, tmp_path)
