"""Ready-made splits, for batches whose samples do not run along the first dimension of every tensor."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._arguments import check_call, check_function, shown
from autoaccum._data.nesting import shapes_of
from autoaccum._data.pieces import NestedPiece, Piece, Span, Split
from autoaccum._data.reading import Reading
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
        return [piece.cut(start, stop) for start, stop in _bounds(sizes)]

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
    each micro-batch holds little padding.

    Raises:
        InvalidInputError: An argument cannot be called.
    """

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
        return [batch[start:stop] for start, stop in _bounds(sizes)]

    def join(self, batches: Sequence[Any]) -> Any:
        """Return one or more lists of samples, collated; from copies, since collators take items out of samples."""
        samples = list(itertools.chain.from_iterable(batches))
        try:
            return self.collate([copy.copy(one) if isinstance(one, Mapping | list) else one for one in samples])
        except Exception as error:
            if any(isinstance(one, Tensor) for one in samples):
                error.add_note(
                    f"autoaccum: split={self!r} collates the items of the loader's batches, tensors of shapes "
                    f"{shapes_of(samples)}; if the loader collates already, pass collate_fn=list to the DataLoader",
                )
            raise


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


def _bounds(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Return where each of several consecutive parts begins and ends."""
    return itertools.pairwise(itertools.accumulate(sizes, initial=0))


# Tensors whose first dimension is known to index the samples, such as a model's outputs.
FIRST = Along(0)


# --- packed rows ------------------------------------------------------------------------------------------------------


_ROWS, _POSITIONS = "input_ids", "position_ids"
# Where sequences begin, and the end of the last; the most tokens in one; the sequence of each token.
_BOUNDS, _LONGEST, _INDEX = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k"), "seq_idx"


class PackedRows:
    """Samples are the sequences packed into one row, as by packing and padding-free training.

        SFTTrainer = autoaccum.integrations.transformers.windowed(SFTTrainer, split=autoaccum.PackedRows())

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
        return [_part(batch, starts[begin : end + 1]) for begin, end in _bounds(sizes)]

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
