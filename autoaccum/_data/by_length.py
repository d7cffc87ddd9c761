"""A window whose samples are in order of their length, so that micro-batches hold little padding.

The samples of a loader's padded batches are put together once, the longest first. Each micro-batch is trimmed of the
columns that are padding in all of its samples, and cut by what it holds with its padding rather than by samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._arguments import check_choice
from autoaccum._data.batches import Window
from autoaccum._data.nesting import paths_of
from autoaccum._data.padding import MASK, check_lengths, checked_lengths, fill_of, is_label, padding_of, width_of
from autoaccum._data.pieces import NestedPiece, Span, SplitPiece
from autoaccum._data.splits import is_default, piece_of
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from autoaccum._data.padding import Lengths, Padding


ORDERS = ("loader", "length")


class CannotBeOrderedError(ValueError):
    """The samples of a window cannot be put in order of their length; the message says why."""


class ByLength(Window):
    """The samples of a window, the longest first.

    Attributes:
        lengths: By sample, in this order: the columns that it needs.
        indices: By sample, in this order: its place in the loader's order.
        is_trimmed: Whether something told what is padding, so that micro-batches are trimmed.
    """

    lengths: tuple[int, ...]
    indices: tuple[int, ...]
    is_trimmed: bool
    _columns: tuple[int, ...]
    _is_left: bool
    _column_bytes: int

    @classmethod
    def of(cls, window: Window, lengths: Lengths | None = None) -> ByLength:
        """Put the samples of a window in order.

        Args:
            window: The window.
            lengths: As for `fit`.

        Raises:
            CannotBeOrderedError: Nothing tells the lengths, or the samples cannot be joined.
            InvalidInputError: `lengths` gives no lengths.
        """
        if isinstance(window, cls):
            return window
        if is_default(window.split):
            return cls._of_padded(window, lengths)
        if all(isinstance(span.piece, SplitPiece) for span in window.spans):
            return cls._of_lists(window, lengths)
        raise CannotBeOrderedError(f"split={window.split!r} cuts the batches otherwise than by samples and columns")

    @classmethod
    def _of_lists(cls, window: Window, lengths: Lengths | None) -> ByLength:
        """Order lists of samples, from which micro-batches are collated: the longest of each says its columns."""
        each: list[int] = []
        for span in window.spans:
            samples = span.piece.raw(span.start, span.stop)
            if lengths is None:
                each += [length_of(one) for one in samples]
            elif isinstance(lengths, str):
                each += [int(one[lengths]) for one in samples]
            else:
                each += checked_lengths(lengths(samples), span.samples).tolist()
        order = sorted(range(len(each)), key=each.__getitem__, reverse=True)
        made = cls.of_spans(window.chosen(order).spans, window.split)
        made._note(tuple(max(each[index], 1) for index in order), tuple(order), columns=(), is_left=False)
        return made

    @classmethod
    def _of_padded(cls, window: Window, lengths: Lengths | None) -> ByLength:
        if not window.is_plain or window.holds_counts():
            what = "a count of their own" if window.is_plain else "lists of samples"
            raise CannotBeOrderedError(f"the batches hold {what}")
        found = _Found(window, lengths)
        order = sorted(range(window.samples), key=found.lengths.__getitem__, reverse=True)
        piece = piece_of(found.joined(order), window.split, is_joined=True)
        made = cls.of_spans([Span(piece, 0, piece.samples)], window.split)
        in_order = tuple(found.lengths[index] for index in order)
        made._note(in_order, tuple(order), columns=found.columns, is_left=found.is_left)
        made.is_trimmed = found.is_told
        return made

    def _note(
        self, lengths: tuple[int, ...], indices: tuple[int, ...], *, columns: tuple[int, ...], is_left: bool
    ) -> None:
        self.lengths, self.indices, self._columns, self._is_left = lengths, indices, columns, is_left
        self.is_trimmed = True
        (first, *others) = self._spans
        # Of lists it is not known before they are collated; all that matters is that it is the same in every window.
        tensors = 0 if others else sum(tensor.nbytes for tensor in first.piece.tensors())
        self._column_bytes = max(tensors // self.samples // max(lengths), 1)

    def __repr__(self) -> str:
        return f"ByLength({self.samples} samples of {min(self.lengths)} to {max(self.lengths)} columns)"

    def groups(self) -> list[int]:
        """Sizes of the groups of samples that can be joined into one batch: all of them."""
        return [self.samples] if self.samples else []

    def sample_bytes(self) -> list[int]:
        """Bytes of the longest sample."""
        return [self._column_bytes * max(self.lengths)] if self.samples else []

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of a sample."""
        return self._column_bytes

    def costs(self) -> list[float]:
        """Bytes that each sample adds to a micro-batch that it begins, the most first.

        In another order than that of their lengths, all cost as much as the longest: where a micro-batch ends must not
        depend on the lengths that follow, or micro-batches would be no random parts of the window.
        """
        is_sorted = all(one >= other for one, other in itertools.pairwise(self.lengths))
        lengths = self.lengths if is_sorted else [max(self.lengths)] * self.samples
        return [length * self._column_bytes for length in lengths]

    def fits_any(self, sizes: Sequence[int]) -> int:
        """Return how many samples fit, whichever they are, if micro-batches of these sizes do: the fewest."""
        return min(sizes)

    def cut(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` (exclusive) as one batch, without columns that are padding in all."""
        if not self._columns:
            return super().cut(start, stop)
        if (start, stop) in self._seen:
            return self._seen.pop((start, stop))
        piece = self._spans[0].piece
        assert isinstance(piece, NestedPiece)
        width = max(self.lengths[start:stop])

        def trimmed(leaf: Tensor) -> Tensor:
            kept = leaf[:, leaf.shape[1] - width :] if self._is_left else leaf[:, :width]
            return kept.contiguous()  # models view their inputs

        return piece.changed(super().cut(start, stop), self._columns, trimmed)

    def chosen(self, indices: Iterable[int]) -> ByLength:
        """Return the samples at `indices`, in that order, as a window of their own."""
        indices = list(indices)
        return self._with(super().chosen(indices).spans, indices)

    def reordered(self, order: Tensor) -> ByLength:
        """Return the samples in another order, given by their indices."""
        indices = order.tolist()
        is_joined = is_default(self._split)
        return self._with(super().reordered(order).spans, indices) if is_joined else self.chosen(indices)

    def part(self, start: int, stop: int) -> ByLength:
        """Return samples `start` to `stop` (exclusive) as a window of their own."""
        return self._with(super().part(start, stop).spans, range(start, min(stop, self.samples)))

    def _with(self, spans: Sequence[Span], indices: Sequence[int]) -> ByLength:
        """Return a window of samples of this one, by their indices in it."""
        made = ByLength.of_spans(spans, self._split)
        made.lengths = tuple(self.lengths[index] for index in indices)
        made.indices = tuple(self.indices[index] for index in indices)
        for name in ("is_trimmed", "_columns", "_is_left", "_column_bytes"):
            setattr(made, name, getattr(self, name))
        return made

    def named(self, index: int) -> str:
        """Return a sample's place and length, for messages."""
        return f"sample {self.indices[index]} of the window, {self.lengths[index]:,} columns long"


def check_order(order: str, lengths: Lengths | None, *, in_tokens: bool = False) -> bool:
    """Return whether samples are taken by length.

    Raises:
        InvalidInputError: An argument is not valid, or has no effect.
    """
    check_choice("order", order, ORDERS)
    check_lengths(lengths)
    if lengths is not None and order != "length" and not in_tokens:
        raise InvalidInputError(
            "lengths= says how long samples are, and the loader's order does not ask; pass order='length' as well"
        )
    return order == "length" or in_tokens


class _Found:
    """What the batches of a window say of its samples' lengths.

    Args:
        window: The window.
        lengths: As for `fit`.

    Attributes:
        lengths: By sample, in the loader's order.
        columns: The indices of the leaves that have columns; empty if no micro-batch can be trimmed.
        is_left: Whether the padding is in front.
        is_told: Whether something told what is padding.
    """

    def __init__(self, window: Window, lengths: Lengths | None) -> None:
        self._window = window
        self._known: dict[int, Padding | None] = {}
        self._pieces: dict[int, NestedPiece] = {}
        for span in window.spans:
            if id(span.piece) not in self._known:
                assert isinstance(span.piece, NestedPiece)
                self._pieces[id(span.piece)] = span.piece
                self._known[id(span.piece)] = padding_of(span.piece, lengths)
        told = [padding for padding in self._known.values() if padding is not None]
        self.is_told = len(told) == len(self._known)
        if not self.is_told:
            self._untold()
            return
        self.columns = told[0].columns
        self.is_left = any(padding.is_left for padding in told)
        if any(padding.columns != self.columns for padding in told):
            raise CannotBeOrderedError("the same entries do not have the same columns in all batches")
        if self.is_left and any(not padding.is_left and min(padding.lengths) < padding.width for padding in told):
            raise CannotBeOrderedError("some batches are padded in front, and others behind")
        widest = max(max(padding.lengths) for padding in told)
        narrow = [padding for padding in told if padding.width < widest]
        if reason := next((padding.not_widened for padding in narrow if padding.not_widened), ""):
            raise CannotBeOrderedError(reason)
        if narrow and not self.is_left and any(padding.has_some_in_front for padding in told):
            # Behind, it would be where a model reads the last token; in front, it would move positions.
            raise CannotBeOrderedError(
                "batches of unlike width are padded in front, and have no position_ids; pad them behind "
                "(padding_side='right'), or add position_ids"
            )
        self.lengths = [
            padding.lengths[index]
            for span in window.spans
            if (padding := self._known[id(span.piece)]) is not None
            for index in range(span.start, span.stop)
        ]

    def _untold(self) -> None:
        """All columns count where labels give them, and nothing is trimmed."""
        widths = [width_of(piece) for piece in self._pieces.values()]
        if any(width is None for width in widths):
            raise CannotBeOrderedError(
                f"a batch has no {MASK} of shape (samples, columns), and lengths= is not given, so nothing tells how "
                "long its samples are; pass one of them"
            )
        self.columns, self.is_left = (), False
        self.lengths = [width_of(span.piece) or 1 for span in self._window.spans for _ in range(span.samples)]  # type: ignore[arg-type]

    def joined(self, order: Sequence[int]) -> Any:
        """Return all samples as one batch, in an order given by their indices in the loader's.

        Raises:
            CannotBeOrderedError: They cannot be joined.
        """
        spans = self._window.spans
        first = spans[0].piece
        assert isinstance(first, NestedPiece)
        if not all(piece.joins_but_for(first, self.columns) for piece in self._pieces.values()):
            raise CannotBeOrderedError("the batches differ in more than their padding")
        places = torch.empty(len(order), dtype=torch.int64)
        places[torch.tensor(order, dtype=torch.int64)] = torch.arange(len(order))
        starts = list(itertools.accumulate([span.samples for span in spans], initial=0))
        return first.join_columns(spans, [places[a:b] for a, b in itertools.pairwise(starts)], self._widened)

    def _widened(self, index: int, parts: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor | None:
        """Return the rows of a leaf at their places, as wide as the longest sample; None for a leaf without columns."""
        if index not in self.columns:
            return None
        width = max(self.lengths)
        fill = self._fill(index) if any(part.shape[1] < width for part in parts) else 0
        first = parts[0]
        joined = first.new_full((len(self.lengths), width, *first.shape[2:]), fill)
        for part, at in zip(parts, places, strict=True):
            kept = min(width, part.shape[1])
            rows = part[:, part.shape[1] - kept :] if self.is_left else part[:, :kept]
            where = at.to(joined.device)
            if self.is_left:
                joined[where, width - kept :] = rows
            else:
                joined[where, :kept] = rows
        return joined

    def _fill(self, index: int) -> float:
        masked = False
        for key, piece in self._pieces.items():
            padding = self._known[key]
            leaf = piece.leaves[index]
            assert padding is not None
            masked = masked or padding.told_by != "lengths="
            path = paths_of(piece.batch)[index]
            name = path[-1] if path else None
            fill = fill_of(leaf, name, padding, is_label=is_label(leaf, piece.batch))
            if fill is not None:
                return fill
        if masked:
            return 0  # the mask hides it
        raise CannotBeOrderedError("no sample shows what stands in the padding of batches that are padded further")


def length_of(sample: Any) -> int:
    """Return the length of a sample of a list: of itself, or of the first of its entries that has one.

    Raises:
        CannotBeOrderedError: It has none.
    """
    inside = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, tuple) else (sample,)
    for one in inside:
        if isinstance(one, Tensor):
            if one.dim():
                return int(one.shape[0])
        elif isinstance(one, Sized) and not isinstance(one, str | bytes):
            return len(one)
    raise CannotBeOrderedError("a sample has no length, and lengths= is not given")
