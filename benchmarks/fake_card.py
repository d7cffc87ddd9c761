"""Traces a published training on fake tensors of a card, and replays it on the card's allocator."""

from __future__ import annotations

import functools
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autoaccum._estimate.allocation_trace import Category
from autoaccum._estimate.cuda_allocator import CachingAllocator, replay
from autoaccum._estimate.cuda_dispatch import CudaCalls, without_driver
from autoaccum._estimate.cuda_kernels import workspace
from autoaccum._estimate.fake import Stage, ValuesAssumed
from autoaccum._estimate.tracer import Ledger

CARD = torch.device("cuda", 0)


@contextmanager
def on_fake_card(model, batch, *, tensor_float=True):
    """Yield the model on a fake card, and the timeline that records what is done with it inside the block.

    Args:
        model: The model, which is not changed.
        batch: The samples of one iteration.
        tensor_float: Whether the card computes float32 with Tensor Cores.
    """
    with FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False):
        fake = Stage(CARD).copied(model.train())
        ledger = Ledger(batch, CARD.type, functools.partial(workspace, tensor_float=tensor_float))
        ledger.hold(fake.parameters(), Category.PARAMETERS)
        ledger.hold(fake.buffers(), Category.BUFFERS)
        ledger.enter("training")
        with without_driver(), CudaCalls(), ledger:
            yield fake, ledger.timeline


def update(optimizer):
    with ValuesAssumed():
        optimizer.step()


def served(timeline, *, cublas=(), capacity_bytes=None):
    """Return PyTorch's allocator after it has served a timeline; raises if the capacity is too small.

    Args:
        timeline: The timeline.
        cublas: cuBLAS's workspaces, allocated first: bytes for each handle.
        capacity_bytes: The memory of the card; None for unlimited.
    """
    allocator = CachingAllocator(capacity_bytes)
    for size_bytes in cublas:
        allocator.allocate(size_bytes)
    replay(allocator, timeline, timeline.events, {})
    return allocator
