"""Loops on several ranks for `autoaccum verify`: torchrun verify.py KIND MICRO_BATCH ACCUM_STEPS."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody does

from support.losses.accumulation_faults import network, samples

kind, micro_batch, accum_steps = sys.argv[1], *map(int, sys.argv[2:])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
x, y = (one[rank::world_size].split(micro_batch) for one in samples())
model = network()
is_sharded = kind.startswith("fsdp2")
if is_sharded:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
elif not kind.startswith("by_hand"):
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for number, (inputs, targets) in enumerate(zip(x, y, strict=True), 1):
    is_last = number % accum_steps == 0
    if is_sharded:
        model.set_requires_gradient_sync(is_last)
    waits = kind.startswith("ddp") and (not is_last or (kind == "ddp_never_reduced" and accum_steps > 1))
    with model.no_sync() if waits else contextlib.nullcontext():
        divide = 1 if kind.endswith("not_divided") else accum_steps
        (F.cross_entropy(model(inputs), targets) / divide).backward()
    if is_last:
        for one in model.parameters() if kind.startswith("by_hand") else ():
            dist.all_reduce(one.grad)
            # A sum over the ranks where it accumulates, and a mean where it does not.
            one.grad /= 1 if kind == "by_hand_world_size" and accum_steps > 1 else world_size
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
