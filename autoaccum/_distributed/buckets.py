"""Flat buffers for sending lists of tensors between ranks, with the same layout on every rank.

The buffers are allocated once and kept, so that collective operations need no allocation: if filling a buffer fails on
one rank, its old contents are sent nevertheless, and no other rank is left waiting.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from autoaccum.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

# The default of DistributedDataParallel (bucket_cap_mb=25): large enough for the bandwidth of a network.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements `begin` to `end` of the flattened tensor `index`; `is_whole` if these are all of its elements."""

    index: int
    begin: int
    end: int
    is_whole: bool

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.is_whole else tensor.view(-1)[self.begin : self.end]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent together, laid out one after the other.

    Attributes:
        tensor: The flat buffer that is sent.
        rooms: Each part of a tensor, with its place in the buffer.
    """

    tensor: Tensor
    rooms: tuple[tuple[_Part, Tensor], ...]

    @property
    def indices(self) -> set[int]:
        """Indices of the tensors that are sent, at least in part."""
        return {part.index for part, _ in self.rooms}

    @torch.no_grad()
    def fill(self, tensor_of: Callable[[int], Tensor | None], factor: float | Tensor) -> None:
        """Copy tensors into the buffer, multiplied by a factor; None becomes zeros."""
        for part, room in self.rooms:
            tensor = tensor_of(part.index)
            if tensor is None:
                room.zero_()
            else:
                room.copy_(part.of(_real(tensor.detach())))
        if not isinstance(factor, float) or factor != 1.0:
            self.tensor.mul_(factor)

    @torch.no_grad()
    def take(self, tensor_of: Callable[[int], Tensor | None]) -> None:
        """Copy received values back into the tensors, in place."""
        for part, room in self.rooms:
            tensor = tensor_of(part.index)
            if tensor is not None:
                part.of(_real(tensor.detach())).copy_(room)


class Buckets:
    """Sends tensors of fixed shapes, a bucket at a time.

    Args:
        like: Tensors with the shapes, types and device of those that will be sent.
        bucket_bytes: Maximum size of a bucket.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._bucket_bytes = bucket_bytes
        self._shapes = [_real(tensor.detach()).shape for tensor in like]
        by_type: dict[torch.dtype, list[int]] = defaultdict(list)
        for index in range(len(like)):
            by_type[like[index].dtype.to_real()].append(index)
        self._chunks: list[tuple[torch.dtype, list[_Part]]] = []
        for dtype, indices in by_type.items():
            sizes = [shape.numel() for shape in self._shapes]
            self._chunks += [(dtype, parts) for parts in _chunks(indices, sizes, self._most(dtype))]
        lengths = [sum(part.end - part.begin for part in parts) for _, parts in self._chunks]
        device = like[0].device if like else torch.device("cpu")
        largest: dict[torch.dtype, int] = defaultdict(int)
        for length, (dtype, _) in zip(lengths, self._chunks, strict=True):
            largest[dtype] = max(largest[dtype], length)
        shared = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in largest.items()}
        self._buffers = [shared[dtype] for dtype, _ in self._chunks]

    def make_sendable(self, tensor: Tensor | None) -> Tensor | None:
        """Return a tensor in a form that can be sent: one that is sent in parts must be contiguous."""
        if tensor is None or tensor.is_contiguous() or tensor.numel() <= self._most(tensor.dtype):
            return tensor
        return tensor.contiguous()

    def chosen(self, wanted: Sequence[bool] | None = None) -> Iterator[Bucket]:
        """Yield the buckets in sending order, which is the same on every rank.

        Args:
            wanted: Which tensors are sent, the same on every rank; None for all.
        """
        for (_, all_parts), buffer in zip(self._chunks, self._buffers, strict=True):
            parts = [part for part in all_parts if wanted is None or wanted[part.index]]
            if parts:
                tensor = buffer[: sum(part.end - part.begin for part in parts)]
                yield Bucket(tensor, tuple(self._rooms(tensor, parts)))

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
            tensors: In the order of `like`. None sends zeros. A tensor larger than a bucket is sent in parts, so it
                must be contiguous.
            send: Replaces a bucket's contents with the result.
            factor: Multiplied with the tensors before they are sent.
            wanted: Which of them are sent, the same on every rank; None for all.

        Returns:
            The first failure on this rank, after which the contents of the tensors are undefined; None on success.

        Raises:
            RankFailedError: From `send`.
        """
        failure: Exception | None = None
        for bucket in self.chosen(wanted):
            try:
                bucket.fill(tensors.__getitem__, factor)
            except Exception as error:  # noqa: BLE001 - the others wait for this bucket, whatever its contents
                failure = failure or error
            send(bucket.tensor)
            if failure is None:
                try:
                    bucket.take(tensors.__getitem__)
                except RankFailedError:
                    raise
                except Exception as error:  # noqa: BLE001 - the others also wait for the next bucket
                    failure = error
        return failure

    def _most(self, dtype: torch.dtype) -> int:
        return max(1, self._bucket_bytes // dtype.itemsize)

    def _rooms(self, bucket: Tensor, parts: Sequence[_Part]) -> list[tuple[_Part, Tensor]]:
        rooms, start = [], 0
        for part in parts:
            stop = start + part.end - part.begin
            room = bucket[start:stop]
            rooms.append((part, room.view(self._shapes[part.index]) if part.is_whole else room))
            start = stop
        return rooms


def _chunks(indices: Sequence[int], sizes: Sequence[int], most: int) -> list[list[_Part]]:
    """Return the parts in each bucket: whole tensors as long as they fit, larger ones in pieces."""
    chunks: list[list[_Part]] = []
    room = 0
    for index in indices:
        size = sizes[index]
        if size > most:
            chunks += [[_Part(index, at, min(at + most, size), is_whole=False)] for at in range(0, size, most)]
            room = 0
            continue
        if size > room:
            chunks.append([])
            room = most
        if size:
            chunks[-1].append(_Part(index, 0, size, is_whole=True))
            room -= size
    return [chunk for chunk in chunks if chunk]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
