"""Windows, the samples of one optimizer step each, and their cuts into micro-batches. Uses no device.

A batch is what a loader yields: a tensor, or arbitrarily nested tuples, lists, named tuples and mappings of tensors.
The first dimension of every tensor indexes the samples. Other sequences as long as the batch (a list of file names) are
cut with it; anything else (a temperature, a flag) is passed on whole. A `Split` says otherwise.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from autoaccum._arguments import shown
from autoaccum._data.nesting import holds_tensor, numbers_in, shapes_of
from autoaccum._data.pieces import NestedPiece, Span, flat_like
from autoaccum._data.splits import FIRST, Along, ByDefault, check_split, is_default, piece_of
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._data.pieces import Piece, Split


_VERSION, _DEVICE = attrgetter("_version"), attrgetter("device")
_PAIR = 2


class Window(Sequence[Any]):
    """The samples of one optimizer step, in the pieces that the loader yielded.

    As a sequence it contains the pieces as the model gets them. Pieces whose tensors differ in their trailing shape are
    never joined: a micro-batch ends where such a piece begins. Pieces of 0 samples are left out beside others.

    Args:
        batches: The pieces in order; each is one batch.
        split: Counts, cuts and joins them, as for `fit`.

    Attributes:
        samples: Samples in all pieces together.
        spans: The loader's batches that the samples come from, in order, each with which of its samples.
        split: As the argument; one for batches cut by their first dimension if none was given.
        used: How many samples of the batch that the loader yielded last this window and earlier ones have used; None if
            all of them.

    Raises:
        InvalidInputError: There are no pieces, or a piece cannot be cut.
    """

    spans: tuple[Span, ...]
    split: Split | None
    used: int | None = None
    kinds: Any = None  # which batches are like it; None if it is not known
    is_known_pair: bool = False  # whether it is a batch of inputs and targets, each a tensor, just like one before
    _origin: Window | None = None
    places: Sequence[int] | None = None  # of samples in another order than the loader's: their places in it

    def __init__(self, batches: Iterable[Any], split: Split | None = None) -> None:
        check_split(split)
        if not isinstance(batches, Iterable):
            raise InvalidInputError(f"batches={shown(batches)} cannot be iterated over; pass a list of batches")
        self._read(batches, split)

    def _read(self, batches: Iterable[Any], split: Split | None) -> None:
        split = ByDefault() if split is None else split
        pieces = [piece_of(batch, split) for batch in batches]
        if not pieces:
            raise InvalidInputError("a window needs at least one batch, got none")
        held = [piece for piece in pieces if piece.samples] or pieces
        self._set([Span(piece, 0, piece.samples) for piece in held], split)

    def _set(self, spans: Sequence[Span], split: Split | None) -> None:
        self.spans, self.split = tuple(spans), split
        self._starts = (0, *itertools.accumulate(span.samples for span in spans))
        self.samples = self._starts[-1]

    @classmethod
    def of_checked(cls, batches: Iterable[Any], split: Split | None) -> Window:
        """Return a window of batches, with a split that `check_split` has accepted: the check takes a while."""
        window = cls.__new__(cls)
        window._read(batches, split)
        return window

    @classmethod
    def of_spans(cls, spans: Sequence[Span], split: Split | None, used: int | None = None) -> Window:
        """Return a window of spans of pieces; none for a process that has no part of a window that others have."""
        window = Window.__new__(Window)
        window._set(spans, split)
        window.used = used
        return window

    @property
    def origin(self) -> Window:
        """The window that this one was made of."""
        return self if self._origin is None else self._origin

    def made_of(self, window: Window) -> Window:
        """Return this window, as one made of another."""
        if window is not self:
            self._origin = window.origin
        return self

    def hold(self, samples: Mapping[int, Any], split: Split) -> None:
        """Hold other samples of lists, given by their places in the loader's order, in place of its own."""
        used = self.used
        vars(self).clear()
        if samples:
            self._read([[samples[place] for place in sorted(samples)]], split)
        else:
            self._set((), None)
        self.used, self.places = used, sorted(samples)

    def plain_batch(self) -> Any:
        """The only batch, if all of it is here and it is a flat nesting of tensors that are cut along their rows."""
        if len(self.spans) != 1 or not self.spans[0].is_whole:
            return None
        piece = self.spans[0].piece
        return piece.batch if isinstance(piece, NestedPiece) and piece.is_flat else None

    def structure(self) -> Hashable:
        """The nesting, types and dimensions of its pieces, without their sizes."""
        return tuple(dict.fromkeys(span.piece.structure() for span in self.spans))

    def __len__(self) -> int:
        return len(self.spans)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        found = self.spans[index]
        return found.cut() if isinstance(found, Span) else [span.cut() for span in found]

    def __repr__(self) -> str:
        return f"Window({self.samples} samples in {len(self)} pieces)"

    @property
    def is_plain(self) -> bool:
        """Whether samples run along the first dimension of all tensors in all pieces."""
        return all(span.piece.is_plain for span in self.spans)

    @property
    def is_nested(self) -> bool:
        """Whether micro-batches have the nesting of the loader's batches; a split may make anything of those."""
        return self.split is None or isinstance(self.split, Along)

    def groups(self) -> list[int]:
        """Sizes of the consecutive groups of samples that can be joined into one batch."""
        return self._groups

    @cached_property
    def _groups(self) -> list[int]:
        sizes: list[int] = []
        before = None
        for span in self.spans:
            if before is not None and (span.piece is before or span.piece.joins(before)):
                sizes[-1] += span.samples
            else:
                sizes.append(span.samples)
            before = span.piece
        return sizes

    @cached_property
    def _seen(self) -> dict[tuple[int, int], Any]:
        return {}

    def widths(self) -> list[list[tuple[int, tuple[int, ...]]]]:
        """The widths of samples: for each of `groups`, how many in a row have which, as `Piece.widths` has them."""
        found: list[list[tuple[int, tuple[int, ...]]]] = []
        spans = iter(self.spans)
        for group in self.groups():
            runs: list[tuple[int, tuple[int, ...]]] = []
            left = group
            while left:
                span = next(spans)
                left -= span.samples
                alike = isinstance(span.piece, NestedPiece)
                for index in [span.start] if alike else range(span.start, span.stop):
                    widths, more = span.piece.widths(index), span.samples if alike else 1
                    if runs and runs[-1][1] == widths:
                        more += runs.pop()[0]
                    runs.append((more, widths))
            found.append(runs)
        return found

    def costs(self) -> list[int]:
        """The elements of a sample, for each of `groups`; of samples that are not alike, those of the widest."""
        return [max(sum(widths) for _, widths in runs) for runs in self.widths()]

    def named(self, index: int) -> str | None:
        """Return which sample of the window it is, for messages; None if all are alike, so that it is any."""
        if self.places is None and len(self.groups()) == 1:
            return None
        return f"sample {index if self.places is None else self.places[index]} of the window"

    def largest(self) -> Window:
        """Return the largest samples: the whole group of them that can be joined."""
        sizes, costs = self.groups(), self.costs()
        largest = max(range(len(sizes)), key=lambda group: (costs[group], sizes[group]))
        begin = sum(sizes[:largest])
        return self.part(begin, begin + sizes[largest])

    def cut(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` (exclusive) as one batch; they must lie within one group."""
        if (start, stop) in self._seen:
            return self._seen.pop((start, stop))
        if len(self.spans) == 1:
            only = self.spans[0]
            return only.piece.cut(only.start + start, only.start + stop)
        spans = self._between(start, stop)
        return spans[0].cut() if len(spans) == 1 else spans[0].piece.join(spans)

    def cuts(self, sizes: Sequence[int], start: int = 0) -> Iterator[Any]:
        """Return micro-batches of these sizes, from sample `start` on."""
        stops = list(itertools.accumulate(sizes, initial=start))
        return map(self.cut, stops, stops[1:])

    def peek(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` (exclusive) as `cut` does; the next `cut` of them returns the same object.

        For counting what is in a micro-batch before it is used: a collator may draw random numbers.
        """
        found = self.cut(start, stop)
        if not self.is_nested:
            self._seen[start, stop] = found
        return found

    def parts(self, start: int, stop: int) -> list[tuple[Any, int]]:
        """Return samples `start` to `stop` (exclusive) as unjoined batches, each with its number of samples."""
        return [(span.cut(), span.samples) for span in self._between(start, stop)]

    def _between(self, start: int, stop: int) -> list[Span]:
        spans = []
        for index in range(bisect_right(self._starts, start) - 1, len(self.spans)):
            begin, span = self._starts[index], self.spans[index]
            if begin >= stop:
                break
            offset = span.start - begin
            spans.append(Span(span.piece, max(start, begin) + offset, min(stop + offset, span.stop)))
        return spans

    def part(self, start: int, stop: int) -> Window:
        """Return samples `start` to `stop` (exclusive) as a window of their own."""
        spans = self._between(start, min(stop, self.samples)) if start < self.samples else []
        return Window.of_spans(spans, self.split)

    def chosen(self, indices: Iterable[int]) -> Window:
        """Return the samples at `indices`, in that order, as a window of their own."""
        return Window.of_spans([span for index in indices for span in self._between(index, index + 1)], self.split)

    def raw(self) -> list[Any]:
        """Return the samples as the loader would yield them, from which `Window(raw, split)` makes the window again."""
        return [span.piece.raw(span.start, span.stop) for span in self.spans]

    def each_sample(self) -> list[Any]:
        """Return the samples of lists of samples."""
        return [sample for part in self.raw() for sample in part]

    def each_width(self) -> list[int]:
        """Return how wide each sample is, in one number."""
        return [sum(widths) for runs in self.widths() for samples, widths in runs for _ in range(samples)]

    def weight(self, start: int, stop: int) -> float:
        """Return what the mean loss of samples `start` to `stop` (exclusive) runs over, by the split's `weight`."""
        return sum(span.piece.weight(span.start, span.stop) for span in self._between(start, stop))

    def is_on(self, device: torch.device) -> bool:
        """Whether every micro-batch is on a device already; of what a split makes, it is not known beforehand."""
        return self.is_nested and all(tensor.device == device for tensor in self.tensors())

    def joined(self) -> Any:
        """The window as one batch if its pieces can be joined and cut again by default, else the window itself."""
        can_be_cut = is_default(self.split) and self.is_plain
        return self.cut(0, self.samples) if can_be_cut and len(self.groups()) == 1 else self

    def holds_numbers(self) -> bool:
        """Whether any of the loader's batches holds a number beside its samples, such as `num_items_in_batch`."""
        return self.is_nested and any(numbers_in(piece.batch) for piece in self._pieces())

    def carries_numbers(self) -> bool:
        """Whether it holds a number of a loader's batch without being that batch."""
        is_whole = len(self.spans) == 1 and self.spans[0].is_whole
        return not is_whole and self.holds_numbers()

    def versions(self) -> list[int]:
        """How often each tensor was modified in place, including through views."""
        try:
            return list(map(_VERSION, self._tensors))
        except RuntimeError as error:
            if not any(tensor.is_inference() for tensor in self.tensors()):
                raise
            raise InvalidInputError(
                "a tensor of a batch was made within torch.inference_mode(), so autograd cannot use it; make it under "
                "torch.no_grad() instead, or pass tensor.clone()"
            ) from error

    def tensors(self) -> list[Tensor]:
        """Every tensor of every piece, once."""
        return self._tensors

    def data_bytes(self) -> int:
        """What the loader's batches of its pieces, and of the window that it was made of, keep in memory as a whole."""
        tensors = itertools.chain(self._tensors, () if self._origin is None else self._origin.tensors())
        storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    @cached_property
    def _tensors(self) -> list[Tensor]:
        return [tensor for piece in self._pieces() for tensor in piece.tensors()]

    def _pieces(self) -> Iterable[Piece]:
        """Return the pieces, each once: one may be there with each of its samples."""
        return {id(span.piece): span.piece for span in self.spans}.values()


class KnownWindow(Window):
    """A window of one batch of tensors that is just like one before, which is read only when it has to be.

    Args:
        batch: The batch.
        structure: The structure of the window before.
        kinds: The type of the batch, and what its tensors are like; one object for all such windows.
        split: That of the window before, which knows how lists are read.
    """

    def __init__(self, batch: Any, structure: Hashable, kinds: Any, split: Split | None) -> None:
        self._batch = batch
        self._structure = structure
        self.kinds, self.is_known_pair = kinds, type(batch) is not dict and len(batch) == _PAIR
        self._tensors = list(batch.values() if type(batch) is dict else batch)
        self.samples = len(self._tensors[0])
        self.split = split
        self._starts = (0, self.samples)

    @cached_property
    def spans(self) -> tuple[Span, ...]:  # type: ignore[override]
        """The batch, read."""
        piece = piece_of(self._batch, self.split)
        return (Span(piece, 0, piece.samples),)

    def plain_batch(self) -> Any:
        """The batch."""
        return self._batch

    def cuts(self, sizes: Sequence[int], start: int = 0) -> Iterator[Any]:
        """As for `Window`; all of it without reading it."""
        if start or sum(sizes) != self.samples:
            return super().cuts(sizes, start)
        parts = zip(*map(Tensor.split, self._tensors, itertools.repeat(sizes)), strict=True)
        return parts if type(self._batch) is tuple else map(flat_like, itertools.repeat(self._batch), parts)

    def is_on(self, device: torch.device) -> bool:
        """As for `Window`."""
        return set(map(_DEVICE, self._tensors)) == {device}

    def parts(self, start: int, stop: int) -> list[tuple[Any, int]]:
        """As for `Window`; all of it without reading it."""
        return [(self._batch, self.samples)] if stop - start == self.samples else super().parts(start, stop)

    def structure(self) -> Hashable:
        """That of the window which it is just like."""
        return self._structure


def as_window(given: Any, split: Split | None = None) -> Window:
    """Convert the argument of `Runner.step`: a `Window`, one batch, or a sequence of the loader's batches.

    A list whose items are batches is a sequence of them. Two of the same form could as well be the inputs and targets
    of one batch, so that case is rejected. With a split, anything but a `Window` of that split is one batch.

    Raises:
        InvalidInputError: The argument is ambiguous, or contains nothing that can be cut.
    """
    if not isinstance(given, Window):
        given = Window.of_checked(_batches_in(given) if is_default(split) else [given], split)
    elif not is_default(given.split) and given.split is not split:
        other = "no split" if is_default(split) else "another"
        raise InvalidInputError(
            f"the window was made with split={given.split!r}, and the Runner has {other}; pass the same to both"
        )
    window: Window = given
    if not window.samples:
        raise InvalidInputError("the window holds 0 samples, so no optimizer step is made; leave empty batches out")
    return window


def _batches_in(given: Any) -> Iterable[Any]:
    if isinstance(given, Iterator):
        return given
    if not isinstance(given, list) or not given or not all(map(_is_batch_itself, given)):
        return [given]
    if len(given) == _PAIR:
        first, second = (FIRST.piece(item) for item in given)
        if first.samples == second.samples and first.structure() != second.structure():
            return [given]
        if first.samples == second.samples:
            raise InvalidInputError(
                "a list of two batches of the same form may be two batches or the inputs and targets of one; pass "
                "autoaccum.Window([first, second]) for two batches, or a tuple (inputs, targets) for one"
            )
    return given


def _is_batch_itself(item: Any) -> bool:
    return isinstance(item, list | tuple | Mapping) and holds_tensor(item)


def count(batch: Any, split: Split | None = None) -> int:
    """Return the number of samples in a batch.

    Raises:
        InvalidInputError: It holds no tensor, tensors that differ in their first dimension, or something that cannot be
            cut.
    """
    return piece_of(batch, split).samples


def repeating(batch: Any, samples: int, split: Split | None = None) -> Window:
    """Return a window of `samples` samples that repeats those of `batch`, or of a window of one group, in order.

    Raises:
        InvalidInputError: There is no sample to repeat, or the batch cannot be cut.
    """
    window = batch if isinstance(batch, Window) else Window([batch], split)
    if not window.samples:
        raise InvalidInputError(f"a batch of 0 samples ({shapes_of(batch)}) has nothing to try; pass one with samples")
    whole, rest = divmod(samples, window.samples)
    return Window.of_spans([*window.spans * whole, *window.part(0, rest).spans], window.split)


def repeated(batch: Any, samples: int, split: Split | None = None) -> Any:
    """Return the micro-batch of `samples` samples that repeats those of `batch` in order.

    Raises:
        InvalidInputError: There is no sample to repeat, or the batch cannot be cut.
    """
    return repeating(batch, samples, split).cut(0, samples)
