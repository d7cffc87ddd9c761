"""Counts, cuts and joins batches of any nesting, and regroups a loader's batches into windows. Uses no device.

A batch is what a loader yields: a tensor, or arbitrarily nested tuples, lists, named tuples and mappings of tensors.
The first dimension of every tensor indexes the samples. Other sequences as long as the batch (a list of file names) are
cut with it; anything else (a temperature, a flag) is passed on whole.
"""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import optree
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from autoaccum._arguments import check_choice, check_iterable, check_positive_int, shown
from autoaccum.errors import InvalidInputError

LAST_WINDOW = ("step", "drop")

_NAMESPACE = "autoaccum"
_PAIR = 2
# The mappings that optree flattens itself; others (a Transformers BatchEncoding, a ModelOutput) are flattened here and
# rebuilt as their own type.
_OPTREE_MAPPINGS = (dict, OrderedDict, defaultdict)


class Piece:
    """One batch of a loader, flattened once so that it can be cut cheaply.

    Args:
        batch: The batch as the loader yielded it.

    Attributes:
        batch: The same object.
        samples: The number of samples in it.

    Raises:
        InvalidInputError: The batch holds no tensor, tensors that differ in their first dimension, or something that
            cannot be cut.
    """

    __slots__ = ("_cuttable", "_kind", "_leaves", "_sequence", "_spec", "batch", "samples")

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        # A list or a tuple of tensors, the usual batch, needs no optree.
        is_flat = type(batch) in (list, tuple) and all(map(_is_tensor, batch))
        self._sequence: type[list[Any] | tuple[Any, ...]] | None = type(batch) if is_flat else None
        self._spec: optree.PyTreeSpec | None = None
        if is_flat:
            self._leaves = list(batch)
        else:
            self._leaves, self._spec = _flatten(batch)
        self.samples = _count(self._leaves, batch)
        self._cuttable = [_runs_along_the_batch(leaf, self.samples) for leaf in self._leaves]
        self._kind: tuple[Any, ...] | None = None

    def cut(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` (exclusive) in the nesting of the batch; tensors are views."""
        if start == 0 and stop == self.samples:
            return self.batch
        leaves = [leaf[start:stop] if self._cuttable[i] else leaf for i, leaf in enumerate(self._leaves)]
        return self._rebuild(leaves)

    def joins(self, other: Piece) -> bool:
        """Whether both can be joined into one batch: equal nesting, types, trailing shapes and non-tensor values."""
        return self._nests_as(other) and self._describe() == other._describe() and self._same_rest(other)

    def resembles(self, other: Piece) -> bool:
        """Whether both have the same nesting, types and numbers of dimensions."""
        return self._nests_as(other) and all(
            mine.dtype == theirs.dtype and mine.ndim == theirs.ndim
            for mine, theirs in zip(self._leaves, other._leaves, strict=True)
            if isinstance(mine, Tensor) and isinstance(theirs, Tensor)
        )

    def tensors(self) -> list[Tensor]:
        """The tensors in the batch, in the order of its nesting."""
        return [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]

    def sample_bytes(self) -> int:
        """Bytes of the tensors of one sample."""
        return sum(tensor.nbytes for tensor in self.tensors()) // max(self.samples, 1)

    def _rebuild(self, leaves: list[Any]) -> Any:
        return self._sequence(leaves) if self._sequence else optree.tree_unflatten(self._structure(), leaves)

    def _nests_as(self, other: Piece) -> bool:
        if self._spec is None and other._spec is None:
            return self._sequence is other._sequence and len(self._leaves) == len(other._leaves)
        return bool(self._structure() == other._structure())

    def _structure(self) -> optree.PyTreeSpec:
        return _flatten(self.batch)[1] if self._spec is None else self._spec

    def _describe(self) -> tuple[Any, ...]:
        if self._kind is None:
            self._kind = tuple(
                (type(leaf), leaf.dtype, leaf.shape[1:], getattr(leaf, "device", None))
                if isinstance(leaf, Tensor | np.ndarray)
                else type(leaf)
                for leaf in self._leaves
            )
        return self._kind

    def _same_rest(self, other: Piece) -> bool:
        pairs = zip(self._leaves, other._leaves, self._cuttable, other._cuttable, strict=True)
        return all(
            (mine_cut and theirs_cut) or (mine_cut == theirs_cut and _equal(mine, theirs))
            for mine, theirs, mine_cut, theirs_cut in pairs
        )


class _Span(NamedTuple):
    """Samples `start` to `stop` of one piece."""

    piece: Piece
    start: int
    stop: int

    @property
    def samples(self) -> int:
        return self.stop - self.start


class Window(Sequence[Any]):
    """The samples of one optimizer update, in the pieces that the loader yielded.

    As a sequence it contains batches of the loader's nesting. Pieces whose tensors differ in their trailing shape are
    never joined: a micro-batch ends where such a piece begins.

    Args:
        batches: The pieces in order; each is one batch.

    Attributes:
        samples: Samples in all pieces together.

    Raises:
        InvalidInputError: There are no pieces, or a piece cannot be cut.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        if not isinstance(batches, Iterable):
            raise InvalidInputError(f"batches={shown(batches)} cannot be iterated over; pass a list of batches")
        spans = []
        for batch in batches:
            piece = Piece(batch)
            spans.append(_Span(piece, 0, piece.samples))
        if not spans:
            raise InvalidInputError("a window needs at least one batch, got none")
        self._set(spans)

    @classmethod
    def _of_spans(cls, spans: Sequence[_Span]) -> Window:
        window = cls.__new__(cls)
        window._set(spans)
        return window

    @classmethod
    def empty(cls) -> Window:
        """Return a window without samples, for a process that has no part of a window that others have."""
        return cls._of_spans([])

    def _set(self, spans: Sequence[_Span]) -> None:
        self._spans = tuple(spans)
        self._starts = (0, *itertools.accumulate(span.samples for span in spans))
        self.samples = self._starts[-1]
        self._groups: list[int] | None = None
        self._tensors: list[Tensor] | None = None

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [span.piece.cut(span.start, span.stop) for span in self._spans[index]]
        span = self._spans[index]
        return span.piece.cut(span.start, span.stop)

    def __repr__(self) -> str:
        return f"Window({self.samples} samples in {len(self)} pieces)"

    def groups(self) -> list[int]:
        """Sizes of the consecutive groups of samples that can be joined into one batch."""
        if self._groups is None:
            self._groups = self._grouped()
        return self._groups

    def sample_bytes(self) -> list[int]:
        """Bytes of the tensors of one sample, for each of `groups`."""
        starts = itertools.accumulate([0, *self.groups()[:-1]])
        return [self._between(start, start + 1)[0].piece.sample_bytes() for start in starts]

    def _grouped(self) -> list[int]:
        if not self._spans:
            return []
        sizes = [self._spans[0].samples]
        for before, span in itertools.pairwise(self._spans):
            if span.piece is before.piece or span.piece.joins(before.piece):
                sizes[-1] += span.samples
            else:
                sizes.append(span.samples)
        return sizes

    def cut(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` (exclusive) as one batch; they must lie within one group."""
        if len(self._spans) == 1:
            only = self._spans[0]
            return only.piece.cut(only.start + start, only.start + stop)
        spans = self._between(start, stop)
        if len(spans) == 1:
            return spans[0].piece.cut(spans[0].start, spans[0].stop)
        return _join(spans)

    def parts(self, start: int, stop: int) -> list[tuple[Any, int]]:
        """Return samples `start` to `stop` (exclusive) as unjoined batches, each with its number of samples."""
        return [(span.piece.cut(span.start, span.stop), span.samples) for span in self._between(start, stop)]

    def _between(self, start: int, stop: int) -> list[_Span]:
        spans = []
        for index in range(bisect_right(self._starts, start) - 1, len(self._spans)):
            begin, span = self._starts[index], self._spans[index]
            if begin >= stop:
                break
            offset = span.start - begin
            spans.append(_Span(span.piece, max(start, begin) + offset, min(stop + offset, span.stop)))
        return spans

    def part(self, start: int, stop: int) -> Window:
        """Return samples `start` to `stop` (exclusive) as a window of their own."""
        return Window._of_spans(self._between(start, min(stop, self.samples)) if start < self.samples else [])

    def joined(self) -> Any:
        """The window as one batch if its pieces can be joined, else the window itself."""
        return self.cut(0, self.samples) if len(self.groups()) == 1 else self

    @property
    def used_of_last(self) -> int:
        """How many samples of its last batch this window and earlier ones have used; 0 if all of them."""
        if not self._spans:
            return 0
        last = self._spans[-1]
        return 0 if last.stop == last.piece.samples else last.stop

    def versions(self) -> list[int]:
        """How often each tensor was modified in place, including through views."""
        return [tensor._version for tensor in self.tensors()]

    def tensors(self) -> list[Tensor]:
        """Every tensor of every piece."""
        if self._tensors is None:
            self._tensors = [tensor for span in self._spans for tensor in span.piece.tensors()]
        return self._tensors


def windows(loader: Iterable[Any], target_batch: int, *, last_window: str = "step") -> Iterator[Any]:
    """Regroup a loader's batches into windows of `target_batch` samples, each sample once and in order.

    Args:
        loader: Any iterable of batches, of any size and nesting.
        target_batch: Samples per window.
        last_window: What to do with a shorter last window: "step" yields it, "drop" leaves it out.

    Yields:
        The window's samples as a batch of the loader's nesting, or as a `Window` of pieces if their trailing shapes
        differ (padding to the longest of each batch).

    Raises:
        InvalidInputError: An argument or a batch is not valid.
    """
    check_windows(target_batch, last_window)
    check_iterable("loader", loader)
    return (window.joined() for window in stream(loader, target_batch, last_window=last_window))


def check_windows(target_batch: int, last_window: str) -> None:
    """Check the arguments of `windows`.

    Raises:
        InvalidInputError: One of them is not valid.
    """
    check_positive_int("target_batch", target_batch)
    check_choice("last_window", last_window, LAST_WINDOW)


def stream(
    batches: Iterable[Any], target_batch: int | Iterable[int], *, last_window: str = "step", skip: int = 0
) -> Iterator[Window]:
    """Regroup batches into `Window`s without joining them; arguments as for `windows`, already checked.

    The first `skip` samples of the first batch are left out: in a resumed loader, an earlier window has used them.
    `target_batch` may be an iterable of one size per window.
    """
    sizes = itertools.repeat(target_batch) if isinstance(target_batch, int) else iter(target_batch)
    spans: list[_Span] = []
    missing = 0
    for batch in batches:
        piece = Piece(batch)
        start, skip = skip, 0
        while start < piece.samples:
            if missing == 0:
                missing = next(sizes)  # only once there is a sample: the size is not known before
            stop = min(piece.samples, start + missing)
            spans.append(_Span(piece, start, stop))
            missing -= stop - start
            start = stop
            if missing == 0:
                yield Window._of_spans(spans)
                spans = []
    if spans and last_window == "step":
        yield Window._of_spans(spans)


def as_window(given: Any) -> Window:
    """Convert the argument of `Runner.step`: a `Window`, one batch, or a sequence of the loader's batches.

    A list whose items are batches is a sequence of them. Two of the same form could as well be the inputs and targets
    of one batch, so that case is rejected.

    Raises:
        InvalidInputError: The argument is ambiguous, or contains nothing that can be cut.
    """
    window = given if isinstance(given, Window) else Window(_batches_in(given))
    if not window.samples:
        raise InvalidInputError("the window holds 0 samples, so it makes no update; leave empty batches out")
    return window


def _batches_in(given: Any) -> Iterable[Any]:
    if isinstance(given, Iterator):
        return given
    if not isinstance(given, list) or not given or not all(_is_batch_itself(item) for item in given):
        return [given]
    if len(given) == _PAIR:
        first, second = (Piece(item) for item in given)
        if first.samples == second.samples and not first.resembles(second):
            return [given]
        if first.samples == second.samples:
            raise InvalidInputError(
                "a list of two batches of the same form may be two batches or the inputs and targets of one; pass "
                "autoaccum.Window([first, second]) for two batches, or a tuple (inputs, targets) for one"
            )
    return given


def count(batch: Any) -> int:
    """Return the number of samples in a batch.

    Raises:
        InvalidInputError: It holds no tensor, tensors that differ in their first dimension, or something that cannot be
            cut.
    """
    return Piece(batch).samples


def repeated(batch: Any, samples: int) -> Any:
    """Return a batch of `samples` samples that repeats those of `batch` in order.

    Raises:
        InvalidInputError: There is no sample to repeat, or the batch cannot be cut.
    """
    piece = Piece(batch)
    if not piece.samples:
        raise InvalidInputError(f"a batch of 0 samples ({shapes_of(batch)}) has nothing to try; pass one with samples")
    whole, rest = divmod(samples, piece.samples)
    spans = [_Span(piece, 0, piece.samples)] * whole
    if rest:
        spans.append(_Span(piece, 0, rest))
    return spans[0].piece.cut(0, spans[0].stop) if len(spans) == 1 else _join(spans)


def chosen(batch: Any, indices: Sequence[int]) -> Any:
    """Return the samples at `indices` of a batch, in that order."""
    piece = Piece(batch)
    spans = [_Span(piece, index, index + 1) for index in indices]
    return piece.cut(spans[0].start, spans[0].stop) if len(spans) == 1 else _join(spans)


def copied(batch: Any) -> Any:
    """Return the batch with copies of its tensors."""
    return map_tensors(Tensor.clone, batch)


def map_tensors(function: Any, batch: Any) -> Any:
    """Return the batch with `function` applied to every tensor; everything else is passed on."""
    return optree.tree_map(
        lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf,
        _with_foreign_mappings(batch),
        is_leaf=_is_whole,
        none_is_leaf=True,
        namespace=_NAMESPACE,
    )


# --- taking apart and putting together -----------------------------------------------------------------------------


class _ForeignType:
    """A prototype for rebuilding a mapping as its own type; equal if type and keys are."""

    __slots__ = ("keys", "prototype")

    def __init__(self, prototype: Mapping[Any, Any]) -> None:
        self.prototype = prototype
        self.keys = tuple(prototype)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _ForeignType)
            and type(self.prototype) is type(other.prototype)
            and self.keys == other.keys
        )

    def __hash__(self) -> int:
        return hash((type(self.prototype), self.keys))


class _Foreign:
    """A mapping of a type unknown to optree, as a node of the tree."""

    __slots__ = ("kind", "values")

    def __init__(self, kind: _ForeignType, values: Sequence[Any]) -> None:
        self.kind = kind
        self.values = values


def _rebuild_foreign(kind: _ForeignType, values: Iterable[Any]) -> Any:
    items = dict(zip(kind.keys, values, strict=True))
    try:
        made = _copied(kind.prototype)
        for key, value in items.items():
            made[key] = value  # type: ignore[index]
    except TypeError:  # a read-only mapping: its type has to accept a dict
        return type(kind.prototype)(items)  # type: ignore[call-arg]
    # Attributes that duplicate an item (batch.labels for batch["labels"]) are updated with it.
    attributes = getattr(made, "__dict__", {})
    attributes.update((name, items[name]) for name in attributes.keys() & items.keys())
    return made


def _copied(mapping: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a copy with the same values that can be modified without affecting the original."""
    if isinstance(mapping, dict) or hasattr(mapping, "__copy__"):
        return copy.copy(mapping)
    # A shallow copy of a mapping that wraps a dict would share the original's dict.
    return copy.deepcopy(mapping, {id(value): value for value in mapping.values()})


optree.register_pytree_node(
    _Foreign,  # type: ignore[arg-type]
    lambda node: (node.values, node.kind),  # type: ignore[attr-defined]
    _rebuild_foreign,  # type: ignore[arg-type]
    namespace=_NAMESPACE,
)


def _is_foreign(node: Any) -> bool:
    return isinstance(node, Mapping) and type(node) not in _OPTREE_MAPPINGS


def _with_foreign_mappings(batch: Any) -> Any:
    """Return the batch with mappings unknown to optree wrapped in nodes that it knows."""
    if _is_foreign(batch):
        return _Foreign(_ForeignType(batch), [_with_foreign_mappings(value) for value in batch.values()])
    if isinstance(batch, Tensor) or not isinstance(batch, Mapping | tuple | list):
        return batch
    if all(isinstance(item, Tensor) for item in (batch.values() if isinstance(batch, Mapping) else batch)):
        return batch
    return optree.tree_map(
        lambda leaf: _with_foreign_mappings(leaf) if _is_foreign(leaf) else leaf,
        batch,  # type: ignore[arg-type]
        is_leaf=_is_whole,
        none_is_leaf=True,
        namespace=_NAMESPACE,
    )


def _flatten(batch: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten(
        _with_foreign_mappings(batch), is_leaf=_is_whole, none_is_leaf=True, namespace=_NAMESPACE
    )


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Tensor)


def _is_whole(node: Any) -> bool:
    """Whether a node is a leaf (a list of file names, a PackedSequence) and not a level of the nesting."""
    if isinstance(node, PackedSequence):
        return True
    return type(node) in (list, tuple) and not any(_holds_tensor(item) for item in node)


def _holds_tensor(node: Any) -> bool:
    if isinstance(node, Tensor):
        return True
    if isinstance(node, Mapping):
        return any(_holds_tensor(value) for value in node.values())
    return isinstance(node, list | tuple) and any(_holds_tensor(item) for item in node)


def _is_batch_itself(item: Any) -> bool:
    return isinstance(item, list | tuple | Mapping) and _holds_tensor(item)


def _count(leaves: Iterable[Any], batch: Any) -> int:
    for leaf in leaves:
        _refuse_what_cannot_be_cut(leaf)
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0}
    if not sizes:
        raise InvalidInputError(
            f"a batch of type {type(batch).__name__} holds no tensor with samples along its first dimension, so it "
            "cannot be counted or cut; have the loader yield tensors (torch.utils.data.default_collate makes them)"
        )
    if len(sizes) > 1:
        raise InvalidInputError(
            "the tensors of a batch must agree in their first dimension, the number of samples, but found "
            f"{shapes_of(batch)}; have the loader yield one entry per sample in each of them"
        )
    return sizes.pop()


def _refuse_what_cannot_be_cut(leaf: Any) -> None:
    if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
        kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
        raise InvalidInputError(f"a batch holds a {kind} tensor, which cannot be cut by samples; pad or densify it")
    if not isinstance(leaf, Tensor) and (isinstance(leaf, PackedSequence) or any(map(_holds_tensor, _inside(leaf)))):
        raise InvalidInputError(
            f"a batch holds a {type(leaf).__name__} with tensors inside, which cannot be cut by samples; have the "
            "loader yield tensors in tuples, lists or mappings"
        )


def _inside(leaf: Any) -> Iterator[Any]:
    """Yield the attributes of an object, including those in slots."""
    yield from getattr(leaf, "__dict__", {}).values()
    for kind in type(leaf).__mro__:
        slots = vars(kind).get("__slots__", ())
        yield from (getattr(leaf, name, None) for name in ((slots,) if isinstance(slots, str) else slots))


def shapes_of(batch: Any) -> str:
    """Return the paths and shapes of a batch's tensors in words."""
    paths, leaves, _ = optree.tree_flatten_with_path(
        _with_foreign_mappings(batch), is_leaf=_is_whole, none_is_leaf=True, namespace=_NAMESPACE
    )
    named = [
        f"{'/'.join(map(str, path)) or 'batch'}: {tuple(leaf.shape)}"
        for path, leaf in zip(paths, leaves, strict=True)
        if isinstance(leaf, Tensor) and leaf.dim() > 0
    ]
    return ", ".join(named)


def _runs_along_the_batch(leaf: Any, samples: int) -> bool:
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.ndim > 0 and leaf.shape[0] == samples
    return type(leaf) in (list, tuple) and len(leaf) == samples


def _equal(mine: Any, theirs: Any) -> bool:
    if mine is theirs:
        return True
    if isinstance(mine, Tensor):
        return isinstance(theirs, Tensor) and torch.equal(mine, theirs)
    if isinstance(mine, np.ndarray):
        return np.array_equal(mine, theirs)
    return bool(mine == theirs)


def _join(spans: Sequence[_Span]) -> Any:
    first = spans[0].piece
    columns = zip(*(span.piece._leaves for span in spans), strict=True)
    leaves = [
        _join_leaf([leaf[span.start : span.stop] for leaf, span in zip(column, spans, strict=True)])
        if cuttable
        else column[0]
        for column, cuttable in zip(columns, first._cuttable, strict=True)
    ]
    return first._rebuild(leaves)


def _join_leaf(parts: list[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return type(parts[0])(itertools.chain.from_iterable(parts))
