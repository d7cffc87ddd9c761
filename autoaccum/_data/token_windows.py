"""Regroups a loader's batches into windows of about so many tokens, each of whole samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._arguments import check_function, check_positive_int, shown
from autoaccum._data.batches import Window
from autoaccum._data.by_length import CannotBeOrderedError, length_of
from autoaccum._data.padding import IGNORED, LABELS, MASK, check_lengths, checked_lengths, counting_labels, padding_of
from autoaccum._data.pieces import NestedPiece, Span
from autoaccum._data.splits import piece_of
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._data.padding import Lengths
    from autoaccum._data.pieces import Piece, Split

Tokens = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class TokenTarget:
    """How many tokens make a window, and how they are counted.

    Attributes:
        tokens: Tokens per window.
        counter: Returns the tokens of each sample in a batch; None to count labels, else what is no padding.
        lengths: As for `fit`.
    """

    tokens: int
    counter: Tokens | None = None
    lengths: Lengths | None = None

    def counts(self, piece: Piece) -> list[int]:
        """Return the tokens of each sample in a batch.

        Raises:
            InvalidInputError: Nothing tells them.
        """
        if self.counter is not None:
            return _checked(self.counter(piece.batch), piece.samples)
        counts = self._of_padded(piece) if isinstance(piece, NestedPiece) else self._of_list(piece)
        if counts is None:
            raise InvalidInputError(
                f"target_tokens={self.tokens} counts labels that are not {IGNORED}, or what an {MASK} or lengths= says "
                "is no padding, and a batch has none of these; pass tokens=, a function of a batch that returns the "
                "tokens of each sample"
            )
        return counts

    def _of_padded(self, piece: NestedPiece) -> list[int] | None:
        for labels in counting_labels(piece.batch):
            if len(labels) == piece.samples:
                counts: list[int] = (labels.detach() != IGNORED).flatten(1).sum(1).tolist()
                return counts
        padding = padding_of(piece, self.lengths)
        return None if padding is None else list(padding.lengths)

    def _of_list(self, piece: Piece) -> list[int] | None:
        samples = piece.batch
        if not isinstance(samples, list | tuple):
            return None
        counts = [_of_sample(sample) for sample in samples]
        if None not in counts:
            return [count for count in counts if count is not None]
        if self.lengths is None:
            try:
                return [length_of(sample) for sample in samples]
            except CannotBeOrderedError:
                return None
        found = [one[self.lengths] for one in samples] if isinstance(self.lengths, str) else self.lengths(samples)
        return checked_lengths(found, len(samples)).tolist()


def check_target(
    target_batch: int | None, target_tokens: int | None, tokens: Tokens | None, lengths: Lengths | None
) -> TokenTarget | None:
    """Return the target in tokens; None if it is in samples.

    Raises:
        InvalidInputError: There is no target, there are two, or an argument is not valid.
    """
    if target_tokens is None:
        if target_batch is None:
            raise InvalidInputError(
                "there is no target: pass target_batch=, the samples of an update, or target_tokens=, its tokens"
            )
        if tokens is not None:
            raise InvalidInputError("tokens= counts for target_tokens=, which is not given; pass both, or neither")
        return None
    if target_batch is not None:
        raise InvalidInputError(
            f"target_batch={shown(target_batch)} and target_tokens={shown(target_tokens)} are two targets of one "
            "update; pass one of them"
        )
    check_positive_int("target_tokens", target_tokens)
    if tokens is not None:
        check_function("tokens", tokens, "batch")
    check_lengths(lengths)
    return TokenTarget(target_tokens, tokens, lengths)


def stream_of_tokens(
    batches: Iterable[Any], target: TokenTarget, *, drop_last: bool = False, skip: int = 0, split: Split | None = None
) -> Iterator[Window]:
    """Regroup batches into windows of as many whole samples as come nearest to a target of tokens.

    Args:
        batches: A loader's batches. If they have a method `put_back`, it is given a batch of which no sample was used.
        target: The target.
        drop_last: As for `fit`: whether to leave out a last window that ends before its target.
        skip: As for `stream`.
        split: As for `fit`, already checked.

    Raises:
        InvalidInputError: Nothing tells the tokens of a sample.
    """
    waiting = batches if hasattr(batches, "put_back") else _PutBack(batches)
    spans: list[Span] = []
    held = 0
    for batch in waiting:
        piece = piece_of(batch, split)
        start = at = skip
        counts, skip = target.counts(piece), 0
        while at < piece.samples:
            further = held + counts[at]
            # The window ends before a sample that would take it farther from its target than it is.
            if held and further - target.tokens > target.tokens - held:
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
            if held >= target.tokens:
                spans.append(Span(piece, start, at))
                yield Window.of_spans(spans, split)
                spans, held, start = [], 0, at
        else:
            if at > start:
                spans.append(Span(piece, start, at))
    if spans and held and not drop_last:  # samples of which no token counts add nothing
        yield Window.of_spans(spans, split)


class _PutBack:
    """An iterable that takes the last batch back, and yields it once more.

    Args:
        batches: What it yields.
    """

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


def _of_sample(sample: Any) -> int | None:
    """Return the tokens of one sample of a list; None if it has neither labels nor a mask."""
    if not isinstance(sample, Mapping):
        return None
    for name, void in ((LABELS, IGNORED), (MASK, 0)):
        if name in sample:
            values = torch.as_tensor(sample[name])
            if values.dim():
                return int((values != void).sum())
    return None


def _checked(found: Any, samples: int) -> list[int]:
    """Return the tokens that a user's function gives.

    Raises:
        InvalidInputError: They are not one whole number from 0 for each sample.
    """
    try:
        counts = [int(one) for one in (found.tolist() if isinstance(found, Tensor) else found) if int(one) == one]
    except (TypeError, ValueError, OverflowError):
        counts = []
    if len(counts) != samples or any(one < 0 for one in counts):
        raise InvalidInputError(
            f"tokens= gave {shown(found)} for a batch of {samples} samples; return one whole number from 0 for each"
        )
    return counts
