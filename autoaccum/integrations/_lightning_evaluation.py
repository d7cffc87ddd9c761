"""Runs the evaluation step of a Lightning module on parts of a batch where all of it runs out of memory."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from autoaccum._data.batches import Window
from autoaccum._engine import devices
from autoaccum._engine.does_not_fit import refusal
from autoaccum._engine.savepoint import Savepoint
from autoaccum._engine.step_limit import StepLimit
from autoaccum._evaluation.parts_that_fit import PartsThatFit
from autoaccum._sizing.events import Events
from autoaccum._system.notices import Notices
from autoaccum._system.reason_file import writes_reason
from autoaccum.integrations._joined_parts import joined
from autoaccum.integrations._lightning_logs import HeldLogs

if TYPE_CHECKING:
    from autoaccum._engine.options import Options
    from autoaccum.integrations._lightning_logs import Logged

STEPS = ("validation_step", "test_step", "predict_step")


class Evaluating:
    """Takes the place of a strategy's `validation_step`, `test_step` and `predict_step`.

    Sizes are found by failure alone, kept from one evaluation to the next, and grow back; the training's are separate.

    Args:
        trainer: The trainer, with its module on its device.
        options: What the callback was made with.
    """

    def __init__(self, trainer: Any, options: Options) -> None:
        self._trainer = trainer
        self._module = module = trainer.lightning_module
        self._split = options.split
        self._logs = HeldLogs(trainer)
        device, notices = options.device, Notices()
        memory = devices.resolve(trainer.strategy.root_device if device is None else device, module, notices)
        self._limit = StepLimit(memory, options.limit_bytes(memory))
        remedies = ["lower precision", "smaller inputs"]
        self._events = Events(memory, options.callbacks, notices)
        self._parts = PartsThatFit(
            memory,
            Savepoint([module, self._logs.of_batch], memory.device),
            lambda said, sample: refusal(memory, f"{sample} does not fit in an evaluation", said, remedies),
            self._events.ran_out,
        )

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

        def one(cut: Any, size: int) -> tuple[Any, Logged, int]:
            # Not through DistributedDataParallel, which may make all ranks wait for one that is trying again.
            context = getattr(self._trainer.precision_plugin, f"{name.replace('validation', 'val')}_context")
            with self._logs.of_part(lambda: size) as logged, context():
                found = getattr(self._module, name)(cut, *further)
            return found, logged, size

        def step(cut: Any, size: int) -> list[tuple[Any, Logged, int]]:
            if size == 1 or not any(map(self._logs.is_unclear, before)):
                done = one(cut, size)
                before.append(done[1])
                return [done]
            # A part of another size, which tells.
            window, half = Window([cut], self._split), size // 2
            return [one(window.cut(0, half), half), one(window.cut(half, size), size - half)]

        before: list[Logged] = []
        self._events.windows = self._trainer.global_step
        with self._limit.in_force(), self._logs.of(name, *further[1:]):
            done, *_ = self._parts.of_batch(batch, self._split, step)
        outputs, logged, sizes = zip(*chain.from_iterable(done), strict=True)
        self._logs.log(logged, sizes)
        return joined(outputs, sizes)
