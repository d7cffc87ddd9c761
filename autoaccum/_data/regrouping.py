"""Regroups a loader's batches into windows of so many samples, or of about so many tokens in whole samples.

A sample has as many tokens as it has labels that are not -100, where it has one for each token; without such labels, as
many as its attention mask keeps; without a mask, as its largest tensor has elements, padding included.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._arguments import check_bool, check_positive_int, shown
from autoaccum._data.batches import Window
from autoaccum._data.loaders import check_loader
from autoaccum._data.nesting import elements_of
from autoaccum._data.pieces import NestedPiece, Span
from autoaccum._data.splits import ByDefault, check_split, piece_of
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor

    from autoaccum._data.nesting import Path
    from autoaccum._data.pieces import Piece, Split

# The names of Transformers' collators, and what does not count in them.
_LABELS = "labels"
_COUNTED = {_LABELS: -100, "attention_mask": 0}
_PAIR = 2
# What an error says if there are none.
TOKENS_ARE = (
    "a sample's tokens are its labels other than -100, else what its attention_mask keeps, else the elements of its "
    "largest tensor (docs/batches.md, Tokens); check the labels, and have the loader yield texts tokenized"
)


def windows(
    loader: Iterable[Any],
    target_batch: int | None = None,
    *,
    drop_last: bool = False,
    split: Split | None = None,
    target_tokens: int | None = None,
) -> Iterator[Any]:
    """Regroup a loader's batches into windows of `target_batch` samples, each sample once and in order.

    Args:
        loader: Any iterable of batches, of any size and nesting.
        target_batch: Samples per window; None with `target_tokens`.
        drop_last: Whether to leave out a shorter last window.
        split: Counts, cuts and joins the loader's batches, as for `fit`.
        target_tokens: Tokens per window, as for `fit`.

    Yields:
        The window's samples as a batch of the loader's nesting, or as a `Window` of pieces if their trailing shapes
        differ (padding to the longest of each batch), a `split` is given, they hold lists of samples, or the
        loader's batches carry numbers of their own (`num_items_in_batch`), which are not those of the window.

    Raises:
        InvalidInputError: An argument or a batch is not valid, or no sample has a token.
    """
    check_target(target_batch, target_tokens)
    check_bool("drop_last", drop_last)
    check_split(split)
    check_loader("loader", loader, split)
    split, in_tokens = ByDefault() if split is None else split, target_tokens is not None
    target = target_tokens if in_tokens else target_batch
    assert target is not None
    cut = stream(loader, target, in_tokens=in_tokens, drop_last=drop_last, split=split)
    return (window if window.carries_numbers() else window.joined() for window in _refusing_void(cut))


def _refusing_void(windows: Generator[Window, None, bool]) -> Iterator[Window]:
    if (yield from windows):
        raise InvalidInputError(f"target_tokens= finds no token in the loader's samples: {TOKENS_ARE}")


def check_target(target_batch: int | None, target_tokens: int | None) -> None:
    """Check the target of an optimizer step.

    Raises:
        InvalidInputError: There is no target, there are two, or it is not valid.
    """
    if target_tokens is None and target_batch is None:
        raise InvalidInputError(
            "there is no target: pass target_batch=, the samples of an optimizer step, or target_tokens=, its tokens"
        )
    if target_tokens is not None and target_batch is not None:
        raise InvalidInputError(
            f"target_batch={shown(target_batch)} and target_tokens={shown(target_tokens)} are two targets of one "
            "optimizer step; pass one of them"
        )
    if target_tokens is not None:
        check_positive_int("target_tokens", target_tokens)
    else:
        check_positive_int("target_batch", target_batch)


def stream(
    batches: Iterable[Any],
    targets: int | Iterable[int],
    *,
    in_tokens: bool = False,
    drop_last: bool = False,
    skip: int = 0,
    split: Split | None = None,
) -> Generator[Window, None, bool]:
    """Regroup batches into `Window`s without joining them; arguments as for `windows`, already checked.

    The first `skip` samples of the first batch are left out: in a resumed loader, an earlier window has used them.
    `targets` counts samples, or tokens, of which windows hold as many whole samples as come nearest; it may be an
    iterable of one number for each window.

    Returns:
        Whether there were samples, and no token in any of them.

    Raises:
        InvalidInputError: A batch cannot be cut, or the loader writes the next one into its tensors.
    """
    numbers = itertools.repeat(targets) if isinstance(targets, int) else iter(targets)
    spans: list[Span] = []
    versions: list[tuple[Tensor, int]] = []  # of the tensors of the spans, when these were added
    target = missing = 0
    samples = tokens = 0
    for batch in batches:
        piece = piece_of(batch, split)
        # What is in the first sample, in the first two, ...
        counted = [0, *itertools.accumulate(tokens_of(piece))] if in_tokens else range(piece.samples + 1)
        samples, tokens = samples + piece.samples, tokens + counted[-1]
        start, skip = skip, 0
        while start < piece.samples:
            if not spans:
                target = missing = next(numbers)  # only once there is a sample: the size is not known before
            end = counted[start] + missing
            stop = bisect_left(counted, end, start + 1)
            is_full = stop <= piece.samples
            if not is_full:
                stop = piece.samples
            elif counted[stop] - end > end - counted[stop - 1] < target:
                stop -= 1  # its last sample would take it farther from its target than it is
            if stop > start:
                spans.append(Span(piece, start, stop))
                versions += _versions(piece)
            missing, start = end - counted[stop], stop
            if is_full:
                _refuse_written(versions)
                found = [Window.of_spans(spans, split, stop if stop < piece.samples else None)]
                spans, versions = [], []
                yield found.pop()  # nothing is kept here of what the window does not hold any more
    _refuse_written(versions)
    if spans and missing < target and not drop_last:  # samples of which no token counts add nothing
        yield Window.of_spans(spans, split)
    return samples > 0 and not tokens


def _versions(piece: Piece) -> list[tuple[Tensor, int]]:
    plain = (tensor for tensor in piece.tensors() if tensor.layout is torch.strided and not tensor.is_inference())
    return [(tensor, tensor._version) for tensor in plain]


def _refuse_written(versions: Sequence[tuple[Tensor, int]]) -> None:
    """Reject a loader that has written into batches that wait for the rest of their window."""
    for number, (tensor, before) in enumerate(versions):
        # A write into another part of the same memory counts too.
        if tensor._version != before and any(_overlap(tensor, later) for later, _ in versions[number + 1 :]):
            raise InvalidInputError(
                "the loader writes each batch into the tensors of the batch before, so a window of several batches "
                "holds only the last batch; yield new tensors, such as tensor.clone()"
            )


def _overlap(tensor: Tensor, other: Tensor) -> bool:
    (start, stop), (its_start, its_stop) = _memory_of(tensor), _memory_of(other)
    return start < its_stop and its_start < stop


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size() if tensor.numel() else start


def tokens_of(piece: Piece) -> list[int]:
    """Return the tokens of each sample in a batch, or in a list of samples."""
    if isinstance(piece, NestedPiece):
        cut = piece.by_sample()
        for name, void in _COUNTED.items():
            for path, columns in cut:
                is_class = columns.dim() == 1 or (name == _LABELS and columns.is_floating_point())
                if not is_class and _is_named(name, path, piece.batch):
                    counts: list[int] = (columns != void).flatten(1).sum(1).tolist()
                    return counts
        largest = max((tensor.numel() for tensor in piece.tensors()), default=0)
        return [largest // max(piece.samples, 1)] * piece.samples
    if isinstance(piece.batch, list | tuple) and len(piece.batch) == piece.samples:
        return list(map(_of_sample, piece.batch))
    raise InvalidInputError(
        f"target_tokens= cannot tell the tokens of each sample in a {type(piece.batch).__name__}; have the loader "
        "yield tensors, or lists of samples (collate_fn=list, split=autoaccum.ListOfSamples(collate))"
    )


def _is_named(name: str, path: Path, batch: Any) -> bool:
    """Whether the tensor at a path has a name in a mapping, or is the labels as the targets of a pair."""
    if isinstance(batch, list | tuple) and path == (1,):
        return name == _LABELS and len(batch) == _PAIR
    return len(path) <= _PAIR and path[-1:] == (name,)


def _of_sample(sample: Any) -> int:
    for name, void in _COUNTED.items() if isinstance(sample, Mapping) else ():
        if name in sample:
            values = torch.as_tensor(sample[name])
            if values.dim():
                return int((values != void).sum())
    return elements_of(sample)
