"""Metrics that a trainer's `compute_loss` appends to, as TRL's do: one number for each batch, however it was cut.

`compute_loss` also runs on a few samples to see what the loss is a mean of, and again after memory has run out. So it
gets empty metrics for each call, and those of the calls that count are merged afterwards.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# Attributes of TRL's trainers: metrics by mode and name, each a list with one number for each call; and a counter.
_METRICS = ("_metrics", "_stored_metrics")
_COUNTER, _COUNTED = "_total_train_tokens", "num_tokens"
# Means over tokens; the others are means over samples.
_OF_TOKENS = re.compile(r"entropy|token|^logits/")
# Of preferences, some are means over the tokens of the chosen or of the rejected answers alone.
_OF_CHOSEN, _OF_REJECTED = ("logits/chosen", "mean_token_accuracy"), ("logits/rejected",)
_EXTREMES: dict[str, Callable[[Sequence[float]], float]] = {"min_": min, "max_": max}
# Calls of an accelerator that wait for other ranks, which need not have as many micro-batches.
_EXCHANGES = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")

_IGNORED = -100  # labels
_Key = tuple[str, str, str]


@dataclass(slots=True)
class Record:
    """What one call of `compute_loss` has appended.

    Attributes:
        samples: Samples of its micro-batch.
        tokens: Tokens that its metrics are means over: all, those of chosen answers, and those of rejected ones.
        values: The means of the numbers appended, by attribute, mode and name.
        counted: What was added to the counter of tokens.
    """

    samples: int
    tokens: tuple[int, int, int] = (0, 0, 0)
    values: dict[_Key, float] = field(default_factory=dict)
    counted: int = 0

    def weight(self, name: str) -> int:
        """Return what a metric of this call is a mean over."""
        if not _OF_TOKENS.search(name):
            return self.samples
        both, chosen, rejected = self.tokens
        return chosen if name in _OF_CHOSEN else rejected if name in _OF_REJECTED else both


class TrainerMetrics:
    """The metrics of one trainer.

    Args:
        trainer: A Transformers `Trainer`, whose class may keep metrics of its own.

    Attributes:
        is_kept: Whether it keeps any.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._kept = [name for name in _METRICS if isinstance(getattr(trainer, name, None), dict)]
        self.is_kept = bool(self._kept)
        self._is_one_of_several = trainer.accelerator.num_processes > 1

    @contextmanager
    def recorded(self, inputs: Mapping[str, Any], samples: int) -> Iterator[Record]:
        """Record what is appended within the block, and leave the trainer's own metrics as they are.

        Args:
            inputs: The micro-batch.
            samples: Its number of samples.

        Yields:
            The record, which is complete after the block.
        """
        trainer, record = self._trainer, Record(samples)
        if not self._kept:
            with self._alone():
                yield record
            return
        before = {name: getattr(trainer, name) for name in self._kept}
        counted_before = getattr(trainer, _COUNTER, 0)
        record.tokens = _tokens(inputs)
        for name in self._kept:
            setattr(trainer, name, defaultdict(lambda: defaultdict(list)))
        try:
            with self._alone():
                yield record
            record.counted = getattr(trainer, _COUNTER, 0) - counted_before
            record.values = {
                (name, mode, key): _mean(values)
                for name in self._kept
                for mode, metrics in getattr(trainer, name).items()
                for key, values in metrics.items()
                if values and key != _COUNTED
            }
        finally:
            for name, metrics in before.items():
                setattr(trainer, name, metrics)
            if hasattr(trainer, _COUNTER):
                setattr(trainer, _COUNTER, counted_before)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let the accelerator's exchanges return this rank's own values within the block."""
        accelerator = self._trainer.accelerator
        if not self._is_one_of_several:
            yield
            return
        for name in _EXCHANGES:
            setattr(accelerator, name, _own)
        try:
            yield
        finally:
            for name in _EXCHANGES:
                delattr(accelerator, name)

    def append(self, records: Sequence[Record], mode: str) -> None:
        """Append one number for each metric, from all micro-batches of a batch on all ranks.

        Args:
            records: Those of this rank's micro-batches.
            mode: "train" or "eval".
        """
        if not self._kept:
            return
        trainer = self._trainer
        if self._is_one_of_several:
            from accelerate.utils import gather_object  # noqa: PLC0415 - only where there are ranks

            records = gather_object(list(records))
        for attribute, own_mode, key in dict.fromkeys(key for record in records for key in record.values):
            of_key = [record for record in records if (attribute, own_mode, key) in record.values]
            merged = _merged(key, of_key, [record.values[attribute, own_mode, key] for record in of_key])
            getattr(trainer, attribute)[own_mode][key].append(merged)
        if hasattr(trainer, _COUNTER):
            total = getattr(trainer, _COUNTER) + sum(record.counted for record in records)
            setattr(trainer, _COUNTER, total)
            getattr(trainer, self._kept[0])[mode][_COUNTED] = [total]


def _own(value: Any, *_args: object, **_options: object) -> Any:
    return value


def _merged(key: str, records: Sequence[Record], values: Sequence[float]) -> float:
    for prefix, chosen in _EXTREMES.items():
        if key.startswith(prefix):
            return chosen(values)
    weights = [record.weight(key) for record in records]
    return sum(weight * value for weight, value in zip(weights, values, strict=True) if weight) / (sum(weights) or 1)


def _mean(values: Sequence[Any]) -> float:
    return sum(float(value) for value in values) / len(values)


def _tokens(inputs: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return how many tokens are trained: all, those of chosen answers, and those of rejected ones.

    In preferences, chosen answers are the first half of the rows; elsewhere, all count as chosen. Tokens are shifted.
    """
    mask = inputs.get("completion_mask")
    labels = inputs.get("labels")
    if isinstance(mask, Tensor):
        counts = mask[:, 1:] != 0
    elif isinstance(labels, Tensor) and labels.dim() > 1:
        counts = labels[:, 1:] != _IGNORED
    else:
        return 0, 0, 0
    both, half = int(counts.sum()), len(counts) // 2 if isinstance(mask, Tensor) else len(counts)
    chosen = int(counts[:half].sum())
    return both, chosen, both - chosen
