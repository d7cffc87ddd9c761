"""A training of a model to which `fully_shard` was applied."""

from torch.distributed.fsdp import fully_shard

import rank_training


def train(rank, size):
    model = fully_shard(rank_training.net())
    return rank_training.train(rank, size, model=model, target_batch=16, micro_batch=4, shard=True)
