"""What a step holds on one of several ranks, from its timeline on one."""

import pytest
import torch
from torch import nn

from autoaccum._estimate.allocation_trace import Category
from autoaccum._estimate.estimate import trace_step
from autoaccum._estimate.gpus import GPU
from autoaccum._estimate.ranks import in_buckets, sharding

MIB = 2**20
SMALL_GPU = GPU("some-24gb", 24 * 2**30, 400 * MIB, (8, 0), source="made up for tests")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def stack(depth=6):
    return nn.Sequential(nn.Linear(64, 512), nn.Sequential(*(Block() for _ in range(depth))), nn.Linear(512, 10))


@pytest.fixture(scope="module")
def traced():
    return trace_step(stack(), (torch.zeros(8, 64), torch.zeros(8, dtype=torch.long)), kind="cuda", most=64)


def bytes_of(timeline, category):
    return sum(one.size_bytes for one in timeline.storages if one.category is category)


@pytest.mark.parametrize("size", [2, 64])
def test_a_rank_with_the_whole_model_holds_a_bucket_or_all_gradients_again(traced, size):
    alone, step = traced.step_of(size).peak().live_bytes, traced.step_of(size)
    gradients = bytes_of(step, Category.GRADIENTS)

    assert gradients > 25 * MIB
    assert in_buckets(step).peak().live_bytes == alone + 25 * MIB


def test_a_small_model_needs_no_larger_bucket_than_its_gradients():
    small = trace_step(nn.Linear(8, 2), torch.zeros(4, 8), loss=lambda outputs, _: outputs.sum(), kind="cuda").step_of(
        4
    )

    assert in_buckets(small).peak().live_bytes - small.peak().live_bytes == 4 * (8 * 2 + 2)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_rank_of_a_sharded_model_holds_its_share_and_what_is_gathered(traced, ranks):
    step = traced.step_of(8)

    shard_data = sharding(stack(), ranks)(step)

    for category in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER):
        assert bytes_of(shard_data, category) == pytest.approx(bytes_of(step, category) / ranks, rel=0.01)
    block = sum(parameter.nbytes for parameter in Block().parameters())
    rest = sum(parameter.nbytes for parameter in stack(0).parameters())
    live = shard_data.peak().live_bytes
    held = bytes_of(step, Category.PARAMETERS) * 4 / ranks
    assert live >= held + 2 * block + rest
    assert live <= held + 4 * block + rest + step.peak().live_bytes - bytes_of(step, Category.PARAMETERS) * 4


def test_more_ranks_leave_more_room_and_phases_stay_where_they_are(traced):
    peaks = [traced.changed(sharding(stack(), ranks)).estimate(SMALL_GPU).at(64).reserved_bytes for ranks in (2, 4, 16)]

    assert peaks == sorted(peaks, reverse=True)
    shard_data = sharding(stack(), 4)(traced.step_of(8))
    assert [name for _, name in shard_data.phases] == [name for _, name in traced.step_of(8).phases]
    assert shard_data.kept_for_backward() >= traced.step_of(8).kept_for_backward()
