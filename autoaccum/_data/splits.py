"""Ready-made splits, for batches whose samples do not run along the first dimension of every tensor."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autoaccum._arguments import check_call, check_function, shown
from autoaccum._data.nesting import shapes_of
from autoaccum._data.pieces import NestedPiece, Piece, Span, Split
from autoaccum._data.reading import Reading, is_packed
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from autoaccum._data.pieces import Dims


# Each with the parameters that it is called with.
_METHODS = {"count": "batch", "cut": "batch, sizes", "join": "batches"}


class Along:
    """Samples run along another dimension than the first, or along a different one in each tensor.

        split=autoaccum.Along(1)                           # all tensors are (T, N, ...)
        split=autoaccum.Along((1, 0))                      # inputs (T, N, F), targets (N,)
        split=autoaccum.Along({"frames": 1, "mel": None})  # None: shared by all samples, and passed on whole

    Args:
        dims: The dimension, from 0, for all tensors, or nested like the batch. Tensors without dimensions are shared.

    Batches are joined where their other dimensions agree.

    Raises:
        InvalidInputError: A dimension is no number from 0, or None everywhere.
    """

    def __init__(self, dims: Dims) -> None:
        found = list(_numbers_in(dims))
        if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in found) or not found:
            raise InvalidInputError(
                f"Along({shown(dims)}): a dimension is a number from 0, alone or nested like the batch, and None for "
                "what all samples share; give at least one number"
            )
        self.dims = dims

    def __repr__(self) -> str:
        return f"Along({self.dims!r})"

    @property
    def is_first(self) -> bool:
        """Whether samples run along the first dimension of every tensor."""
        return all(dim == 0 for dim in _numbers_in(self.dims))

    def piece(self, batch: Any) -> NestedPiece:
        """Return a batch of the loader, ready to be cut."""
        return NestedPiece(batch, self, self.dims)

    def count(self, batch: Any) -> int:
        """Return the number of samples in a batch.

        Raises:
            InvalidInputError: Its tensors differ in it, or have no such dimension.
        """
        return self.piece(batch).samples

    def cut(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Return consecutive parts of a batch, one for each size; tensors are views."""
        piece = self.piece(batch)
        return [piece.cut(start, stop) for start, stop in bounds_of(sizes)]

    def join(self, batches: Sequence[Any]) -> Any:
        """Return the concatenation of parts."""
        pieces = [self.piece(batch) for batch in batches]
        return pieces[0].join([Span(piece, 0, piece.samples) for piece in pieces])


class ListOfSamples:
    """The loader yields lists of samples (`collate_fn=list`), from which micro-batches are collated.

        loader = DataLoader(dataset, batch_size=48, collate_fn=list)
        autoaccum.fit(model, loader, 48, split=autoaccum.ListOfSamples(your_collator))

    Args:
        collate: What would be the loader's `collate_fn`: a function of a list of samples that returns what the model
            gets.
        weight: A function of a list of samples that returns what their mean loss runs over, such as their tokens or
            boxes; None if the loss says it.

    The samples of a window are taken from the largest to the smallest, by the elements of their largest tensor, so that
    each micro-batch holds little padding. A collator that packs them into one row pads nothing: where memory decides
    the sizes, micro-batches are filled up to the tokens that fit.

    Attributes:
        packs: Whether `collate` packs several samples into one row; None as long as it is not known.

    Raises:
        InvalidInputError: An argument cannot be called.
    """

    packs: bool | None = None

    def __init__(
        self, collate: Callable[[list[Any]], Any], *, weight: Callable[[list[Any]], float] | None = None
    ) -> None:
        if not callable(collate):
            raise InvalidInputError(f"collate={shown(collate)} is no function of a list of samples; pass your collator")
        check_call("collate", collate, "samples")
        if weight is not None:
            check_function("weight", weight, "samples")
            self.weight = weight
        self.collate = collate

    def __repr__(self) -> str:
        return f"ListOfSamples({getattr(self.collate, '__name__', type(self.collate).__name__)})"

    def count(self, batch: Any) -> int:
        """Return the length of a list of samples.

        Raises:
            InvalidInputError: The batch is none.
        """
        if not isinstance(batch, list | tuple):
            raise InvalidInputError(
                f"split=ListOfSamples(...) needs a loader that yields lists of samples, but it yields a "
                f"{type(batch).__name__}; pass collate_fn=list to the DataLoader"
            )
        return len(batch)

    def cut(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Return consecutive parts of the list."""
        return [batch[start:stop] for start, stop in bounds_of(sizes)]

    def join(self, batches: Sequence[Any]) -> Any:
        """Return one or more lists of samples, collated; from copies, since collators take items out of samples."""
        samples = list(itertools.chain.from_iterable(batches))
        try:
            batch = self.collate([copy.copy(one) if isinstance(one, Mapping | list) else one for one in samples])
        except Exception as error:
            if any(isinstance(one, Tensor) for one in samples):
                error.add_note(
                    f"autoaccum: split={self!r} collates the items of the loader's batches, tensors of shapes "
                    f"{shapes_of(samples)}; if the loader collates already, pass collate_fn=list to the DataLoader",
                )
            raise
        if len(samples) > 1:
            self.packs = is_packed(batch)
        return batch


def check_split(split: object) -> None:
    """Check the argument `split`."""
    if split is None:
        return
    missing = [name for name in _METHODS if not callable(getattr(split, name, None))]
    if isinstance(split, type) or missing:
        found = "a class" if isinstance(split, type) else f"an object without {', '.join(missing)}"
        raise InvalidInputError(
            f"split={shown(split)} is {found}; pass an object with count(batch), cut(batch, sizes) and join(batches), "
            "such as autoaccum.Along(1) or autoaccum.ListOfSamples(collate)"
        )
    if not callable(getattr(split, "weight", len)):
        raise InvalidInputError(f"split={shown(split)}: weight is no function of a batch; leave it out, or make it one")
    for name, parameters in {**_METHODS, "weight": "batch"}.items():
        if hasattr(split, name):
            check_call(f"split.{name}", getattr(split, name), parameters)


class ByDefault(Along):
    """Samples run along the first dimension, or are the items of lists, which are read alike in all batches."""

    def __init__(self) -> None:
        super().__init__(0)
        self._reading = Reading()

    def piece(self, batch: Any) -> NestedPiece:
        """Return a batch, ready to be cut."""
        return NestedPiece(batch, self, reading=self._reading)


def is_default(split: Split | None) -> bool:
    """Whether no split was given."""
    return split is None or isinstance(split, ByDefault)


def piece_of(batch: Any, split: Split | None) -> Piece:
    """Return a batch, ready to be cut; `split` as for `fit`.

    Raises:
        InvalidInputError: The batch cannot be counted or cut.
    """
    split = split or ByDefault()
    return split.piece(batch) if isinstance(split, Along) else Piece(batch, split)


def _numbers_in(dims: Any) -> list[Any]:
    """Return the dimensions in a nesting, without None."""
    if isinstance(dims, Mapping | list | tuple):
        values = dims.values() if isinstance(dims, Mapping) else dims
        return [number for value in values for number in _numbers_in(value)]
    return [] if dims is None else [dims]


def bounds_of(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Return where each of several consecutive parts begins and ends."""
    return itertools.pairwise(itertools.accumulate(sizes, initial=0))


# Tensors whose first dimension is known to index the samples, such as a model's outputs.
FIRST = Along(0)
