"""Shares of a window that follow the ranks' speed: the gradient stays that of the whole window."""

import pytest
import torch

import rank_training
from rank_training import FAR, assert_alike, far

# The slow rank takes ten times as long for a sample, all by sleeping, so that a busy machine does not hide it.
SAMPLES, TARGET = 190, 16


@pytest.mark.parametrize("loader", [None, rank_training.workers_loader, rank_training.no_dataloader])
def test_slow_rank_gets_less_and_every_sample_is_used_once(crew, loader):
    arguments = {"data": rank_training.vectors(SAMPLES), "target_batch": TARGET}
    expected = rank_training.train(0, 1, micro_batch=TARGET, **arguments)

    found = crew.run(
        "rank_training:with_slow_rank",
        1,
        size=2,
        micro_batch=3,
        shard=True,
        shares="speed",
        make_loader=loader,
        **arguments,
    )

    assert_alike(found)
    parts = [[sum(cut) for cut in one["cuts"]] for one in found]
    assert parts[1][0] == TARGET // 2
    assert parts[1][-2] <= TARGET // 4
    assert [sum(both) for both in zip(*parts, strict=True)] == expected["samples"]
    assert far(found[0]["parameters"], expected["parameters"]) <= FAR
    assert all(map(torch.equal, found[0]["buffers"], expected["buffers"]))
