"""Flat buffers for sending lists of tensors between ranks, with the same layout on every rank.

The buffers are allocated once and kept, so that collective operations need no allocation: if filling a buffer fails on
one rank, its old contents are sent nevertheless, and no other rank is left waiting.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

# The default of DistributedDataParallel (bucket_cap_mb=25): large enough for the bandwidth of a network.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements `begin` to `end` of the flattened tensor `index`; `is_whole` if these are all of its elements."""

    index: int
    begin: int
    end: int
    is_whole: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of a real tensor, which must be contiguous if they are not all."""
        return tensor if self.is_whole else tensor.view(-1)[self.begin : self.end]


class Buckets:
    """Sends tensors of fixed shapes, a bucket at a time.

    Args:
        like: Tensors with the shapes, types and device of those that will be sent.
        bucket_bytes: Maximum size of a bucket.
    """

    def __init__(self, like: Sequence[Tensor], bucket_bytes: int = BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        by_type: dict[torch.dtype, list[tuple[int, int]]] = defaultdict(list)
        for index, tensor in enumerate(map(_real, like)):
            by_type[tensor.dtype].append((index, tensor.numel()))
        self._buckets: list[tuple[Tensor, list[_Piece]]] = []
        for dtype, sizes in by_type.items():
            chunks = _chunks(sizes, self._most(dtype))
            largest = max((sum(piece.end - piece.begin for piece in chunk) for chunk in chunks), default=0)
            buffer = torch.zeros(largest, dtype=dtype, device=like[0].device)  # for one after the other
            self._buckets += [(buffer, chunk) for chunk in chunks]

    def make_sendable(self, tensor: Tensor | None) -> Tensor | None:
        """Return a tensor in a form that can be sent: one that is sent in pieces must be contiguous."""
        if tensor is None or tensor.is_contiguous() or tensor.numel() <= self._most(tensor.dtype):
            return tensor
        return tensor.contiguous()

    @torch.no_grad()
    def exchange(
        self,
        tensors: Sequence[Tensor | None],
        send: Callable[[Tensor], None],
        *,
        factor: float | Tensor = 1.0,
        wanted: Sequence[bool] | None = None,
    ) -> Exception | None:
        """Send tensors and copy the results back, in place.

        Args:
            tensors: In the order of `like`. None sends zeros.
            send: Replaces a bucket's contents with the result.
            factor: Multiplied with the tensors before they are sent.
            wanted: Which of them are sent, the same on every rank; None for all.

        Returns:
            The first failure on this rank, after which the contents of the tensors are undefined; None on success.

        Raises:
            RankFailedError: From `send`.
        """
        failure: Exception | None = None
        for buffer, all_pieces in self._buckets:
            pieces = [piece for piece in all_pieces if wanted is None or wanted[piece.index]]
            if not pieces:
                continue
            sizes = [piece.end - piece.begin for piece in pieces]
            bucket = buffer[: sum(sizes)]
            held: list[tuple[Tensor, Tensor]] = []
            try:
                for piece, room in zip(pieces, torch.split(bucket, sizes), strict=True):
                    tensor = tensors[piece.index]
                    if tensor is None:
                        room.zero_()
                    else:
                        part = piece.of(_real(tensor))
                        held.append((part, room.view(part.shape)))
                if held:
                    torch._foreach_copy_([room for _, room in held], [part for part, _ in held])
                if not isinstance(factor, float) or factor != 1.0:
                    bucket.mul_(factor)
            except Exception as error:  # noqa: BLE001 - the others wait for this bucket, whatever its contents
                failure = failure or error
            send(bucket)
            if failure is None and held:
                try:
                    torch._foreach_copy_([part for part, _ in held], [room for _, room in held])
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
