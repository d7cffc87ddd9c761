"""Runs the evaluation step of a Lightning module on parts of a batch where all of it runs out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._engine import devices
from autoaccum._engine.does_not_fit import refusal
from autoaccum._engine.events import Events
from autoaccum._engine.parts_that_fit import PartsThatFit
from autoaccum._engine.savepoint import Savepoint
from autoaccum._engine.step_limit import LimitLifted, StepLimit
from autoaccum._system.notices import Notices
from autoaccum._system.reason_file import writes_reason
from autoaccum.integrations._joined_parts import joined
from autoaccum.integrations._lightning_logs import HeldLogs

if TYPE_CHECKING:
    from autoaccum._engine.options import Options
    from autoaccum._records import MemoryEvent

# Each with the precision plugin's context for it.
STEPS = {
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


class Evaluating:
    """Takes the place of a strategy's `validation_step`, `test_step` and `predict_step`.

    Sizes are found by failure alone, kept from one evaluation to the next, and grow back; the training's are separate.

    Args:
        trainer: The trainer, with its module on its device.
        module: Its module.
        options: What the callback was made with.
    """

    def __init__(self, trainer: Any, module: Any, options: Options) -> None:
        self._trainer = trainer
        self._module = module
        self._split = options.split
        device, notices = options.device, options.notices or Notices()
        self._memory = devices.resolve(trainer.strategy.root_device if device is None else device, module, notices)
        self._limit = StepLimit(self._memory, options.limit_bytes(self._memory))
        self._events = Events([LimitLifted(callback, self._memory) for callback in options.callbacks], notices)
        self._parts: dict[tuple[str, tuple[Any, ...]], PartsThatFit] = {}

    @writes_reason
    def run(self, name: str, batch: Any, *further: Any) -> Any:
        """Return what the module's step returns for a batch.

        Args:
            name: Name of the step.
            batch: The batch.
            further: What the step gets besides, the batch's number first.

        Raises:
            DoesNotFitError: Not even one sample fits.
            InvalidInputError: Memory ran out, and the batch cannot be cut.
        """
        logs, parts = HeldLogs(self._trainer), self._parts_of(name, further[1:])

        def step(cut: Any, _: int) -> tuple[Any, Any]:
            logged = logs.begin_part()
            # Not through DistributedDataParallel, which may make all ranks wait for one that is trying again.
            with getattr(self._trainer.precision_plugin, STEPS[name])():
                return getattr(self._module, name)(cut, *further), logged

        with self._limit.in_force(), logs.holding():
            done, sizes, _ = parts.of_batch(batch, self._split, step)
        logs.log([logged for _, logged in done], sizes)
        return joined([output for output, _ in done], sizes)

    def _parts_of(self, name: str, loader: tuple[Any, ...]) -> PartsThatFit:
        """Return the parts of a step's batches; of each loader, by its number, where there are several."""
        if (name, loader) not in self._parts:
            memory, remedies = self._memory, ["lower precision", "smaller inputs"]
            self._parts[name, loader] = PartsThatFit(
                memory,
                Savepoint([self._module], memory.device),
                lambda said, sample: refusal(memory, f"{sample} does not fit in {name}", said, remedies),
                self._ran_out,
            )
        return self._parts[name, loader]

    def _ran_out(self, event: MemoryEvent) -> None:
        self._events.windows = self._trainer.global_step
        self._events.ran_out(event)
