"""Sums lists of tensors over ranks in flat buffers, with the same layout on every rank.

The buffers are allocated once and kept, so that collective operations need no allocation: if filling a buffer fails on
one rank, its old contents are sent nevertheless, and no other rank is left waiting.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor

# The default of DistributedDataParallel (bucket_cap_mb=25): large enough for the bandwidth of a network.
BUCKET_BYTES = 25 * 2**20


class _Piece(NamedTuple):
    """Some rows of the tensor of this number, or all of it; and how many elements they have."""

    tensor: int
    rows: slice | None
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of a tensor."""
        return tensor if self.rows is None else tensor[self.rows]


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
        groups: dict[tuple[torch.dtype, bool], list[tuple[int, Tensor]]] = defaultdict(list)
        for number, tensor in enumerate(like):
            groups[tensor.dtype, number in copied].append((number, tensor))
        self._buckets: list[tuple[Tensor, list[_Piece], bool]] = []
        for (dtype, is_copied), tensors in groups.items():
            chunks = _chunks(tensors, max(1, bucket_bytes // dtype.itemsize))
            largest = max((sum(piece.size for piece in chunk) for chunk in chunks), default=0)
            buffer = torch.zeros(largest, dtype=dtype, device=device)
            self._buckets += [(buffer, chunk, is_copied) for chunk in chunks]

    @torch.no_grad()
    def add_up(
        self,
        tensors: Sequence[Tensor | None],
        all_reduce: Callable[[Tensor], None],
        *,
        factors: Sequence[float | Tensor],
        wanted: Sequence[bool] | None = None,
    ) -> Exception | None:
        """Replace tensors, in place, by their sums over all ranks.

        Args:
            tensors: In the order of `like`, as `as_plain` returns them. None counts as zeros.
            all_reduce: Replaces a bucket by its sum.
            factors: What each is multiplied by before; 1.0 or 0.0 for those that are copied.
            wanted: Which of them are exchanged, the same on every rank; None for all.

        Returns:
            The first failure on this rank, after which the contents of the tensors are undefined; None on success.
        """
        failure = None
        for buffer, all_pieces, is_copied in self._buckets:
            pieces = [piece for piece in all_pieces if wanted is None or wanted[piece.tensor]]
            if not pieces:
                continue
            sizes = [piece.size for piece in pieces]
            bucket, rooms, parts = buffer[: sum(sizes)], [], []
            try:
                for piece, room in zip(pieces, torch.split(bucket, sizes), strict=True):
                    tensor, factor = tensors[piece.tensor], factors[piece.tensor]
                    if tensor is not None:
                        parts.append(piece.of(tensor))
                        rooms.append(room.view(parts[-1].shape))
                    if tensor is None or (isinstance(factor, float) and factor == 0.0):
                        room.zero_()
                    elif isinstance(factor, float) and factor == 1.0:
                        rooms[-1].copy_(parts[-1])
                    else:
                        torch.mul(parts[-1], factor, out=rooms[-1])
            except Exception as error:  # noqa: BLE001 - the others wait for this bucket, whatever its contents
                failure = failure or error
            # Where all ranks but one have zeros, a sum of bytes is a copy. Not every network adds up every type.
            all_reduce(bucket.view(torch.uint8) if is_copied else bucket)
            if failure is None and parts:
                try:
                    torch._foreach_copy_(parts, rooms)
                except Exception as error:  # noqa: BLE001 - the others also wait for the next bucket
                    failure = error
        return failure


def _chunks(tensors: Sequence[tuple[int, Tensor]], most: int) -> list[list[_Piece]]:
    """Return the pieces in each bucket: whole tensors as long as they fit, rows of larger ones; with their numbers."""
    chunks: list[list[_Piece]] = []
    room = 0
    for number, tensor in tensors:
        size = tensor.numel()
        if size > most and tensor.dim():
            row = size // len(tensor)
            parts = [slice(at, at + max(1, most // row)) for at in range(0, len(tensor), max(1, most // row))]
            chunks += [[_Piece(number, rows, row * len(tensor[rows]))] for rows in parts]
            room = 0
        elif size:
            if size > room:
                chunks.append([])
                room = most
            chunks[-1].append(_Piece(number, None, size))
            room -= size
    return chunks


def as_plain(tensor: Tensor) -> Tensor:
    """Return a tensor with a place in memory for each element that holds its value; the same one if it is that already.

    An expanded tensor has fewer places, and one with a conjugate or negative bit holds other values.
    """
    if tensor.is_conj() or tensor.is_neg() or 0 in tensor.stride():
        return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor.detach())
    return tensor
