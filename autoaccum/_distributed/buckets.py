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
    """Elements `begin` to `end` of the flattened tensor `index`; `is_whole` if these are all of its elements."""

    index: int
    begin: int
    end: int
    is_whole: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of a tensor, which must be contiguous if they are not all."""
        tensor = _real(tensor)
        return tensor if self.is_whole else tensor.view(-1)[self.begin : self.end]


class Buckets:
    """Sums tensors of fixed shapes in buckets.

    Args:
        like: Tensors with the shapes, types and device of those that will be sent.
        copied: Which of them are copied bit by bit from the one rank on which they are not zero, by their indices.
        bucket_bytes: Maximum size of a bucket.
    """

    def __init__(self, like: Sequence[Tensor], copied: Collection[int] = (), bucket_bytes: int = BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        groups: dict[tuple[torch.dtype, bool], list[tuple[int, int]]] = defaultdict(list)
        for index, tensor in enumerate(map(_real, like)):
            groups[tensor.dtype, index in copied].append((index, tensor.numel()))
        self._buckets: list[tuple[Tensor, list[_Piece], bool]] = []
        for (dtype, is_copied), sizes in groups.items():
            chunks = _chunks(sizes, self._most(dtype))
            largest = max((sum(piece.end - piece.begin for piece in chunk) for chunk in chunks), default=0)
            buffer = torch.zeros(largest, dtype=dtype, device=like[0].device)
            self._buckets += [(buffer, chunk, is_copied) for chunk in chunks]

    def make_sendable(self, tensor: Tensor | None) -> Tensor | None:
        """Return a tensor in a form that can be sent: one that is sent in pieces must be contiguous."""
        if tensor is None or tensor.is_contiguous() or tensor.numel() <= self._most(tensor.dtype):
            return tensor
        return tensor.contiguous()

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
            tensors: In the order of `like`. None counts as zeros.
            all_reduce: Replaces a bucket by its sum.
            factors: What each is multiplied by before; 1.0 or 0.0 for those that are copied.
            wanted: Which of them are exchanged, the same on every rank; None for all.

        Returns:
            The first failure on this rank, after which the contents of the tensors are undefined; None on success.
        """
        failure = None
        for buffer, all_pieces, is_copied in self._buckets:
            pieces = [piece for piece in all_pieces if wanted is None or wanted[piece.index]]
            if not pieces:
                continue
            sizes = [piece.end - piece.begin for piece in pieces]
            bucket, rooms, parts = buffer[: sum(sizes)], [], []
            try:
                for piece, room in zip(pieces, torch.split(bucket, sizes), strict=True):
                    tensor, factor = tensors[piece.index], factors[piece.index]
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

    def _most(self, dtype: torch.dtype) -> int:
        return max(1, self._bucket_bytes // dtype.itemsize)


def _chunks(sizes: Sequence[tuple[int, int]], most: int) -> list[list[_Piece]]:
    """Return the pieces in each bucket: whole tensors as long as they fit, larger ones cut; `sizes` with indices."""
    chunks: list[list[_Piece]] = []
    room = 0
    for index, size in sizes:
        if size > most:
            chunks += [[_Piece(index, at, min(at + most, size), is_whole=False)] for at in range(0, size, most)]
            room = 0
        elif size:
            if size > room:
                chunks.append([])
                room = most
            chunks[-1].append(_Piece(index, 0, size, is_whole=True))
            room -= size
    return chunks


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
