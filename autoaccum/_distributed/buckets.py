"""Sums lists of tensors over ranks in flat buffers, with the same layout on every rank.

The buffers are allocated once and kept, so that collective operations need no allocation: if filling a buffer fails on
one rank, its old contents are sent nevertheless, and no other rank is left waiting.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from torch import Tensor

_T = TypeVar("_T")
# The default of DistributedDataParallel (bucket_cap_mb=25): large enough for the bandwidth of a network.
BUCKET_BYTES = 25 * 2**20


class Outcome:
    """A rank's own work while others wait for what it sends. After a failure, no more work is done.

    Attributes:
        failure: The first failure, of which the others have yet to be informed.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def run(self, work: Callable[[], _T]) -> _T | None:
        """Do some work and return its result; None if it, or anything before it, has failed."""
        if self.failure is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - the others are informed first
                self.failure = error
        return None


class _Piece(NamedTuple):
    """Some rows of the tensor of this number, or all of it; and how many elements they have."""

    tensor: int
    rows: slice | None
    size: int


class Buckets:
    """Sums tensors of fixed shapes in buckets.

    Args:
        like: Tensors with the shapes and types of those that will be sent.
        device: Their device.
        copied: Which of them are copied bit by bit from the one rank on which they are not zero, by their indices.
        bucket_bytes: Maximum size of a bucket, unless a single row of a tensor is larger.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        device: torch.device,
        copied: Collection[int] = (),
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        groups: dict[tuple[torch.dtype, bool], list[_Piece]] = defaultdict(list)
        for number, tensor in enumerate(like):
            groups[tensor.dtype, number in copied] += _pieces(number, tensor, bucket_bytes // tensor.dtype.itemsize)
        self._buckets: list[tuple[Tensor, list[_Piece], bool]] = []
        for (dtype, is_copied), pieces in groups.items():
            buckets = _packed(pieces, bucket_bytes // dtype.itemsize)
            largest = max((sum(piece.size for piece in bucket) for bucket in buckets), default=0)
            buffer = torch.zeros(largest, dtype=dtype, device=device)
            self._buckets += [(buffer, bucket, is_copied) for bucket in buckets]

    @torch.no_grad()
    def add_up(
        self,
        outcome: Outcome,
        tensors: Sequence[Tensor | None],
        all_reduce: Callable[[Tensor], None],
        *,
        factors: Sequence[float | Tensor],
        wanted: Sequence[bool] | None = None,
    ) -> None:
        """Replace tensors, in place, by their sums over all ranks; after a failure, their contents are undefined.

        Args:
            outcome: Of this rank's own work.
            tensors: In the order of `like`, as `as_plain` returns them. None counts as zeros.
            all_reduce: Replaces a bucket by its sum.
            factors: What each is multiplied by before; for those that are copied, whether this rank has them.
            wanted: Which of them are exchanged, the same on every rank; None for all.
        """
        for buffer, all_pieces, is_copied in self._buckets:
            pieces = [piece for piece in all_pieces if wanted is None or wanted[piece.tensor]]
            if not pieces:
                continue
            bucket = buffer[: sum(piece.size for piece in pieces)]
            filled = outcome.run(partial(_filled, bucket, pieces, tensors, factors, is_copied=is_copied))
            # Where all ranks but one have zeros, a sum of bytes is a copy. Not every network adds up every type.
            all_reduce(bucket.view(torch.uint8) if is_copied else bucket)
            if filled is not None and filled[0]:
                outcome.run(partial(torch._foreach_copy_, *filled))


def _filled(
    bucket: Tensor,
    pieces: Sequence[_Piece],
    tensors: Sequence[Tensor | None],
    factors: Sequence[float | Tensor],
    *,
    is_copied: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Fill a bucket; return the parts of tensors that are in it, and where they are."""
    parts, rooms = [], []
    for piece, room in zip(pieces, torch.split(bucket, [piece.size for piece in pieces]), strict=True):
        tensor, factor = tensors[piece.tensor], factors[piece.tensor]
        if tensor is None:
            room.zero_()
            continue
        parts.append(tensor if piece.rows is None else tensor[piece.rows])
        rooms.append(room.view(parts[-1].shape))
        if not is_copied:
            torch.mul(parts[-1], factor, out=rooms[-1])
        elif factor:
            rooms[-1].copy_(parts[-1])
        else:
            room.zero_()
    return parts, rooms


def _pieces(number: int, tensor: Tensor, most: int) -> Iterator[_Piece]:
    """Yield a tensor as a whole if it has no more elements than that, else some of its rows at a time."""
    size = tensor.numel()
    if size and (size <= most or not tensor.dim()):
        yield _Piece(number, None, size)
    elif size:
        row = size // len(tensor)
        step = max(1, most // row)
        for at in range(0, len(tensor), step):
            yield _Piece(number, slice(at, at + step), row * min(step, len(tensor) - at))


def _packed(pieces: Iterable[_Piece], most: int) -> list[list[_Piece]]:
    """Return pieces in buckets of at most so many elements, or of a single piece."""
    buckets: list[list[_Piece]] = []
    room = 0
    for piece in pieces:
        if piece.size > room:
            buckets.append([])
            room = most
        buckets[-1].append(piece)
        room -= piece.size
    return buckets


def as_plain(tensor: Tensor) -> Tensor:
    """Return a tensor with a place in memory for each element that holds its value; the same one if it is that already.

    An expanded tensor has fewer places, and one with a conjugate or negative bit holds other values.
    """
    if tensor.is_conj() or tensor.is_neg() or 0 in tensor.stride():
        return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor.detach())
    return tensor
