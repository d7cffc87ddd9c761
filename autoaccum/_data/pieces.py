"""Counts, cuts and joins the batches of a loader, one `Piece` each.

`NestedPiece` cuts nested tensors along one dimension, by default the first. `SplitPiece` leaves it to a `Split` of the
user's own.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from autoaccum._arguments import shown
from autoaccum._data.nesting import flatten, hides_tensors, holds_tensor, paths_of, shapes_of, tensors_in, unflatten
from autoaccum._data.reading import Reading, refuse_flattened
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import optree

    # The dimension along which the samples of each tensor run: one for all, or nested like the batch; None for what all
    # samples share.
    Dims = int | None | Sequence["Dims"] | Mapping[Any, "Dims"]

_SHORTENED = 80


@runtime_checkable
class Split(Protocol):
    """Counts, cuts and joins batches whose samples do not run along the first dimension of every tensor.

    Pass an object with these three methods as `split=`. It may also have `weight(batch)`, which returns what the mean
    loss of a batch runs over (its tokens, its boxes): a number that adds up over parts. `autoaccum.Along` and
    `autoaccum.ListOfSamples` are ready-made.

    None of them may change a batch that it is given.
    """

    def count(self, batch: Any) -> int:
        """Return the number of samples in a batch of the loader."""

    def cut(self, batch: Any, sizes: Sequence[int]) -> Sequence[Any]:
        """Return consecutive parts of a batch, one for each size; the sizes are positive and sum to its samples."""

    def join(self, batches: Sequence[Any]) -> Any:
        """Return what the model gets for one or more parts, in order: the micro-batch."""


class Piece(ABC):
    """One batch of a loader, which can be counted and cut.

    Attributes:
        batch: The batch as the loader yielded it.
        samples: The number of samples in it.
        is_plain: Whether samples run along the first dimension of all its tensors.
    """

    __slots__ = ("batch", "is_plain", "samples")

    batch: Any
    samples: int
    is_plain: bool

    @abstractmethod
    def cut(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` (exclusive) as the model gets them."""

    @abstractmethod
    def raw(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` (exclusive) as the loader would yield them."""

    @abstractmethod
    def weight(self, start: int, stop: int) -> float:
        """Return what the mean loss of samples `start` to `stop` (exclusive) runs over, by the user's own count."""

    @abstractmethod
    def joins(self, other: Piece) -> bool:
        """Whether samples of both can be joined into one micro-batch."""

    @abstractmethod
    def join(self, spans: Sequence[Span]) -> Any:
        """Return spans of pieces that can be joined, the first of them of this one, as one micro-batch."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """The tensors in the batch."""

    def structure(self) -> Hashable:
        """What is the same for batches of one kind: nesting, types and dimensions, but no sizes."""
        return type(self), type(self.batch)

    def sample_bytes(self, index: int) -> int:  # noqa: ARG002 - those of a list are not alike
        """Bytes of the tensors of a sample."""
        return sum(tensor.nbytes for tensor in self.tensors()) // max(self.samples, 1)


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
    """A nesting of tensors, flattened once so that it can be cut cheaply.

    Args:
        batch: The batch as the loader yielded it.
        dims: The dimension along which samples run.
        reading: How lists are read if samples run along the first dimension; None if `dims` says where they run.
        weigh: The user's own count of what the mean loss of a part runs over.

    Raises:
        InvalidInputError: The batch holds no tensor, tensors that differ in their number of samples, something that
            cannot be cut, or a list that can be read in two ways.
    """

    __slots__ = ("_dims", "_kind", "_leaves", "_sequence", "_spec", "_weigh")

    def __init__(
        self,
        batch: Any,
        dims: Dims = 0,
        *,
        reading: Reading | None = None,
        weigh: Callable[[Any], float] | None = None,
    ) -> None:
        self.batch = batch
        self._weigh = weigh
        # A list or a tuple of tensors, the usual batch, needs no optree.
        is_flat = type(batch) in (list, tuple) and all(map(_is_tensor, batch))
        self._sequence: type[list[Any] | tuple[Any, ...]] | None = type(batch) if is_flat else None
        self._spec: optree.PyTreeSpec | None = None
        whole: frozenset[int] = frozenset()
        if reading is not None and not (is_flat and type(batch) is tuple):
            refuse_flattened(batch)
            whole = reading.lists_of_samples(batch)
        self.is_plain = not whole and dims == 0
        if is_flat:
            self._leaves = list(batch)
        else:
            self._leaves, self._spec = flatten(batch, whole)
        along = [0] * len(self._leaves) if reading is not None else _dims_of(batch, self._leaves, dims)
        self.samples = _count(self._leaves, along, batch, is_asked=reading is None)
        # None for what is passed on whole.
        self._dims: list[int | None] = [
            dim if dim is not None and _runs_along(leaf, dim, self.samples) else None
            for leaf, dim in zip(self._leaves, along, strict=True)
        ]
        self._kind: tuple[Any, ...] | None = None

    @property
    def is_flat(self) -> bool:
        """Whether it is a list or a tuple of tensors that are all cut along their rows."""
        return self._sequence is not None and self.is_plain and None not in self._dims

    def structure(self) -> Hashable:
        """What is the same for batches of one kind: nesting, types and dimensions, but no sizes."""
        if self._sequence is not None:
            return structure_of_flat(self.batch)
        leaves = ((leaf.dtype, leaf.ndim) if isinstance(leaf, Tensor) else type(leaf) for leaf in self._leaves)
        return self._structure(), tuple(leaves)

    def cut(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` (exclusive) in the nesting of the batch; tensors are views."""
        if start == 0 and stop == self.samples:
            return self.batch
        leaves = [
            leaf if dim is None else _rows(leaf, dim, start, stop)
            for leaf, dim in zip(self._leaves, self._dims, strict=True)
        ]
        return self._rebuild(leaves)

    raw = cut

    def weight(self, start: int, stop: int) -> float:
        """Return what the mean loss of some samples runs over; their number without a count of the user's own."""
        return float(stop - start) if self._weigh is None else _checked(self._weigh(self.cut(start, stop)), "Along")

    def joins(self, other: Piece) -> bool:
        """Whether both can be joined into one batch: equal nesting, types, other sizes and non-tensor values."""
        return (
            isinstance(other, NestedPiece)
            and self._nests_as(other)
            and self._describe() == other._describe()
            and all(
                _equal(mine, theirs)
                for mine, theirs, dim in zip(self._leaves, other._leaves, self._dims, strict=True)
                if dim is None
            )
        )

    def resembles(self, other: NestedPiece) -> bool:
        """Whether both have the same nesting, types and numbers of dimensions."""
        return self._nests_as(other) and all(
            mine.dtype == theirs.dtype and mine.ndim == theirs.ndim
            for mine, theirs in zip(self._leaves, other._leaves, strict=True)
            if isinstance(mine, Tensor) and isinstance(theirs, Tensor)
        )

    def tensors(self) -> list[Tensor]:
        """The tensors in the batch, in the order of its nesting."""
        return list(itertools.chain.from_iterable(map(_tensors_of, self._leaves)))

    def join(self, spans: Sequence[Span]) -> Any:
        """Concatenate spans of pieces in the nesting of this one."""
        columns = zip(*(span.piece._leaves for span in spans), strict=True)  # type: ignore[attr-defined]
        leaves = [
            column[0] if dim is None else _join_leaf(_rows_of_each(column, dim, spans), dim)
            for column, dim in zip(columns, self._dims, strict=True)
        ]
        return self._rebuild(leaves)

    def by_sample(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor of the batch with its samples along the first dimension; None if it is not cut."""
        for leaf, dim in zip(self._leaves, self._dims, strict=True):
            if leaf is tensor and dim is not None:
                moved: Tensor = tensor.movedim(dim, 0)
                return moved
        return None

    def _rebuild(self, leaves: list[Any]) -> Any:
        return self._sequence(leaves) if self._sequence else unflatten(self._structure(), leaves)

    def _nests_as(self, other: NestedPiece) -> bool:
        if self._spec is None and other._spec is None:
            return self._sequence is other._sequence and len(self._leaves) == len(other._leaves)
        return bool(self._structure() == other._structure())

    def _structure(self) -> optree.PyTreeSpec:
        return flatten(self.batch)[1] if self._spec is None else self._spec

    def _describe(self) -> tuple[Any, ...]:
        if self._kind is None:
            self._kind = tuple(
                (type(leaf), leaf.dtype, _without(leaf.shape, dim), dim, getattr(leaf, "device", None))
                if isinstance(leaf, Tensor | np.ndarray)
                else (type(leaf), dim)
                for leaf, dim in zip(self._leaves, self._dims, strict=True)
            )
        return self._kind


class SplitPiece(Piece):
    """A batch that a `Split` of the user's own counts, cuts and joins.

    Args:
        batch: The batch as the loader yielded it.
        split: The user's object.

    Raises:
        InvalidInputError: Its count is no number of samples.
    """

    __slots__ = ("_split",)

    def __init__(self, batch: Any, split: Split) -> None:
        self.batch = batch
        self.is_plain = False
        self._split = split
        samples = split.count(batch)
        if isinstance(samples, bool) or not isinstance(samples, int | np.integer) or samples < 0:
            raise InvalidInputError(
                f"split={_named(split)}: count(batch) returned {shown(samples)}; return the number of samples, an int"
            )
        self.samples = int(samples)

    def cut(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` (exclusive), joined by the split."""
        return self._split.join([self.raw(start, stop)])

    def raw(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` (exclusive) as the split cuts them.

        Raises:
            InvalidInputError: It cut another number of parts.
        """
        if start == 0 and stop == self.samples:
            return self.batch
        sizes = [size for size in (start, stop - start, self.samples - stop) if size]
        parts = self._split.cut(self.batch, sizes)
        if not isinstance(parts, Iterable):
            raise InvalidInputError(
                f"split={_named(self._split)}: cut(batch, {sizes}) returned {shown(parts)}; return one part for each"
            )
        parts = list(parts)
        if len(parts) != len(sizes):
            raise InvalidInputError(
                f"split={_named(self._split)}: cut(batch, {sizes}) returned {len(parts)} parts; return one for each"
            )
        part = parts[1 if start else 0]
        if self._split.count(part) != stop - start:
            raise InvalidInputError(
                f"split={_named(self._split)}: a part cut to {stop - start} samples counts {self._split.count(part)}; "
                "let cut and count agree"
            )
        return part

    def weight(self, start: int, stop: int) -> float:
        """Return the split's own weight of some samples; their number if it has none."""
        weigh = weigher_of(self._split)
        return float(stop - start) if weigh is None else _checked(weigh(self.raw(start, stop)), self._split)

    def joins(self, other: Piece) -> bool:
        """Whether the same split joins both."""
        return isinstance(other, SplitPiece) and other._split is self._split

    def join(self, spans: Sequence[Span]) -> Any:
        """Join spans by the split."""
        return self._split.join([span.piece.raw(span.start, span.stop) for span in spans])

    def sample_bytes(self, index: int) -> int:
        """Bytes of the tensors of a sample."""
        is_list = isinstance(self.batch, list | tuple) and len(self.batch) == self.samples
        return (
            sum(tensor.nbytes for tensor in tensors_in(self.batch[index])) if is_list else super().sample_bytes(index)
        )

    def tensors(self) -> list[Tensor]:
        """The tensors found in the batch, also inside of objects."""
        return tensors_in(self.batch)


def structure_of_flat(batch: Sequence[Tensor]) -> Hashable:
    """Return the structure of a list or a tuple of tensors."""
    return type(batch), tuple([(tensor.dtype, tensor.ndim, tensor.device.type) for tensor in batch])


def weigher_of(split: Split | None) -> Callable[[Any], float] | None:
    """Return the `weight` of a split; None if it has none."""
    weigh = getattr(split, "weight", None)
    return weigh if callable(weigh) else None


def _checked(weight: Any, split: Split | str) -> float:
    """Return a weight as a number.

    Raises:
        InvalidInputError: It is none, or less than 0.
    """
    is_number = weight.numel() == 1 if isinstance(weight, Tensor) else isinstance(weight, int | float | np.number)
    found = float(weight) if is_number else math.nan
    if isinstance(weight, bool) or not 0.0 <= found < math.inf:
        name = split if isinstance(split, str) else _named(split)
        raise InvalidInputError(
            f"split={name}: weight returned {shown(weight)}; return what the mean loss of a part runs over, a number "
            "from 0, such as its tokens"
        )
    return found


def _named(split: Split) -> str:
    return type(split).__name__


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Tensor)


def _tensors_of(leaf: Any) -> list[Tensor]:
    if isinstance(leaf, Tensor):
        return [leaf]
    return tensors_in(leaf) if type(leaf) in (list, tuple) else []  # a list of samples


def _rows_of_each(column: Sequence[Any], dim: int, spans: Sequence[Span]) -> list[Any]:
    """Return the rows of each span. The same rows come thousands of times where a batch is repeated."""
    cut: dict[tuple[int, int, int], Any] = {}
    keys = [(id(span.piece), span.start, span.stop) for span in spans]
    for key, leaf in zip(keys, column, strict=True):
        if key not in cut:
            cut[key] = _rows(leaf, dim, key[1], key[2])
    return [cut[key] for key in keys]


def _rows(leaf: Any, dim: int, start: int, stop: int) -> Any:
    if not dim or isinstance(leaf, list | tuple):
        return leaf[start:stop]
    return leaf[(slice(None),) * dim + (slice(start, stop),)]


def _without(shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
    return tuple(shape) if dim is None else (*shape[:dim], *shape[dim + 1 :])


def _dims_of(batch: Any, leaves: Sequence[Any], dims: Dims) -> list[int | None]:
    """Return the dimension along which samples run for each leaf."""
    if isinstance(dims, int):
        return [dims if getattr(leaf, "ndim", 1) else None for leaf in leaves]
    _refuse_surplus(dims, batch, dims)
    return [_dim_at(dims, path) for path in paths_of(batch)]


def _refuse_surplus(dims: Dims, batch: Any, of_all: Dims) -> None:
    """Reject dimensions for a longer sequence than the batch has: they may be meant for others of its entries."""
    if isinstance(dims, list | tuple) and isinstance(batch, list | tuple):
        if len(dims) > len(batch):
            raise InvalidInputError(
                f"split=Along({of_all!r}) gives {len(dims)} dimensions for a {type(batch).__name__} of {len(batch)}; "
                "give one for each entry, or None for what all samples share"
            )
        for one, entry in zip(dims, batch, strict=False):
            _refuse_surplus(one, entry, of_all)
    elif isinstance(dims, Mapping) and isinstance(batch, Mapping):
        for name in dims.keys() & batch.keys():
            _refuse_surplus(dims[name], batch[name], of_all)


def _dim_at(dims: Dims, path: Sequence[Any]) -> int | None:
    """Return the dimension given for one path; a number or None stands for all below it.

    Raises:
        InvalidInputError: None is given for this path.
    """
    found: Any = dims
    for key in path:
        if found is None or isinstance(found, int):
            return found
        try:
            found = found[key]
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


def _count(leaves: Iterable[Any], dims: Sequence[int | None], batch: Any, *, is_asked: bool) -> int:
    sizes: set[int] = set()
    of_arrays: set[int] = set()
    for leaf, dim in zip(leaves, dims, strict=True):
        _refuse_what_cannot_be_cut(leaf)
        if dim is None:
            continue
        if isinstance(leaf, Tensor | np.ndarray) and dim and leaf.ndim <= dim:
            raise InvalidInputError(
                f"split=Along({dim}): a tensor of shape {tuple(leaf.shape)} has no dimension {dim}; nest the "
                "dimensions like the batch, as in Along((1, 0)) or Along({'inputs': 1, 'labels': 0})"
            )
        if isinstance(leaf, Tensor):
            sizes.update({leaf.shape[dim]} if leaf.dim() > dim else ())
        elif isinstance(leaf, np.ndarray) and leaf.ndim > dim:
            of_arrays.add(leaf.shape[dim])
        elif type(leaf) in (list, tuple) and any(map(holds_tensor, leaf)):
            sizes.add(len(leaf))  # a list of samples
    sizes = sizes or (of_arrays if is_asked else set())
    if not sizes:
        raise InvalidInputError(
            f"a batch of type {type(batch).__name__} holds no tensor with samples along its first dimension, so it "
            "cannot be counted or cut; have the loader yield tensors (torch.utils.data.default_collate makes them), or "
            "pass split="
        )
    if len(sizes) > 1:
        raise InvalidInputError(
            f"the tensors of a batch must agree in {'that' if is_asked else 'their first'} dimension, the number of "
            f"samples, but found {_shortened(shapes_of(batch))}; have the loader yield one entry per sample in each"
            + ("" if is_asked else ", or pass split=")
        )
    return int(sizes.pop())


def _shortened(text: str) -> str:
    return text if len(text) <= _SHORTENED else f"{text[:_SHORTENED]}..."


def _refuse_what_cannot_be_cut(leaf: Any) -> None:
    if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
        kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
        raise InvalidInputError(f"a batch holds a {kind} tensor, which cannot be cut by samples; pad or densify it")
    if not isinstance(leaf, Tensor) and hides_tensors(leaf):
        raise InvalidInputError(
            f"a batch holds a {type(leaf).__name__} with tensors inside, which cannot be cut by samples; have the "
            "loader yield tensors in tuples, lists or mappings, or pass split="
        )


def _runs_along(leaf: Any, dim: int, samples: int) -> bool:
    if isinstance(leaf, Tensor | np.ndarray):
        return bool(leaf.ndim > dim and leaf.shape[dim] == samples)
    return type(leaf) in (list, tuple) and len(leaf) == samples


def _equal(mine: Any, theirs: Any) -> bool:
    if mine is theirs:
        return True
    if isinstance(mine, Tensor):
        return isinstance(theirs, Tensor) and torch.equal(mine, theirs)
    if isinstance(mine, np.ndarray):
        return np.array_equal(mine, theirs)
    return bool(mine == theirs)


def _join_leaf(parts: list[Any], dim: int) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, dim)
    return type(parts[0])(itertools.chain.from_iterable(parts))
