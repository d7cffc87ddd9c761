"""What a trainer logs within `compute_loss`, as TRL's do: of micro-batches that count, as with its own accumulation.

`compute_loss` also runs on a few samples that the loss is checked on, and again after memory has run out.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Attributes of TRL's trainers: lists of numbers by mode and name; and a counter of tokens, which is also logged. No
# public way tells which calls of `compute_loss` count; the tests run with TRL's oldest and newest versions.
_METRICS, _COUNTER, _COUNTED = "_metrics", "_total_train_tokens", "num_tokens"
# Calls of an accelerator that wait for other ranks, which need not have as many micro-batches.
_EXCHANGES = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


@dataclass(slots=True)
class Held:
    """What one call of `compute_loss` has logged.

    Attributes:
        values: The numbers appended, by mode and name; of the counter of tokens, what was added to it.
        calls: The arguments of calls of `Trainer.log`.
    """

    values: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


@contextmanager
def held_logs(trainer: Any) -> Iterator[Held]:
    """Hold back what a trainer logs in the block, in which values are those of this rank alone."""
    held = Held()
    before = {name: vars(trainer)[name] for name in (_METRICS, _COUNTER) if name in vars(trainer)}
    exchanges = _EXCHANGES if trainer.accelerator.num_processes > 1 else ()
    if _METRICS in before:
        trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer.log = lambda *args, **kwargs: held.calls.append((args, kwargs))
    for name in exchanges:
        setattr(trainer.accelerator, name, _own)
    try:
        yield held
        for mode, metrics in trainer._metrics.items() if _METRICS in before else ():
            held.values |= {(mode, key): values for key, values in metrics.items()}
            if _COUNTED in metrics:
                held.values[mode, _COUNTED] = [getattr(trainer, _COUNTER) - before[_COUNTER]]
    finally:
        del trainer.log
        for name in exchanges:
            delattr(trainer.accelerator, name)
        vars(trainer).update(before)


def log_held(trainer: Any, logs: Sequence[Held]) -> None:
    """Log what was held back of this rank's micro-batches that count, with the metrics of all ranks on each."""
    for args, kwargs in [call for held in logs for call in held.calls]:
        trainer.log(*args, **kwargs)
    if _METRICS not in vars(trainer):
        return
    values = [held.values for held in logs]
    if trainer.accelerator.num_processes > 1:
        from accelerate.utils import gather_object  # noqa: PLC0415 - only where there are ranks

        values = gather_object(values)
    for (mode, key), numbers in [item for each in values for item in each.items()]:
        if key == _COUNTED:
            trainer._total_train_tokens += sum(numbers)
            trainer._metrics[mode][key] = [trainer._total_train_tokens]
        else:
            trainer._metrics[mode][key] += numbers


def _own(value: Any, *_args: object, **_options: object) -> Any:
    return value
