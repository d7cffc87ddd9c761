"""Counts, cuts and joins the batches of a loader, one `Piece` each.

A `Piece` leaves it to a `Split` of the user's own. A `NestedPiece` cuts nested tensors along one dimension, by default
the first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from autoaccum._arguments import shown
from autoaccum._data.nesting import (
    elements_of,
    form_of,
    hides_tensors,
    holds_tensor,
    leaves_of,
    map_leaves,
    shapes_of,
    tensors_in,
)
from autoaccum._data.reading import Reading, refuse_flattened
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from autoaccum._data.nesting import Path

    # The dimension along which the samples of each tensor run: one for all, or nested like the batch; None for what all
    # samples share.
    Dims = int | None | Sequence["Dims"] | Mapping[Any, "Dims"]

_SHORTENED = 80
# A split counts the cost of samples in any unit, so that parts of one count, too.
_PARTS_OF_COST = 1_000_000


@runtime_checkable
class Split(Protocol):
    """Counts, cuts and joins batches whose samples do not run along the first dimension of every tensor.

    Pass an object with these three methods as `split=`. It may also have `weight(batch)`, which returns what the mean
    loss of a batch runs over (its tokens, its boxes): a number that adds up over parts; and `cost(batch)`, which
    returns how much memory one sample takes beside others, in any unit, where its elements do not tell.
    `autoaccum.Along` and `autoaccum.ListOfSamples` are ready-made.

    None of them may change a batch that it is given.
    """

    def count(self, batch: Any) -> int:
        """Return the number of samples in a batch of the loader."""

    def cut(self, batch: Any, sizes: Sequence[int]) -> Sequence[Any]:
        """Return consecutive parts of a batch, one for each size; the sizes are positive and sum to its samples."""

    def join(self, batches: Sequence[Any]) -> Any:
        """Return what the model gets for one or more parts, in order: the micro-batch."""


class Piece:
    """One batch of a loader, which a `Split` counts, cuts and joins.

    Attributes:
        batch: As the argument.
        samples: The number of samples in it.
        is_plain: Whether samples run along the first dimension of all its tensors.
    """

    is_plain = False

    def __init__(self, batch: Any, split: Split) -> None:
        self.batch = batch
        self._split = split
        samples = split.count(batch)
        if isinstance(samples, bool) or not isinstance(samples, int | np.integer) or samples < 0:
            raise InvalidInputError(
                f"split={self._called}: count(batch) returned {shown(samples)}; return the number of samples, an int"
            )
        self.samples = int(samples)

    @property
    def _called(self) -> str:
        return type(self._split).__name__

    def structure(self) -> Hashable:
        """What is the same for batches of one kind: nesting, types and dimensions, but no sizes."""
        return type(self), type(self.batch)

    def cut(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` (exclusive) as the model gets them."""
        made = self._split.join([self.raw(start, stop)])
        return map_leaves(_itself, made) if made is self.batch else made  # a model takes items out of its own

    def raw(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` (exclusive) as the loader would yield them."""
        if start == 0 and stop == self.samples:
            return self.batch
        sizes = [size for size in (start, stop - start, self.samples - stop) if size]
        parts = self._split.cut(self.batch, sizes)
        said = f"split={self._called}: cut(batch, {sizes}) returned"
        if not isinstance(parts, Iterable):
            raise InvalidInputError(f"{said} {shown(parts)}; return one part for each")
        parts = list(parts)
        if len(parts) != len(sizes):
            raise InvalidInputError(f"{said} {len(parts)} parts; return one for each")
        part = parts[1 if start else 0]
        if self._split.count(part) != stop - start:
            raise InvalidInputError(
                f"split={self._called}: a part cut to {stop - start} samples counts {self._split.count(part)}; "
                "let cut and count agree"
            )
        return part

    def weight(self, start: int, stop: int) -> float:
        """Return what the mean loss of some samples runs over, by the split; their number if it does not say."""
        weigh = getattr(self._split, "weight", None)
        if weigh is None:
            return float(stop - start)
        weight = weigh(self.raw(start, stop))
        is_number = weight.numel() == 1 if isinstance(weight, Tensor) else isinstance(weight, int | float | np.number)
        found = float(weight) if is_number else math.nan
        if isinstance(weight, bool) or not 0.0 <= found < math.inf:
            raise InvalidInputError(
                f"split={self._called}: weight returned {shown(weight)}; return what the mean loss of a part runs "
                "over, a number from 0, such as its tokens"
            )
        return found

    def joins(self, other: Piece) -> bool:
        """Whether samples of both can be joined into one micro-batch."""
        return not isinstance(other, NestedPiece) and other._split is self._split

    def join(self, spans: Sequence[Span]) -> Any:
        """Return spans of pieces that can be joined, the first of them of this one, as one micro-batch."""
        return self._split.join([span.piece.raw(span.start, span.stop) for span in spans])

    def tensors(self) -> list[Tensor]:
        """The tensors found in the batch, also inside of objects."""
        return tensors_in(self.batch)

    def widths(self, index: int) -> tuple[int, ...]:
        """How large a sample is, in one number: the elements of its largest tensor, or what the split says."""
        cost = getattr(self._split, "cost", None)
        if cost is not None:
            found = cost(self.raw(index, index + 1))
            number = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
            if not isinstance(number, int | float) or not 0 <= number < math.inf:
                raise InvalidInputError(f"split={self._called}: cost returned {shown(found)}; return a number from 0")
            return (max(1, round(number * _PARTS_OF_COST)),)
        if isinstance(self.batch, list | tuple) and len(self.batch) == self.samples:
            return (max(1, elements_of(self.batch[index])),)
        return (max(1, sum(map(Tensor.numel, self.tensors())) // max(self.samples, 1)),)


class Span(NamedTuple):
    """Samples `start` to `stop` of one piece."""

    piece: Piece
    start: int
    stop: int

    @property
    def samples(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the piece."""
        return self.samples == self.piece.samples

    def cut(self) -> Any:
        """Return the samples as the model gets them."""
        return self.piece.cut(self.start, self.stop)


class NestedPiece(Piece):
    """A nesting of tensors, taken apart once so that it can be cut cheaply.

    Args:
        batch: The batch as the loader yielded it.
        split: Has the user's own `weight`, if any.
        dims: The dimension along which samples run.
        reading: How lists are read if samples run along the first dimension; None if `dims` says where they run.

    Raises:
        InvalidInputError: The batch holds no tensor, tensors that differ in their number of samples, something that
            cannot be cut, or a list that can be read in two ways.
    """

    def __init__(self, batch: Any, split: Any = None, dims: Dims = 0, *, reading: Reading | None = None) -> None:
        self.batch = batch
        self._split = split
        # The usual batch is not walked through.
        flat: list[tuple[Any, Any]] = []
        if type(batch) in (list, tuple, dict):
            flat = list(batch.items() if isinstance(batch, dict) else enumerate(batch))
        is_flat = {type(one) for _, one in flat} == {Tensor}
        self._whole: frozenset[int] = frozenset()
        if reading is not None and not (is_flat and type(batch) is tuple):
            refuse_flattened(batch)
            self._whole = reading.lists_of_samples(batch)
        leaves = [((at,), one) for at, one in flat] if is_flat else leaves_of(batch, self._whole)
        self._leaves = [leaf for _, leaf in leaves]
        along = [dims] * len(leaves) if isinstance(dims, int) else [_dim_at(dims, batch, path) for path, _ in leaves]
        self.samples = _count(self._leaves, along, batch, is_asked=reading is None)
        # None for what is passed on whole.
        self._dims = [
            None if dim is None or _size_along(leaf, dim) != self.samples else dim
            for leaf, dim in zip(self._leaves, along, strict=True)
        ]
        self.is_plain = not self._whole and dims == 0
        # Whether it is a list, a tuple or a dictionary of tensors that are all cut along their rows.
        self.is_flat = is_flat and self.is_plain and None not in self._dims
        self._form: Hashable = None

    def structure(self) -> Hashable:
        """What is the same for batches of one kind: nesting, types and dimensions, but no sizes."""
        if self._form is None:
            self._form = form_of(self.batch, self._whole)
        return self._form

    def cut(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` (exclusive) in the nesting of the batch, in lists and mappings of their own.

        Tensors are views.
        """
        if self.is_flat:
            if start == 0 and stop == self.samples and type(self.batch) is tuple:
                return self.batch  # out of which a model can take nothing
            return flat_like(self.batch, [leaf[start:stop] for leaf in self._leaves])
        dims = iter(self._dims)
        return map_leaves(lambda leaf: _rows(leaf, next(dims), start, stop), self.batch, self._whole)

    raw = cut

    def joins(self, other: Piece) -> bool:
        """Whether both can be joined into one batch: equal nesting, types, other sizes and non-tensor values."""
        return (
            isinstance(other, NestedPiece)
            and self.structure() == other.structure()
            and self._dims == other._dims
            and all(map(_can_be_joined, self._leaves, other._leaves, self._dims))
        )

    def join(self, spans: Sequence[Span]) -> Any:
        """Concatenate spans of pieces in the nesting of this one."""
        columns = zip(*(span.piece._leaves for span in spans), strict=True)  # type: ignore[attr-defined]
        return self._rebuilt(
            [
                column[0]
                if dim is None
                else _joined(
                    [_rows(leaf, dim, span.start, span.stop) for leaf, span in zip(column, spans, strict=True)], dim
                )
                for column, dim in zip(columns, self._dims, strict=True)
            ]
        )

    def tensors(self) -> list[Tensor]:
        """The tensors in the batch, in the order of its nesting."""
        return self._leaves if self.is_flat else [one for leaf in self._leaves for one in _tensors_of(leaf)]

    def widths(self, index: int) -> tuple[int, ...]:  # noqa: ARG002 - all samples are alike
        """The elements of a sample in each tensor that is cut; the same for all samples."""
        cut = [leaf for leaf, dim in zip(self._leaves, self._dims, strict=True) if dim is not None]
        elements = [sum(map(Tensor.numel, _tensors_of(leaf))) for leaf in cut if holds_tensor(leaf)]
        return tuple(max(1, each // max(self.samples, 1)) for each in elements) or (1,)

    def by_sample(self) -> list[tuple[Path, Tensor]]:
        """Return the tensors that are cut, with their samples along the first dimension, each with its path."""
        leaves = zip(leaves_of(self.batch, self._whole), self._dims, strict=True)
        return [
            (path, leaf.movedim(dim, 0)) for (path, leaf), dim in leaves if dim is not None and isinstance(leaf, Tensor)
        ]

    def _rebuilt(self, leaves: list[Any]) -> Any:
        if self.is_flat:
            return flat_like(self.batch, leaves)
        following = iter(leaves)
        return map_leaves(lambda _: next(following), self.batch, self._whole)


def flat_like(batch: Any, tensors: Iterable[Tensor]) -> Any:
    """Return tensors as a list, a tuple or a dictionary like a batch."""
    return dict(zip(batch, tensors, strict=True)) if type(batch) is dict else type(batch)(tensors)


def _tensors_of(leaf: Any) -> list[Tensor]:
    if isinstance(leaf, Tensor):
        return [leaf]
    return tensors_in(leaf) if type(leaf) in (list, tuple) else []  # a list of samples


def _itself(leaf: Any) -> Any:
    return leaf


def _rows(leaf: Any, dim: int | None, start: int, stop: int) -> Any:
    if dim is None or (isinstance(leaf, Tensor) and stop - start == leaf.shape[dim]):
        return leaf
    if isinstance(leaf, list | tuple):
        return map_leaves(_itself, leaf[start:stop])
    if not dim:
        return leaf[start:stop]
    return leaf[(slice(None),) * dim + (slice(start, stop),)]


def _joined(parts: list[Any], dim: int) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, dim)
    return type(parts[0])(itertools.chain.from_iterable(parts))


def _can_be_joined(mine: Any, theirs: Any, dim: int | None) -> bool:
    """Whether two leaves of one form can be joined along a dimension; without one, whether they are equal."""
    if mine is theirs:
        return True
    if not isinstance(mine, Tensor | np.ndarray):
        return dim is not None or bool(mine == theirs)
    shapes = [(*one.shape[:dim], *one.shape[dim + 1 :]) if dim is not None else one.shape for one in (mine, theirs)]
    if mine.dtype != theirs.dtype or shapes[0] != shapes[1] or type(mine) is not type(theirs):
        return False
    if isinstance(mine, Tensor):
        return mine.device == theirs.device and (dim is not None or torch.equal(mine, theirs))
    return dim is not None or np.array_equal(mine, theirs)


def _dim_at(dims: Dims, batch: Any, path: Path) -> int | None:
    """Return the dimension given for the leaf at a path; a number or None stands for all below it."""
    found: Any = dims
    for key in path:
        if found is None or isinstance(found, int):
            return found
        if isinstance(found, list | tuple) and isinstance(batch, list | tuple) and len(found) > len(batch):
            raise InvalidInputError(  # they may be meant for others of its entries
                f"split=Along({dims!r}) gives {len(found)} dimensions for a {type(batch).__name__} of {len(batch)}; "
                "give one for each entry, or None for what all samples share"
            )
        try:
            found, batch = found[key], batch[key]
        except (KeyError, IndexError, TypeError):
            raise InvalidInputError(
                f"split=Along({dims!r}) says nothing of the batch's entry {'/'.join(map(str, path))}; give its "
                "dimension, or None for what all samples share"
            ) from None
    if found is None or isinstance(found, int):
        return found
    raise InvalidInputError(
        f"split=Along({dims!r}) nests deeper than the batch at {'/'.join(map(str, path)) or 'its root'}; give one "
        "dimension there"
    )


def _size_along(leaf: Any, dim: int) -> int | None:
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.shape[dim] if leaf.ndim > dim else None
    return len(leaf) if type(leaf) in (list, tuple) else None


def _count(leaves: Iterable[Any], dims: Sequence[int | None], batch: Any, *, is_asked: bool) -> int:
    """Return the number of samples, given the dimension of each leaf, and whether the user named dimensions."""
    of_tensors: set[int] = set()
    of_arrays: set[int] = set()
    for leaf, dim in zip(leaves, dims, strict=True):
        _refuse_what_cannot_be_cut(leaf)
        size = None if dim is None else _size_along(leaf, dim)
        if size is not None:
            if isinstance(leaf, np.ndarray):
                of_arrays.add(size)
            elif isinstance(leaf, Tensor) or holds_tensor(leaf):  # which may be a list of samples
                of_tensors.add(size)
        elif dim and isinstance(leaf, Tensor | np.ndarray) and leaf.ndim:
            raise InvalidInputError(
                f"split=Along({dim}): a tensor of shape {tuple(leaf.shape)} has no dimension {dim}; nest the "
                "dimensions like the batch, as in Along((1, 0)) or Along({'inputs': 1, 'labels': 0})"
            )
    sizes = of_tensors or (of_arrays if is_asked else set())
    if not sizes:
        raise InvalidInputError(
            f"a batch of type {type(batch).__name__} holds no tensor with samples along its first dimension, so it "
            "cannot be counted or split; have the loader yield tensors (torch.utils.data.default_collate makes them), "
            "or pass split="
        )
    if len(sizes) > 1:
        shapes = shapes_of(batch)
        raise InvalidInputError(
            f"the tensors of a batch must agree in {'that' if is_asked else 'their first'} dimension, the number of "
            f"samples, but found {shapes if len(shapes) <= _SHORTENED else f'{shapes[:_SHORTENED]}...'}; have the "
            f"loader yield one entry per sample in each{'' if is_asked else ', or pass split='}"
        )
    return sizes.pop()


def _refuse_what_cannot_be_cut(leaf: Any) -> None:
    if isinstance(leaf, Tensor):
        if leaf.is_nested or leaf.layout is not torch.strided:
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise InvalidInputError(f"a batch holds a {kind} tensor, which cannot be split; pad or densify it")
    elif hides_tensors(leaf):
        raise InvalidInputError(
            f"a batch holds a {type(leaf).__name__} with tensors inside, which cannot be split by samples; have the "
            "loader yield tensors in tuples, lists or mappings, or pass split="
        )
