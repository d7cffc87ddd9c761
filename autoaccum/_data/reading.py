"""Says what the lists in a loader's batch are: samples, or the fields of samples. Cuts nothing.

`torch.utils.data.default_collate` makes lists of fields ([ids, mask, labels]); a collator for samples of unlike shapes
makes lists of tensors beside lists of mappings (images and their boxes). Whatever else can be read both ways is
refused, since the wrong reading trains on something else without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autoaccum._data.nesting import form_of, holds_tensor, tensors_in
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

# The dimensions of an image (C, H, W), and its numbers of channels.
_IMAGE_DIMS = 3
_CHANNELS = (1, 3, 4)
# More equal tensors than this in one list are more likely samples than fields.
_MANY_FIELDS = 8
_PAIR = 2
# What Transformers' collators call the positions within sequences, and the bounds of sequences in a row.
_POSITIONS, _BOUNDS, _MASK, _ROWS = "position_ids", "cu_seq_lens_q", "attention_mask", "input_ids"
_SAMPLES, _FIELDS = "samples", "fields"


class Reading:
    """How the lists in batches of one form are read, which the first batch of that form decides.

    A later batch can be open by accident: a last batch of three samples with three fields each is read as those before
    it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], str] = {}

    def lists_of_samples(self, batch: Any) -> frozenset[int]:
        """Return the ids of the lists and tuples directly in a batch whose items are its samples."""
        is_mapping = isinstance(batch, Mapping)
        members = list(batch.values()) if is_mapping else batch if isinstance(batch, list | tuple) else ()
        lists = [member for member in members if type(member) in (list, tuple) and member]
        of_tensors = [one for one in lists if all(map(holds_tensor, one))]
        if not of_tensors and type(batch) is not list:
            return frozenset()
        form = type(batch), tuple(batch) if is_mapping else len(members) if of_tensors else 0
        known = self._known.get(form)
        if of_tensors:
            found = _reading_of(batch, members, lists, of_tensors)
        else:  # the batch itself is the list; a pair is (inputs, targets)
            found = None if len(members) > _PAIR and _look_like_samples(members) else _FIELDS
        found = found or known
        if found is None:
            raise _open(of_tensors[0] if of_tensors else members)
        if known not in (None, found):
            raise InvalidInputError(
                f"the lists of a batch hold {found}, and those of batches before held {known}; pass split=autoaccum."
                "ListOfSamples(collate) for samples, split=autoaccum.Along(0) for fields"
            )
        self._known[form] = found
        samples = len(of_tensors[0]) if found == _SAMPLES else -1
        return frozenset(id(one) for one in lists if len(one) == samples)


def _reading_of(batch: Any, members: Sequence[Any], lists: Sequence[Any], of_tensors: Sequence[Any]) -> str | None:
    """Return the reading of lists that hold tensors; None if it is open."""
    samples = len(of_tensors[0])
    tensors = [one for one in members if isinstance(one, Tensor) and one.dim()]
    sizes = {len(one) for one in (*of_tensors, *tensors)}
    can_be_samples = sizes == {samples} and (tensors or sum(len(one) == samples for one in lists) > 1)
    inside = [tensor for tensor in tensors_in(of_tensors) if tensor.dim()]
    can_be_fields = len({len(one) for one in (*tensors, *inside)}) <= 1
    kinds = [set(map(form_of, one)) for one in of_tensors]
    has_mappings = any(isinstance(item, Mapping) for one in of_tensors for item in one)
    has_tensors = any(isinstance(one[0], Tensor) for one in of_tensors)
    if can_be_samples and has_mappings and (has_tensors or not can_be_fields):
        return _SAMPLES
    # default_collate makes lists, and no tuples, of what samples hold in tuples or lists.
    is_collated = type(batch) is list or (isinstance(batch, Mapping) and not tensors)
    is_collated = is_collated and samples > 1 and all(type(one) is list for one in of_tensors)
    # Lists of samples are alike, each by itself; fields may be.
    looks_like_samples = has_mappings or (len(kinds) > 1 and all(len(forms) == 1 for forms in kinds))
    is_fields = not can_be_samples or (can_be_fields and (is_collated or not looks_like_samples))
    return _FIELDS if is_fields and not any(map(_are_images, of_tensors)) else None


def refuse_flattened(batch: Any) -> None:
    """Reject a row into which a collator has flattened several sequences: its samples cannot be told from its shape."""
    if not isinstance(batch, Mapping):
        return
    sequences, how = 0, ""
    positions, bounds = batch.get(_POSITIONS), batch.get(_BOUNDS)
    if isinstance(positions, Tensor) and positions.dim() == _PAIR and positions.shape[0] == 1:
        sequences, how = _sequences_by(positions[0], batch.get(_MASK)), f"{_POSITIONS} restart"
    if isinstance(bounds, Tensor) and bounds.dim() == 1:
        sequences, how = len(bounds) - 1, f"{_BOUNDS} bounds them"
    if sequences > 1:
        raise InvalidInputError(
            f"a batch is one row of {sequences} sequences ({how}), which would count as one sample; have the loader "
            "yield lists of sequences (collate_fn=list) and pass split=autoaccum.ListOfSamples(your_collator), cut the "
            "row with split=autoaccum.PackedRows(), or pass split=autoaccum.Along(0) if a row is what you mean by a "
            "sample"
        )


def is_packed(batch: Any) -> bool:
    """Whether a batch of several samples is one row, which says where each begins."""
    if not isinstance(batch, Mapping):
        return False
    row, says = batch.get(_ROWS), (batch.get(_POSITIONS), batch.get(_BOUNDS))
    return isinstance(row, Tensor) and row.dim() > 1 and len(row) == 1 and any(isinstance(one, Tensor) for one in says)


def _sequences_by(positions: Tensor, mask: Any) -> int:
    """Return how many sequences begin in a row, by its position ids; those of padding are often 0."""
    begins = positions == 0
    if isinstance(mask, Tensor) and mask.shape == (1, len(positions)):
        return int((begins & (mask[0] != 0)).sum())
    others = (~begins).nonzero().flatten().tolist()
    # Zeros in front of the first sequence and behind the last may be padding.
    return 1 + int(begins[others[0] : others[-1]].sum()) if others else len(positions)


def _look_like_samples(items: Sequence[Any]) -> bool:
    """Whether the items of a list are images, or more values alike than a sample has fields."""
    first = items[0]
    if len(items) <= _MANY_FIELDS or len(set(map(form_of, items))) > 1:
        return _are_images(items)
    if isinstance(first, Mapping):
        return True
    are_equal = isinstance(first, Tensor) and len({one.shape for one in items}) == 1
    return are_equal and 1 < first.dim() <= _IMAGE_DIMS and _holds_values(first)


def _are_images(items: Sequence[Any]) -> bool:
    return len(items) > 1 and all(
        isinstance(item, Tensor) and item.dim() == _IMAGE_DIMS and item.shape[0] in _CHANNELS and _holds_values(item)
        for item in items
    )


def _holds_values(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or not tensor.dtype.is_signed


def _open(items: Sequence[Any]) -> InvalidInputError:
    shapes = [tuple(tensor.shape) for tensor in tensors_in(items)] or [()]
    kind = "tensors" if isinstance(items[0], Tensor) else "mappings" if isinstance(items[0], Mapping) else "items"
    unlike = len(set(shapes))
    what = f"shape {shapes[0]}" if unlike == 1 else f"{unlike} shapes, {shapes[0]} the first"
    number, fields = len(items), shapes[0][0] if shapes[0] else 0
    return InvalidInputError(
        f"a batch holds a {type(items).__name__} of {number} {kind} of {what}: {number} samples, or {number} fields of "
        f"{fields} samples; pass split=autoaccum.ListOfSamples(collate) for samples, split=autoaccum.Along(0) for "
        "fields"
    )
