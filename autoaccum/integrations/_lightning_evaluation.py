"""Runs the evaluation step of a Lightning module on parts of a batch where all of it runs out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._data.batches import Window
from autoaccum._engine import devices
from autoaccum._engine.does_not_fit import abridged, sample_of
from autoaccum._engine.events import Events
from autoaccum._engine.savepoint import Savepoint
from autoaccum._engine.step_limit import Outside, StepLimit
from autoaccum._oom import first_line, is_device_lost, is_oom, is_too_large, let_go
from autoaccum._records import MemoryEvent
from autoaccum._sizing.planner import shrink
from autoaccum._system.notices import Notices
from autoaccum.errors import DoesNotFitError
from autoaccum.integrations._held_logs import HeldLogs
from autoaccum.integrations._joined_parts import Weights, joined

if TYPE_CHECKING:
    from autoaccum._engine.options import Options
    from autoaccum._loss.objective import Objective

# A step's name, and the loader's number where there are several.
_Key = tuple[str, tuple[Any, ...]]
# What a step returned, and what it logged.
_Done = tuple[Any, Any]
# Each with the precision plugin's context for it.
STEPS = {
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


class Evaluating:
    """Takes the place of a strategy's `validation_step`, `test_step` and `predict_step`.

    Sizes are found by failure alone, kept from one evaluation to the next, and separate from the training's.

    Args:
        trainer: The trainer, with its module on its device.
        module: Its module.
        options: What the callback was made with.

    Attributes:
        objective: How the training's loss is weighted, once that is known.
    """

    def __init__(self, trainer: Any, module: Any, options: Options) -> None:
        self._trainer = trainer
        self._module = module
        self._split = options.split
        device, notices = options.device, options.notices or Notices()
        self._memory = devices.resolve(trainer.strategy.root_device if device is None else device, module, notices)
        self._limit = StepLimit(self._memory, options.limit_bytes(self._memory))
        self._events = Events([Outside(callback, self._memory) for callback in options.callbacks], notices)
        self._mark = Savepoint([module], self._memory.device)
        self._sizes: dict[_Key, int] = {}
        self.objective: Objective | None = None

    def run(self, name: str, batch: Any, *further: Any) -> Any:
        """Return what the module's step returns for a batch.

        Args:
            name: Name of the step.
            batch: The batch.
            further: What the step gets besides, the batch's number first.

        Raises:
            DoesNotFitError: Not even one sample fits.
        """
        logs = HeldLogs(self._trainer)
        with self._limit.in_force(), logs.holding():
            done, weights = self._parts((name, further[1:]), logs, batch, further)
        logs.log([logged for _, logged in done], None, weights)
        return joined([output for output, _ in done], weights)

    def _parts(self, key: _Key, logs: HeldLogs, batch: Any, further: Any) -> tuple[list[_Done], Weights]:
        """Return what the step returned and logged for each part, and what the parts weigh."""
        failed = None
        if key not in self._sizes:
            # A batch that fits need not be one that can be cut.
            found = self._try(key[0], logs, batch, None, further)
            if not isinstance(found, MemoryEvent):
                return [found], Weights([1], None, None)
            failed = found
        window = Window([batch], self._split)
        if failed is not None:
            self._shrink(key, window, 0, window.samples, failed)
        done: list[_Done] = []
        sizes: list[int] = []
        while (start := sum(sizes)) < window.samples:
            size = min(self._sizes[key], window.samples - start)
            found = self._try(key[0], logs, window.cut(start, start + size), size, further)
            if isinstance(found, MemoryEvent):
                self._shrink(key, window, start, size, found)
            else:
                done.append(found)
                sizes.append(size)
        return done, Weights(sizes, window, self.objective)

    def _shrink(self, key: _Key, window: Window, start: int, size: int, event: MemoryEvent) -> None:
        smaller = shrink(window.samples, size)
        if smaller is None:
            raise DoesNotFitError(
                f"{sample_of(window, start)} does not fit on {self._memory.name} in {key[0]} "
                f"({abridged(event.message)}); evaluate in lower precision, or on smaller inputs"
            )
        self._sizes[key] = smaller

    def _try(self, name: str, logs: HeldLogs, batch: Any, size: int | None, further: Any) -> _Done | MemoryEvent:
        """Run a step on some samples; if memory runs out, restore everything and return what happened."""
        is_marked = False
        try:
            self._mark.take()
            is_marked = True
            logged = logs.begin_part()
            # Not through DistributedDataParallel, which may make all ranks wait for one that is trying again.
            with getattr(self._trainer.precision_plugin, STEPS[name])():
                return getattr(self._module, name)(batch, *further), logged
        except Exception as error:
            if is_device_lost(error) or not (is_oom(error) or is_too_large(error)):
                raise
            event = MemoryEvent("evaluate", size, first_line(error))
            let_go(error)
        # The handler has ended: inside it the traceback would still pin the activations.
        if is_marked:
            self._mark.restore()
        self._memory.release()
        self._events.windows = self._trainer.global_step
        self._events.ran_out(event)
        return event
