"""Finds which columns of a padded batch are padding for a sample: what its attention mask or its lengths say.

Labels never say it, since those of a masked language model are -100 over real tokens; a label that counts keeps its
column, whatever the mask says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._arguments import check_function, shown
from autoaccum._data.nesting import paths_of
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._data.pieces import NestedPiece

# The names of Transformers' collators.
MASK, _POSITIONS, LABELS = "attention_mask", "position_ids", "labels"
IGNORED = -100
# What certainly has one entry for each token.
_SEQUENCES = frozenset(
    {"input_ids", MASK, _POSITIONS, LABELS, "token_type_ids", "special_tokens_mask", "inputs_embeds"}
)
# Samples and columns; further dimensions hold what is in a column.
_DIMS = 2

Lengths = str | Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Padding:
    """The padding of a batch.

    Attributes:
        lengths: By sample, the columns that it needs, counted from the left, or from the right if `is_left`.
        width: The columns of the batch.
        columns: The indices of the leaves that have these columns.
        is_left: Whether the padding is in front of all samples.
        told_by: What told the lengths.
        has_some_in_front: Whether there is padding in front of samples, whether it may go or not.
        not_widened: Why more padding would change a loss; empty if it would not.
    """

    lengths: tuple[int, ...]
    width: int
    columns: tuple[int, ...]
    is_left: bool
    told_by: str
    has_some_in_front: bool = False
    not_widened: str = ""


def check_lengths(lengths: object) -> None:
    """Check the argument `lengths`.

    Raises:
        InvalidInputError: It is neither a name nor a function of a batch.
    """
    if lengths is None or (isinstance(lengths, str) and lengths):
        return
    if not callable(lengths):
        raise InvalidInputError(
            f"lengths={shown(lengths)} is neither the name of a batch's entry nor a function of a batch; pass "
            "lengths='lengths', or a function that returns the columns of each sample that are no padding"
        )
    check_function("lengths", lengths, "batch")


def padding_of(piece: NestedPiece, lengths: Lengths | None) -> Padding | None:
    """Return the padding of a batch; None if nothing tells it.

    Args:
        piece: The batch.
        lengths: As for `fit`.

    Raises:
        InvalidInputError: The lengths are not one whole number for each sample, or longer than the batch is wide.
    """
    batch, leaves = piece.batch, piece.leaves
    mask = _mask_of(batch)
    if lengths is not None:
        wide = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() >= _DIMS]
        if not wide:
            return None
        width, told_by = wide[0].shape[1], "lengths="
        ends = _given(lengths, batch, piece.samples, width)
        starts = torch.zeros_like(ends)
    elif mask is not None:
        width, told_by = mask.shape[1], f"the {MASK}"
        starts, ends = _extents(mask)
    else:
        return None
    columns = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and piece.is_cut(index) and leaf.dim() >= _DIMS and leaf.shape[1] == width
    ]
    is_left = lengths is None and _is_padded_in_front(batch, starts, ends, width)
    needed = width - starts if is_left else ends
    labels = [leaves[index] for index in columns if is_label(leaves[index], batch)]
    not_widened = next(filter(None, (_not_widened(label, needed, is_left=is_left) for label in labels)), "")
    needed = _with_what_counts(needed, [leaves[index] for index in columns], batch, is_left=is_left)
    if any(_has_columns_behind(leaf, width) for leaf in leaves) or any(
        _holds_more_than_padding(piece, index, needed.clamp(1, width), is_left=is_left) for index in columns
    ):
        needed = torch.full_like(needed, width)
    if is_left and bool((needed > width).any()):
        # A causal model would predict it from the column that is put before it.
        not_widened = "a label in the first column would count once it is padded in front"
    return Padding(
        tuple(needed.clamp_(1, width).tolist()),
        width,
        tuple(columns),
        is_left,
        told_by,
        has_some_in_front=bool((starts > 0).any()),
        not_widened=not_widened,
    )


def _not_widened(label: Tensor, needed: Tensor, *, is_left: bool) -> str:
    """Return why a label cannot have further columns; empty if it can."""
    if label.is_floating_point():
        return "targets in floating point would have more columns, which a loss may run over"
    if label.dim() == _DIMS:
        beyond = label.detach().cpu()[_beyond(label.shape[1], needed, is_left=is_left)]
        if bool((beyond != IGNORED).any()):
            return f"labels in the padding are not {IGNORED}, so a loss may run over them"
    return ""


def _beyond(width: int, needed: Tensor, *, is_left: bool) -> Tensor:
    """Return which columns samples do not need, shape (samples, width)."""
    places = torch.arange(width)
    return places < width - needed[:, None] if is_left else places >= needed[:, None]


def width_of(piece: NestedPiece) -> int | None:
    """Return the columns of a batch of which nothing says what is padding, by its labels; None without any."""
    return next((labels.shape[1] for labels in counting_labels(piece.batch)), None)


def _mask_of(batch: Any) -> Tensor | None:
    """Return the attention mask of a batch, shape (samples, columns)."""
    for part in batch if isinstance(batch, list | tuple) else (batch,):
        found = part.get(MASK) if isinstance(part, Mapping) else None
        if isinstance(found, Tensor) and found.dim() == _DIMS:
            return found
    return None


def _given(lengths: Lengths, batch: Any, samples: int, width: int) -> Tensor:
    if isinstance(lengths, str):
        found = batch.get(lengths) if isinstance(batch, Mapping) else None
        if found is None:
            raise InvalidInputError(
                f"lengths={lengths!r}: the loader's batches have no entry of that name; name one that they have, or "
                "pass a function of a batch"
            )
    else:
        found = lengths(batch)
    return checked_lengths(found, samples, width)


def checked_lengths(found: Any, samples: int, width: int | None = None) -> Tensor:
    """Return lengths as a tensor, shape (samples,).

    Raises:
        InvalidInputError: They are not one whole number for each sample from 0 to `width`.
    """
    try:
        each = found if isinstance(found, Tensor) else torch.tensor(list(found))
    except (TypeError, ValueError, RuntimeError):
        each = torch.empty(0, 0)
    is_whole = each.dtype is not torch.bool and not each.is_floating_point() and not each.is_complex()
    if each.shape != (samples,) or not is_whole:
        raise InvalidInputError(
            f"lengths= gave {shown(found)} for a batch of {samples} samples; return one whole number for each"
        )
    each = each.detach().to("cpu", torch.int64, copy=True)
    if samples and (int(each.min()) < 0 or (width is not None and int(each.max()) > width)):
        bound = "" if width is None else f" to {width}, the columns of the batch"
        raise InvalidInputError(
            f"lengths= gave {int(each.min())} to {int(each.max())} columns; return numbers from 0{bound}"
        )
    return each


def _extents(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the first real column of each row is, and where the last one ends, each of shape (samples,)."""
    real = mask.detach().cpu() != 0
    places = torch.arange(1, real.shape[1] + 1)
    ends = (real * places).amax(1) if real.numel() else torch.zeros(len(real), dtype=torch.int64)
    starts = real.to(torch.uint8).argmax(1) if real.numel() else torch.zeros_like(ends)
    return starts, ends


def _is_padded_in_front(batch: Any, starts: Tensor, ends: Tensor, width: int) -> bool:
    """Whether leading columns may go: all padding is there, and positions do not come from the columns."""
    has_positions = any(
        isinstance(part, Mapping) and part.get(_POSITIONS) is not None
        for part in (batch if isinstance(batch, list | tuple) else (batch,))
    )
    return has_positions and bool((starts > 0).any()) and bool((ends == width).all())


def _with_what_counts(needed: Tensor, leaves: Iterable[Tensor], batch: Any, *, is_left: bool) -> Tensor:
    """Return the columns that samples need, with those that hold a label that counts or other values of weight."""
    labels = _labels_of(batch)
    for leaf in leaves:
        is_label = any(leaf is label for label in labels)
        if leaf.is_floating_point():
            # Weights of tokens are 0 where there is padding; what else a number may mean is not known.
            if leaf.dim() == _DIMS or is_label:
                needed = torch.maximum(needed, _reach(leaf.detach().cpu() != 0, is_left=is_left, is_whole=is_label))
        elif is_label and leaf.dim() == _DIMS:
            reach = _reach(leaf.detach().cpu() != IGNORED, is_left=is_left, is_whole=False)
            # A causal model predicts a label from the column before it.
            needed = torch.maximum(needed, reach + 1 if is_left else reach)
    return needed


def _holds_more_than_padding(piece: NestedPiece, index: int, needed: Tensor, *, is_left: bool) -> bool:
    """Whether a leaf may be as wide by accident and no sequence: a table of features, a matrix of token pairs.

    Where its name does not tell, padding is the same value everywhere.
    """
    leaf = piece.leaves[index]
    width = leaf.shape[1]
    name = paths_of(piece.batch)[index][-1:]
    if name and name[0] in _SEQUENCES:
        return False
    if width in leaf.shape[_DIMS:]:
        return True
    if leaf.dim() == _DIMS and leaf.is_floating_point():
        return False  # weights of tokens
    values = leaf.detach().cpu()[_beyond(width, needed, is_left=is_left)]
    return bool(values.numel()) and not bool((values == values.flatten()[0]).all())


def _has_columns_behind(leaf: Any, width: int) -> bool:
    """Whether a leaf has as many entries in a later dimension alone, as a mask of pairs of tokens (N, 1, T, T) has."""
    return isinstance(leaf, Tensor) and leaf.dim() > _DIMS and leaf.shape[1] != width and width in leaf.shape[_DIMS:]


def _reach(counts: Tensor, *, is_left: bool, is_whole: bool) -> Tensor:
    """Return how many columns hold all that counts in each row; the whole width if a loss may run over zeros too."""
    rows, width = counts.shape[:2]
    if is_whole or not counts.numel():
        return torch.full((rows,), width)
    starts, ends = _extents(counts)
    return torch.where(counts.any(1), width - starts if is_left else ends, 0)


def _labels_of(batch: Any) -> Sequence[Tensor]:
    """Return the labels in a batch: the entry of that name, or the targets of a pair."""
    if isinstance(batch, Mapping):
        found = [batch.get(LABELS)]
    elif isinstance(batch, list | tuple) and len(batch) == _DIMS:
        inputs, targets = batch
        own = inputs.get(LABELS) if isinstance(inputs, Mapping) else None
        found = [own, *(targets.values() if isinstance(targets, Mapping) else (targets,))]
    else:
        found = []
    return [one for one in found if isinstance(one, Tensor)]


def counting_labels(batch: Any) -> Iterable[Tensor]:
    """Yield the labels in a batch that are one for each token, shape (samples, tokens, ...)."""
    for labels in _labels_of(batch):
        if labels.dim() >= _DIMS and not labels.is_floating_point():
            yield labels


def fill_of(leaf: Tensor, name: Any, padding: Padding, *, is_label: bool) -> float | None:
    """Return what stands in the padding of a leaf; None if no sample has any, and its name does not tell.

    Args:
        leaf: The leaf, shape (samples, columns, ...).
        name: The last key on its path.
        padding: The batch's padding.
        is_label: Whether it is a label.
    """
    if is_label and not leaf.is_floating_point():
        return IGNORED
    if name in (MASK, _POSITIONS) or leaf.is_floating_point() or leaf.dtype is torch.bool:
        return 0
    shortest = min(range(len(padding.lengths)), key=padding.lengths.__getitem__)
    if padding.lengths[shortest] == padding.width or leaf.dim() > _DIMS:
        return None
    return int(leaf[shortest, 0 if padding.is_left else -1])


def is_label(leaf: Tensor, batch: Any) -> bool:
    """Whether a leaf of a batch is a label."""
    return any(leaf is one for one in _labels_of(batch))
