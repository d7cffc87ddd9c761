"""Measures what checkpointing each block of a model saves and costs, in passes of a sample or two without a trace.

Gradients are off but within blocks, and nothing that a block keeps outlives it: a pass takes the memory of one block.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from autoaccum._data.nesting import copied, map_tensors, without_graphs
from autoaccum._engine.block_names import name_of
from autoaccum._engine.checkpointing import all_blocks, with_their_own, without_cache
from autoaccum._engine.replaced_forward import forward_replaced
from autoaccum._engine.savepoint import Savepoint
from autoaccum._loss.plain_attributes import PlainAttributes
from autoaccum._oom import is_device_lost, let_go

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._memory.base import MemoryBackend

# BatchNorm refuses a single value for each channel.
_SAMPLES = 2
# The first pass may allocate and choose kernels.
_PASSES = 3
# Shares of all that checkpointing every block would save.
_SHARES = (0.25, 0.5, 0.75)


class BlockCost(NamedTuple):
    """What checkpointing a block saves and costs, for the samples it was measured with.

    Attributes:
        kept_bytes: Bytes that it keeps for the backward pass, besides its inputs and parameters.
        seconds: What its forward pass takes.
    """

    kept_bytes: int
    seconds: float


def measured(step: GradientStep, window: Window) -> list[BlockCost] | None:
    """Return the cost of each block, in the model's order; None where it cannot be measured.

    Args:
        step: What runs the model.
        window: Samples of the training.
    """
    modules, memory = step.objective.modules, step.memory
    blocks = all_blocks(modules)
    if len(blocks) < 2 or not window.samples:  # noqa: PLR2004 - one block leaves nothing to choose
        return None
    attributes = PlainAttributes(modules)
    if not attributes.can_be_put_back:
        return None
    found = [_Measured(block, memory) for block in blocks]
    mark = Savepoint(modules, memory.device)
    is_marked = False
    try:
        mark.take()
        is_marked = True
        _run(step, window, blocks, found)
    except Exception as error:
        if is_device_lost(error):
            raise
        let_go(error)  # the training itself will tell of it, if it concerns the training
        return None
    finally:
        if is_marked:
            mark.restore()
            attributes.put_back()
        step.memory.release()
    return _alike([one.cost for one in found], blocks)


def _run(step: GradientStep, window: Window, blocks: Sequence[nn.Module], found: Sequence[_Measured]) -> None:
    largest = window.largest()
    batch = step.transfer.place(copied(largest.cut(0, min(_SAMPLES, largest.samples))))
    with ExitStack() as changed:
        changed.enter_context(torch.no_grad())
        changed.enter_context(step.precision.autocast())
        for part in with_their_own(step.objective.modules):
            changed.enter_context(without_cache(part))
        for block, one in zip(blocks, found, strict=True):
            changed.enter_context(forward_replaced(block, one.run))
        for _ in range(_PASSES):
            for one in found:
                one.begin()
            for source in step.objective.sources:
                source.run(step.objective, batch)


def partial_levels(costs: Sequence[BlockCost] | None, count: int) -> list[str]:
    """Return names of blocks that save a quarter, half and three quarters of all, at the least cost in time.

    Args:
        costs: What each block saves and costs; None if unknown: they are then taken to be alike.
        count: Number of blocks.
    """
    known = costs if costs is not None and len(costs) == count else [BlockCost(1, 1.0)] * count
    order = sorted(range(count), key=lambda number: -known[number].kept_bytes / max(known[number].seconds, 1e-9))
    names, taken, saved = [], [], 0
    wanted = [share * sum(one.kept_bytes for one in known) for share in _SHARES]
    for number in order[:-1]:
        taken.append(number)
        saved += known[number].kept_bytes
        if saved and wanted and saved >= wanted[0]:
            wanted = [one for one in wanted if one > saved]
            names.append(name_of(taken))
    return names


class _Measured:
    """Runs a block with gradients, and measures what it keeps and takes.

    Args:
        block: The block.
        memory: The device.
    """

    def __init__(self, block: nn.Module, memory: MemoryBackend) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
        self._memory = memory
        self._passes: list[float] = []
        self._kept: dict[int, int] = {}

    def begin(self) -> None:
        """Begin a pass, in which the block may run several times."""
        self._passes.append(0.0)
        self._kept.clear()

    @property
    def cost(self) -> BlockCost:
        """What was found, without the first pass."""
        return BlockCost(sum(self._kept.values()), median(self._passes[1:]))

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the block in place of its forward."""
        given = set(self._own)
        args, kwargs = map_tensors(partial(_with_gradient, given), (args, kwargs))
        self._memory.synchronize()
        started = time.perf_counter()
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(partial(self._pack, given), _same):
            outputs = forward(*args, **kwargs)
        self._memory.synchronize()
        self._passes[-1] += time.perf_counter() - started
        return without_graphs(outputs)

    def _pack(self, given: set[int], tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            self._kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # see `offloading.py`


def _with_gradient(given: set[int], tensor: Tensor) -> Tensor:
    """Return an input as the block before would give it; note its storage."""
    if tensor.is_floating_point():
        tensor = tensor.detach().requires_grad_().clone()  # it may be changed in place, which no leaf may
    given.add(tensor.untyped_storage().data_ptr())
    return tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _alike(costs: Sequence[BlockCost], blocks: Sequence[nn.Module]) -> list[BlockCost]:
    """Return costs in which blocks of one class that keep as much take as long, so that noise gives no order."""
    groups: dict[tuple[type, int], list[float]] = defaultdict(list)
    for cost, block in zip(costs, blocks, strict=True):
        groups[type(block), cost.kept_bytes].append(cost.seconds)
    return [
        BlockCost(cost.kept_bytes, median(groups[type(block), cost.kept_bytes]))
        for cost, block in zip(costs, blocks, strict=True)
    ]
