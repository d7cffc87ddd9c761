"""Takes the memory of a device at a chosen moment of a step, so that its own allocator fails there."""

from __future__ import annotations

import torch

import autoaccum

MOMENTS = ("forward", "backward", "reserve", "optimizer")


class Hog(autoaccum.Callback):
    """Takes all free memory under the limit at one moment of one window, and frees it after memory ran out.

    Args:
        memory: The backend, with a limit in force.
        moment: One of `MOMENTS`; in forward and backward that of the second micro-batch, so that a part of the window
            is complete.
        window: The window, counted from 0.
        keeps: Whether it never frees the memory.

    Attributes:
        phases: The phase each time that memory ran out.
        taken_bytes: The bytes it took.
    """

    def __init__(self, memory, moment, window, *, keeps=False):
        self._memory, self._moment, self._window, self._keeps = memory, moment, window, keeps
        self._blocks = []
        self._passes = 0
        self._armed = True
        self.phases = []
        self.taken_bytes = 0
        self.now = 0  # the current window, updated by the training loop

    def hang_on(self, model, runner):
        """Attach to the model and the runner, to act at the moment."""
        if self._moment == "forward":
            model.body.register_forward_pre_hook(lambda *_: self._take_if(self._second_pass()))
        elif self._moment == "backward":
            model.body.register_forward_hook(self._watch_backward)
        elif self._moment == "optimizer":
            runner.optimizer.register_step_pre_hook(lambda *_: self._take_if(self._is_time()))
        else:
            self._before_updates(runner._step.updates)

    def take(self):
        """Take everything, in ever smaller blocks."""
        self._armed = False
        device = self._memory.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        least = 2**20 if device.type == "cuda" else 2**8
        block = self._memory.reading().free_bytes
        while block >= least:
            try:
                self._blocks.append(torch.empty(block, dtype=torch.uint8, device=device))
                self.taken_bytes += block
            except torch.OutOfMemoryError:
                block //= 2  # to also take free memory inside the allocator's segments

    def give(self):
        """Free everything."""
        self._blocks.clear()

    def on_oom(self, event, *, step):  # noqa: ARG002 - as the base has it
        """Record the phase, and free the memory."""
        self.phases.append(event.phase)
        if not self._keeps:
            self.give()

    def _take_if(self, due):
        if due:
            self.take()

    def _before_updates(self, updates):
        make = updates.make

        def take_and_make(*arguments):
            self._take_if(self._is_time())
            return make(*arguments)

        updates.make = take_and_make

    def _watch_backward(self, module, inputs, outputs):  # noqa: ARG002 - torch's hook
        if outputs.requires_grad and self._second_pass():
            outputs.register_hook(self._begin_backward)

    def _begin_backward(self, gradient):
        self.take()
        return gradient

    def _second_pass(self):
        if not self._is_time():
            return False
        self._passes += 1
        return self._passes == 2

    def _is_time(self):
        return self._armed and self.now == self._window
