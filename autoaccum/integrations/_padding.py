"""Cuts off the padding that a micro-batch has only because a longer row was in the same batch.

How long rows are is read once for each batch of the loader, since reading it waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

IGNORE_INDEX = -100
# What is added to a batch: the length of each row, and of its labels where those are another sequence.
_LENGTHS, _LABEL_LENGTHS = "autoaccum_lengths", "autoaccum_label_lengths"
_ADDED = (_LENGTHS, _LABEL_LENGTHS)
_MASK, _LABELS = "attention_mask", "labels"
_ROWS_AND_COLUMNS = 2


def with_lengths(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with the lengths of its rows; unchanged if they are not known, or no row is padded to the right.

    Args:
        inputs: A batch, with `attention_mask` of shape (N, T), and perhaps `labels` of shape (N, T), or (N, S) for a
            decoder.
    """
    batch = dict(inputs)
    mask, labels = inputs.get(_MASK), inputs.get(_LABELS)
    if not _is_table(mask):
        return batch
    counted: Tensor = mask != 0
    if _is_table(labels):
        has_target = labels != IGNORE_INDEX
        if labels.shape == mask.shape and "decoder_input_ids" not in inputs:
            counted = counted | has_target
        else:
            _add(batch, _LABEL_LENGTHS, has_target)
    _add(batch, _LENGTHS, counted)
    return batch


def without_lengths(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch as it was, with all its padding."""
    return {key: value for key, value in batch.items() if key not in _ADDED}


def is_padded(batch: Mapping[str, Any]) -> bool:
    """Whether the lengths of a batch's rows are known, and one of them is shorter than the batch."""
    return any(key in batch for key in _ADDED)


def trimmed(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a micro-batch without its lengths, cut to its own longest row.

    Tensors of shape (N, T, ...) are cut; if one has T along another dimension (a mask of shape (N, 1, T, T)), nothing
    is.
    """
    inputs = without_lengths(batch)
    if (lengths := batch.get(_LENGTHS)) is not None:
        inputs = _cut(inputs, inputs[_MASK].shape[1], max(lengths))
    if (lengths := batch.get(_LABEL_LENGTHS)) is not None:
        inputs = _cut(inputs, inputs[_LABELS].shape[1], max(lengths), only=["labels", "decoder_"])
    return inputs


def shortest_row(batch: Mapping[str, Any]) -> int:
    """Return the index of the row with the most padding."""
    lengths = [batch[key] for key in _ADDED if key in batch]
    together = [sum(of_row) for of_row in zip(*lengths, strict=True)]
    return together.index(min(together))


def _is_table(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == _ROWS_AND_COLUMNS and value.shape[1] > 0


def _add(batch: dict[str, Any], key: str, counted: Tensor) -> None:
    columns = torch.arange(1, counted.shape[1] + 1, device=counted.device)
    lengths = (counted * columns).amax(dim=1).clamp(min=1).tolist()
    if min(lengths, default=counted.shape[1]) < counted.shape[1]:
        batch[key] = lengths


def _cut(inputs: dict[str, Any], length: int, keep: int, only: list[str] | None = None) -> dict[str, Any]:
    if keep >= length:
        return inputs
    rows = len(inputs[_MASK])
    cut = {}
    for key, value in inputs.items():
        if not isinstance(value, Tensor) or (only is not None and not key.startswith(tuple(only))):
            continue
        if value.dim() > 1 and value.shape[:2] == (rows, length):
            cut[key] = value[:, :keep].contiguous()  # models view what they are given
        if length in value.shape[2:]:
            return inputs
    return inputs | cut
