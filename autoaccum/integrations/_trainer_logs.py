"""The metrics that TRL's trainers keep within `compute_loss`: of micro-batches that count, as with accumulation.

`compute_loss` also runs on a few samples that the loss is checked on, and again after memory has run out.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autoaccum._system.attributes import replaced
from autoaccum.integrations._refusals import refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# What one call of `compute_loss` has added to metrics, by mode and name; to the counter of tokens, its difference.
Held = dict[tuple[str, str], list[Any]]

_REFUSED = refusal(
    "Trainer.log within compute_loss",
    "return the numbers beside the loss, as {'loss': loss, 'right': (sum, weight)}, and log "
    "self.autoaccum.last_backward.losses in training_step, after super().training_step(...)",
)
# Attributes of TRL's trainers: lists of numbers by mode and name; and a counter of tokens, which is also logged. No
# public way tells which calls of `compute_loss` count; the tests run with TRL's oldest and newest versions.
_METRICS, _COUNTER, _COUNTED = "_metrics", "_total_train_tokens", "num_tokens"
# Calls of an accelerator that wait for other ranks, which need not have as many micro-batches.
_EXCHANGES = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


@contextmanager
def held_logs(trainer: Any) -> Iterator[Held]:
    """Hold back what a trainer logs in the block, in which values are those of this rank alone."""
    held: Held = {}
    before = {name: vars(trainer)[name] for name in (_METRICS, _COUNTER) if name in vars(trainer)}
    exchanges = _EXCHANGES if trainer.accelerator.num_processes > 1 else ()
    if _METRICS in before:
        trainer._metrics = defaultdict(lambda: defaultdict(list))
    try:
        with replaced((trainer, "log", _REFUSED), *((trainer.accelerator, name, _own) for name in exchanges)):
            yield held
        for mode, metrics in trainer._metrics.items() if _METRICS in before else ():
            held |= {(mode, key): values for key, values in metrics.items()}
            if _COUNTED in metrics:
                held[mode, _COUNTED] = [getattr(trainer, _COUNTER) - before[_COUNTER]]
    finally:
        vars(trainer).update(before)


def log_held(trainer: Any, values: Sequence[Held]) -> None:
    """Log what was held back of this rank's micro-batches that count, with the metrics of all ranks on each."""
    if _METRICS not in vars(trainer):
        return
    if trainer.accelerator.num_processes > 1:
        from accelerate.utils import gather_object  # noqa: PLC0415 - only where there are ranks

        values = gather_object([*values])
    for (mode, key), numbers in [item for each in values for item in each.items()]:
        if key == _COUNTED:
            trainer._total_train_tokens += sum(numbers)
            trainer._metrics[mode][key] = [trainer._total_train_tokens]
        else:
            trainer._metrics[mode][key] += numbers


def _own(value: Any, *_args: object, **_options: object) -> Any:
    return value
