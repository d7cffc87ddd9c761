"""Says what the lists in a loader's batch are: samples, or the fields of samples. Cuts nothing.

`torch.utils.data.default_collate` makes lists of fields ([ids, mask, labels]); a collator for samples of unlike shapes
makes lists of samples (images with their boxes). A list's length alone decides nothing. What stays open is refused,
since the wrong reading trains on something else without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autoaccum._data.nesting import holds_tensor, tensors_in
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
_POSITIONS, _BOUNDS = "position_ids", "cu_seq_lens_q"


def lists_of_samples(batch: Any) -> frozenset[int]:
    """Return the ids of the lists and tuples directly in a batch whose items are its samples.

    They are samples only beside targets of the same number: (images, dictionaries), or lists whose tensors do not agree
    in their first dimension, which fields do.

    Raises:
        InvalidInputError: Lists of equal tensors can be read either way.
    """
    members = list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else []
    lists = [member for member in members if type(member) in (list, tuple) and member]
    of_tensors = [one for one in lists if all(map(holds_tensor, one))]
    if not of_tensors:
        if type(batch) is list and len(members) > _PAIR and _look_like_samples(members):  # a pair is (inputs, targets)
            raise _open(members)
        return frozenset()
    samples = len(of_tensors[0])
    tensors = [member for member in members if isinstance(member, Tensor) and member.dim()]
    beside = [one for one in lists if len(one) == samples]
    can_be_samples = all(len(one) == samples for one in of_tensors) and all(len(one) == samples for one in tensors)
    has_mappings = any(isinstance(item, Mapping) for one in of_tensors for item in one)
    firsts = {tensor.shape[0] for tensor in chain(tensors, *map(tensors_in, of_tensors)) if tensor.dim()}
    if not can_be_samples or (len(beside) == 1 and not tensors):
        return frozenset()
    has_others = len(beside) > len(of_tensors) and firsts != {samples}
    if has_mappings or (len(beside) > 1 and (has_others or len(firsts) > 1)):
        return frozenset(map(id, beside))
    if any(map(_look_like_samples, of_tensors)):
        raise _open(of_tensors[0])
    return frozenset()


def refuse_flattened(batch: Any) -> None:
    """Reject a row into which a collator has flattened several sequences: its samples cannot be told from its shape.

    Raises:
        InvalidInputError: The batch has a single row, and its position ids restart or bounds are given.
    """
    if not isinstance(batch, Mapping):
        return
    sequences, how = 0, ""
    positions, bounds = batch.get(_POSITIONS), batch.get(_BOUNDS)
    if isinstance(positions, Tensor) and positions.dim() == _PAIR and positions.shape[0] == 1:
        sequences, how = int((positions == 0).sum()), f"{_POSITIONS} restart"
    if isinstance(bounds, Tensor) and bounds.dim() == 1:
        sequences, how = len(bounds) - 1, f"{_BOUNDS} bounds them"
    if sequences > 1:
        raise InvalidInputError(
            f"a batch is one row of {sequences} sequences ({how}), which would count as one sample; have the loader "
            "yield lists of sequences (collate_fn=list) and pass split=autoaccum.ListOfSamples(your_collator), or "
            "split=autoaccum.Along(0) if a row is what you mean by a sample"
        )


def _look_like_samples(items: Sequence[Any]) -> bool:
    first = items[0]
    if all(isinstance(item, Mapping) for item in items):
        return len(items) > _MANY_FIELDS and all(set(item) == set(first) for item in items)
    if len(items) < _PAIR or not all(isinstance(item, Tensor) for item in items):
        return False
    if any(item.shape != first.shape or item.dtype != first.dtype for item in items):
        return False
    holds_values = first.is_floating_point() or not first.dtype.is_signed
    is_image = first.dim() == _IMAGE_DIMS and first.shape[0] in _CHANNELS
    return holds_values and (is_image or (len(items) > _MANY_FIELDS and first.dim() <= _IMAGE_DIMS))


def _open(items: Sequence[Any]) -> InvalidInputError:
    tensors = tensors_in(items[0])
    shape = tuple(tensors[0].shape) if tensors else ()
    what = f"tensors of shape {shape}" if isinstance(items[0], Tensor) else "mappings with equal keys"
    fields = f"the {len(items)} fields of {shape[0] if shape else 0} samples"
    return InvalidInputError(
        f"a batch holds a {type(items).__name__} of {len(items)} {what}: {len(items)} samples, or {fields}; "
        "pass split=autoaccum.ListOfSamples(collate) for samples, split=autoaccum.Along(0) for fields"
    )
