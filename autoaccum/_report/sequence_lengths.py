"""Finds the sequence lengths in a loader's first batches, and cuts or pads a batch to a given length.

The memory of a step depends on the sequence length, which may differ between batches (each is padded to its own longest
sequence). Sequences run along the dimensions in which the batches differ; if none differ, along the second dimension of
token tensors, which are integer and of shape (samples, tokens). Padding repeats a batch's own values, so that tokens
stay in the model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._arguments import check_positive_int
from autoaccum._data.nesting import map_tensors, tensors_in
from autoaccum._report.records import Lengths
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_TOKENS = 2  # dimensions: samples and tokens
_FRAMES = 3  # samples, frames, features, as for audio and embeddings; images have one more


@dataclass(frozen=True, slots=True)
class _Run:
    """A dimension along which sequences run.

    Attributes:
        tensor: The tensor's index, in the order of the batch's nesting.
        dimension: The dimension.
        lengths: Its length in each batch.
    """

    tensor: int
    dimension: int
    lengths: tuple[int, ...]


def may_vary(batch: Any) -> bool:
    """Whether some tensor has the shape of sequences, so that more batches are worth drawing."""
    return any(_TOKENS <= tensor.dim() <= _FRAMES for tensor in tensors_in(batch))


def of_length(batch: Any, further: Sequence[Any], length: int | Mapping[str, int] | None) -> tuple[Any, Lengths | None]:
    """Return a batch whose sequences have the requested length, or the longest length seen.

    Args:
        batch: The loader's first batch.
        further: Its first batches.
        length: The length; a mapping by the batch's names if lengths differ. None means the longest seen.

    Returns:
        The batch, and the lengths seen; None for the latter if the batches hold no sequences.

    Raises:
        InvalidInputError: The length cannot be used, or the sequences it applies to are ambiguous.
    """
    tensors = tensors_in(batch)
    runs = _runs(tensors, [tensors_in(other) for other in further])
    if not runs:
        if length is not None:
            raise InvalidInputError(
                f"length={length!r}: the batch holds no sequences (no integer tensor of shape (samples, tokens), and "
                f"the {max(1, len(further))} seen differ in no dimension); omit it, and let the loader yield "
                "batches of that length"
            )
        return batch, None
    wanted = _wanted(runs, _names(batch, tensors), length)
    every = [number for run in runs for number in run.lengths]
    lengths = Lengths(
        shortest=min(every),
        longest=max(every),
        batches=max(1, len(further)),
        used=max(wanted.values()),
        is_asked=length is not None,
        varies=any(len(set(run.lengths)) > 1 for run in runs),
    )
    return _made(batch, tensors, wanted), lengths


def _runs(tensors: Sequence[Tensor], further: Sequence[Sequence[Tensor]]) -> list[_Run]:
    alike = [others for others in further if [other.dim() for other in others] == [one.dim() for one in tensors]]
    every = [
        _Run(number, dimension, (tensor.shape[dimension], *(others[number].shape[dimension] for others in alike)))
        for number, tensor in enumerate(tensors)
        for dimension in range(1, tensor.dim())
    ]
    varying = [run for run in every if len(set(run.lengths)) > 1]
    if varying:
        return varying
    return [run for run in every if tensors[run.tensor].dim() == _TOKENS and _holds_tokens(tensors[run.tensor])]


def _holds_tokens(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _names(batch: Any, tensors: Sequence[Tensor]) -> list[str]:
    """Name each tensor by its key in the batch, or by its index."""
    is_sequence = isinstance(batch, tuple | list)
    members: Any = batch.items() if isinstance(batch, Mapping) else enumerate(batch if is_sequence else ())
    named: dict[int, str] = {}
    for key, member in members:
        named |= {id(tensor): str(key) for tensor in tensors_in(member) if id(tensor) not in named}
    return [named.get(id(tensor), str(number)) for number, tensor in enumerate(tensors)]


def _wanted(runs: Sequence[_Run], names: Sequence[str], length: int | Mapping[str, int] | None) -> dict[_Run, int]:
    """Return the length for each.

    Raises:
        InvalidInputError: `length` is ambiguous, not positive, or names no sequence of the batch.
    """
    if length is None:
        return {run: max(run.lengths) for run in runs}
    if not isinstance(length, Mapping):
        check_positive_int("length", length)
        if len({run.lengths for run in runs}) > 1:
            found = ", ".join(f"{names[run.tensor]}: {_span(run.lengths)}" for run in runs)
            example = f"{names[runs[0].tensor]}={length}"
            raise InvalidInputError(
                f"length={length} is ambiguous: a batch holds sequences of several lengths ({found}); pass it by "
                f"name, as --length {example} (in Python length={{{names[runs[0].tensor]!r}: {length}}}); sequences "
                "without a name keep the longest length seen"
            )
        return dict.fromkeys(runs, length)
    known = {names[run.tensor] for run in runs}
    for name, number in length.items():
        check_positive_int(f"length of {name}", number)
        if name not in known:
            raise InvalidInputError(f"length of {name!r}: the batch has no such sequence; it has {', '.join(known)}")
    return {run: length.get(names[run.tensor], max(run.lengths)) for run in runs}


def _span(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    return str(low) if low == high else f"{low} to {high}"


def _made(batch: Any, tensors: Sequence[Tensor], wanted: Mapping[_Run, int]) -> Any:
    if all(run.lengths[0] == length for run, length in wanted.items()):
        return batch
    changed = list(tensors)
    for run, length in wanted.items():
        changed[run.tensor] = _as_long(changed[run.tensor], run.dimension, length)
    in_order = iter(changed)
    return map_tensors(lambda _: next(in_order), batch)


def _as_long(tensor: Tensor, dimension: int, length: int) -> Tensor:
    now = tensor.shape[dimension]
    if length <= now:
        return tensor.narrow(dimension, 0, length).clone()
    if now == 0:
        return tensor.new_zeros((*tensor.shape[:dimension], length, *tensor.shape[dimension + 1 :]))
    return tensor.index_select(dimension, torch.arange(length, device=tensor.device) % now)
