"""What PyTorch's CPU allocator really hands out, by the profiler's memory events."""

from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

from autoaccum import Simulated
from autoaccum._data.batches import count  # one micro-batch, without a window around it
from autoaccum._data.pieces import NestedPiece as Piece  # one micro-batch, without a window around it
from autoaccum._engine.gradients import PartResult  # one micro-batch, without a window around it
from autoaccum._loss.known_shares import SingleMicroBatch  # one micro-batch, without a window around it
from support.training.steps import training_step


def changes(function):
    """Bytes that come (+) and go (-) while a function runs, in order, and what it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = function()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())], result


def highest(sizes):
    return max(accumulate(sizes), default=0)


def real_peak(model, batch, *, loss=None, optimizer=None, precision="fp32"):
    """Peak bytes of a training step in the middle of training: what is held before it, and what its operators take."""
    step = training_step(model, loss, optimizer, memory=Simulated(2**60), precision=precision)
    samples = count(batch)

    def once():
        step.accumulate(batch, samples, SingleMicroBatch(step.objective.knowledge), PartResult(samples))
        step.optimizer.step()

    once()
    held = [
        *step.parameters,
        *(buffer for module in step.objective.modules for buffer in module.buffers()),
        *(parameter.grad for parameter in step.parameters if parameter.grad is not None),
        *(value for state in step.optimizer.state.values() for value in state.values() if torch.is_tensor(value)),
        *Piece(batch).tensors(),
    ]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held}
    return sum(storages.values()) + highest(changes(once)[0])
