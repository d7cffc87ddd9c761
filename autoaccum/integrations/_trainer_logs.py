"""What a trainer logs within `compute_loss`, as TRL's do: of micro-batches that count, as with its own accumulation.

`compute_loss` also runs on a few samples to check what was read of the loss, and again after memory has run out.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Attributes of TRL's trainers: lists of numbers by mode and name; and a counter of tokens, which is also logged.
_METRICS = ("_metrics", "_stored_metrics")
_COUNTER, _COUNTED = "_total_train_tokens", "num_tokens"
# Calls of an accelerator that wait for other ranks, which need not have as many micro-batches.
_EXCHANGES = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


@dataclass(slots=True)
class Held:
    """What one call of `compute_loss` has logged.

    Attributes:
        values: The numbers appended, by attribute, mode and name.
        counted: What was added to the counter of tokens; None if it was not logged.
        calls: The arguments of calls of `Trainer.log`.
    """

    values: dict[tuple[str, str, str], list[Any]] = field(default_factory=dict)
    counted: int | None = None
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


class TrainerLogs:
    """Holds back what one trainer logs.

    Args:
        trainer: A Transformers `Trainer`, whose class may keep metrics of its own.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._kept = [name for name in _METRICS if isinstance(getattr(trainer, name, None), dict)]
        self._is_one_of_several = trainer.accelerator.num_processes > 1

    @contextmanager
    def held(self) -> Iterator[Held]:
        """Hold back what is logged in the block, in which values are those of this rank alone."""
        trainer, held = self._trainer, Held()
        before = {name: getattr(trainer, name) for name in (*self._kept, _COUNTER) if hasattr(trainer, name)}
        for name in self._kept:
            setattr(trainer, name, defaultdict(lambda: defaultdict(list)))
        trainer.log = lambda *args, **kwargs: held.calls.append((args, kwargs))
        exchanges = _EXCHANGES if self._is_one_of_several else ()
        for name in exchanges:
            setattr(trainer.accelerator, name, _own)
        try:
            yield held
            for name in self._kept:
                for mode, metrics in getattr(trainer, name).items():
                    if _COUNTED in metrics:
                        held.counted = getattr(trainer, _COUNTER, 0) - before.get(_COUNTER, 0)
                    held.values |= {(name, mode, key): values for key, values in metrics.items() if key != _COUNTED}
        finally:
            del trainer.log
            for name in exchanges:
                delattr(trainer.accelerator, name)
            for name, value in before.items():
                setattr(trainer, name, value)

    def append(self, logs: Sequence[Held], mode: str = "train") -> None:
        """Log what was held back, that of all ranks on each.

        Args:
            logs: Of this rank's micro-batches that count.
            mode: "train" or "eval".
        """
        trainer = self._trainer
        for args, kwargs in [call for held in logs for call in held.calls]:
            trainer.log(*args, **kwargs)
        if not self._kept:
            return
        told = [(held.values, held.counted) for held in logs]
        if self._is_one_of_several:
            from accelerate.utils import gather_object  # noqa: PLC0415 - only where there are ranks

            told = gather_object(told)
        for (name, own_mode, key), numbers in [item for values, _ in told for item in values.items()]:
            getattr(trainer, name)[own_mode][key] += numbers
        if counts := [counted for _, counted in told if counted is not None]:
            total = getattr(trainer, _COUNTER, 0) + sum(counts)
            setattr(trainer, _COUNTER, total)
            getattr(trainer, self._kept[0])[mode][_COUNTED] = [total]


def _own(value: Any, *_args: object, **_options: object) -> Any:
    return value
