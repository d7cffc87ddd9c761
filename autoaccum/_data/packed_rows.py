"""A split of sequences that are packed into one row, as by packing and padding-free training."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.splits import bounds_of
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ROWS, _POSITIONS = "input_ids", "position_ids"
# Where sequences begin, and the end of the last; the most tokens in one; the sequence of each token.
_BOUNDS, _LONGEST, _INDEX = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k"), "seq_idx"


class PackedRows:
    """Samples are the sequences packed into one row, as by packing and padding-free training.

        SFTTrainer = autoaccum.integrations.transformers.auto_accumulate(SFTTrainer, split=autoaccum.PackedRows())

    A batch is a mapping with `input_ids` (1, T), and `cu_seq_lens_q` (N + 1,) or `position_ids` (1, T) that begin anew
    with each sequence. Tensors of (1, T, ...) are cut with it; bounds and longest lengths are those of each part. No
    sequence is split, and attention between sequences is the model's business as before.
    """

    def __repr__(self) -> str:
        return "PackedRows()"

    def count(self, batch: Mapping[str, Any]) -> int:
        """Return the number of sequences.

        Raises:
            InvalidInputError: The batch is not a single row, or nothing in it says where sequences begin.
        """
        return len(_starts(batch)) - 1

    def cut(self, batch: Mapping[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Return consecutive sequences, one part for each size; tensors of tokens are views."""
        starts = _starts(batch)
        return [_part(batch, starts[begin : end + 1]) for begin, end in bounds_of(sizes)]

    def join(self, batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the sequences of parts in one row."""
        lengths = [end - start for batch in batches for start, end in itertools.pairwise(_starts(batch))]
        joined: dict[str, Any] = {}
        for key, value in batches[0].items():
            if key != _INDEX and _is_row(value, batches[0]):
                joined[key] = torch.cat([batch[key] for batch in batches], dim=1)
            else:
                joined[key] = _of_sequences(key, value, lengths)
        return joined


def _part(batch: Mapping[str, Any], starts: Sequence[int]) -> dict[str, Any]:
    lengths, kept = [end - start for start, end in itertools.pairwise(starts)], slice(starts[0], starts[-1])
    return {
        key: value[:, kept] if key != _INDEX and _is_row(value, batch) else _of_sequences(key, value, lengths)
        for key, value in batch.items()
    }


def _of_sequences(key: str, value: Any, lengths: Sequence[int]) -> Any:
    """Return what a batch of sequences of these lengths has in place of a value that is not one of each token."""
    if key in _BOUNDS:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=value.dtype, device=value.device)
    if key in _LONGEST:
        longest = max(lengths)
        return torch.full_like(value, longest) if isinstance(value, Tensor) else longest
    if key == _INDEX:
        numbers = torch.arange(len(lengths), dtype=value.dtype, device=value.device)
        return numbers.repeat_interleave(torch.tensor(lengths, device=value.device))[None]
    return value


def _is_row(value: Any, batch: Mapping[str, Any]) -> bool:
    """Whether a value holds something for each token of the row."""
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == batch[_ROWS].shape


def _starts(batch: Any) -> list[int]:
    """Return where each sequence begins, and the end of the last."""
    row = batch.get(_ROWS) if hasattr(batch, "get") else None
    if not isinstance(row, Tensor) or row.dim() < 2 or len(row) != 1:  # noqa: PLR2004 - (1, T)
        found = tuple(row.shape) if isinstance(row, Tensor) else f"a {type(row if row is not None else batch).__name__}"
        raise InvalidInputError(
            f"split=PackedRows() splits one row of packed sequences, {_ROWS} of shape (1, T), and found {found}; leave "
            "split= out for batches with a row for each sample"
        )
    bounds, positions = batch.get(_BOUNDS[0]), batch.get(_POSITIONS)
    if isinstance(bounds, Tensor):
        return [int(one) for one in bounds.tolist()]
    if not isinstance(positions, Tensor):
        raise InvalidInputError(
            f"nothing says where the sequences of a packed row begin: let the collator return {_POSITIONS} or "
            f"{_BOUNDS[0]} with it"
        )
    # A sequence begins where positions do not go on; so does padding, which counts as one of no labels.
    begins = (positions[0, 1:] <= positions[0, :-1]).nonzero().flatten() + 1
    return [0, *begins.tolist(), row.shape[1]]
