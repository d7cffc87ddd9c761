"""Regroups a loader's batches into windows of about so many tokens, each of whole samples.

A sample has as many tokens as it has labels that are not -100, where it has one for each token; without such labels, as
many as its attention mask keeps; without a mask, as its largest tensor has elements, padding included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._arguments import check_positive_int, shown
from autoaccum._data.batches import Window
from autoaccum._data.pieces import NestedPiece, Span
from autoaccum._data.sample_sizes import elements_of
from autoaccum._data.splits import piece_of
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._data.pieces import Piece, Split

# The names of Transformers' collators, and what does not count in them.
_COUNTED = {"labels": -100, "attention_mask": 0}
_PAIR = 2


def tokens_of(piece: Piece) -> list[int]:
    """Return the tokens of each sample in a batch, or in a list of samples.

    Raises:
        InvalidInputError: The batch is neither tensors nor a list of samples.
    """
    if isinstance(piece, NestedPiece):
        entries = _counted_in(piece.batch)
        for leaf, void in entries:
            columns = piece.by_sample(leaf)
            if columns is not None and columns.dim() > 1:
                counts: list[int] = (columns != void).flatten(1).sum(1).tolist()
                return counts
        largest = max((leaf.numel() for leaf in piece.tensors()), default=0)
        return [largest // max(piece.samples, 1)] * piece.samples
    if isinstance(piece.batch, list | tuple) and len(piece.batch) == piece.samples:
        return list(map(_of_sample, piece.batch))
    raise InvalidInputError(
        f"target_tokens= cannot tell the tokens of each sample in a {type(piece.batch).__name__}; have the loader "
        "yield tensors, or lists of samples (collate_fn=list, split=autoaccum.ListOfSamples(collate))"
    )


def check_target(target_batch: int | None, target_tokens: int | None) -> None:
    """Check the target of an update.

    Raises:
        InvalidInputError: There is no target, there are two, or it is not valid.
    """
    if target_tokens is None and target_batch is None:
        raise InvalidInputError(
            "there is no target: pass target_batch=, the samples of an update, or target_tokens=, its tokens"
        )
    if target_tokens is not None and target_batch is not None:
        raise InvalidInputError(
            f"target_batch={shown(target_batch)} and target_tokens={shown(target_tokens)} are two targets of one "
            "update; pass one of them"
        )
    if target_tokens is not None:
        check_positive_int("target_tokens", target_tokens)
    else:
        check_positive_int("target_batch", target_batch)


def stream_of_tokens(
    batches: Iterable[Any], target: int, *, drop_last: bool = False, skip: int = 0, split: Split | None = None
) -> Iterator[Window]:
    """Regroup batches into windows of as many whole samples as come nearest to a target of tokens.

    Args:
        batches: A loader's batches. If they have a method `put_back`, it is given a batch of which no sample was used.
        target: Tokens per window.
        drop_last: As for `fit`: whether to leave out a last window that ends before its target.
        skip: As for `stream`.
        split: As for `fit`, already checked.
    """
    waiting = batches if hasattr(batches, "put_back") else _PutBack(batches)
    spans: list[Span] = []
    held = 0
    for batch in waiting:
        piece = piece_of(batch, split)
        start = at = skip
        counts, skip = tokens_of(piece), 0
        while at < piece.samples:
            further = held + counts[at]
            # The window ends before a sample that would take it farther from its target than it is.
            if held and further - target > target - held:
                if at > start:
                    spans.append(Span(piece, start, at))
                if at == 0:
                    waiting.put_back(batch)
                yield Window.of_spans(spans, split)
                spans, held, start = [], 0, at
                if at == 0:
                    break
                continue
            held, at = further, at + 1
            if held >= target:
                spans.append(Span(piece, start, at))
                yield Window.of_spans(spans, split)
                spans, held, start = [], 0, at
        else:
            if at > start:
                spans.append(Span(piece, start, at))
    if spans and held and not drop_last:  # samples of which no token counts add nothing
        yield Window.of_spans(spans, split)


class _PutBack:
    """An iterable that takes the last batch back, and yields it once more."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = iter(batches)
        self._returned: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._returned.pop() if self._returned else next(self._batches)

    def put_back(self, batch: Any) -> None:
        """Yield a batch once more."""
        self._returned.append(batch)


def _counted_in(batch: Any) -> Iterator[tuple[Tensor, int]]:
    """Yield the labels and masks in a batch, by their names or as the targets of a pair, and what does not count."""
    parts = batch if isinstance(batch, list | tuple) else (batch,)
    for name, void in _COUNTED.items():
        found = [part.get(name) for part in parts if isinstance(part, Mapping)]
        if name == "labels" and isinstance(batch, list | tuple) and len(batch) == _PAIR:
            found.append(batch[1])
        for one in found:
            if isinstance(one, Tensor) and (name != "labels" or not one.is_floating_point()):
                yield one, void


def _of_sample(sample: Any) -> int:
    for name, void in _COUNTED.items() if isinstance(sample, Mapping) else ():
        if name in sample:
            values = torch.as_tensor(sample[name])
            if values.dim():
                return int((values != void).sum())
    return elements_of(sample)
