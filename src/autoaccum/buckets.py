"""Flat buffers through which lists of tensors go from rank to rank, laid out alike on every rank.

The buffers are made once and kept, so that nothing that ranks do together has to allocate: where filling one fails
on a rank, what stands in it is sent all the same, and no other rank is left waiting.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from autoaccum.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

# As DistributedDataParallel has it (bucket_cap_mb=25): large enough for the bandwidth of a network.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements `begin` to `end` of the tensor `index`, in the order of its elements; `is_whole` where these are all."""

    index: int
    begin: int
    end: int
    is_whole: bool

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.is_whole else tensor.view(-1)[self.begin : self.end]


class Buckets:
    """Sends tensors of fixed shapes, a bucket at a time.

    Args:
        like: Tensors with the shapes, types and device of those that will be sent.
        bucket_bytes: The most that is sent at once.
    """

    def __init__(self, like: Sequence[Tensor], bucket_bytes: int = BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        self._shapes = [_real(tensor.detach()).shape for tensor in like]
        by_type: dict[torch.dtype, list[int]] = defaultdict(list)
        for index, tensor in enumerate(like):
            by_type[_real(tensor.detach()).dtype].append(index)
        self._chunks: list[tuple[torch.dtype, list[_Part]]] = []
        for dtype, indices in by_type.items():
            sizes = [shape.numel() for shape in self._shapes]
            self._chunks += [(dtype, parts) for parts in _chunks(indices, sizes, self._most(dtype))]
        largest: dict[torch.dtype, int] = defaultdict(int)
        for dtype, parts in self._chunks:
            largest[dtype] = max(largest[dtype], sum(part.end - part.begin for part in parts))
        device = like[0].device if like else torch.device("cpu")
        self._buffers = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in largest.items()}

    def splits(self, tensor: Tensor) -> bool:
        """Whether a tensor is too large to be sent whole."""
        return tensor.numel() > self._most(tensor.dtype)

    def exchange(
        self,
        tensors: Sequence[Tensor | None],
        send: Callable[[Tensor], None],
        *,
        factor: float | Tensor = 1.0,
        wanted: Sequence[bool] | None = None,
    ) -> Exception | None:
        """Send tensors and take over what comes of them, in place.

        Args:
            tensors: In the order of `like`; None sends zeros. Parts of one that is larger than a bucket are sent by
                themselves, so it has to be contiguous.
            send: Replaces a bucket by what is to be taken over.
            factor: What is multiplied before.
            wanted: Which of them are sent; the same on every rank. None: all.

        Returns:
            The first failure of this rank, after which what the tensors hold is of no use; None where all went well.

        Raises:
            RankFailedError: From `send`.
        """
        failure: Exception | None = None
        for dtype, all_parts in self._chunks:
            parts = [part for part in all_parts if wanted is None or wanted[part.index]]
            if not parts:
                continue
            bucket = self._buffers[dtype][: sum(part.end - part.begin for part in parts)]
            try:
                self._fill(bucket, parts, tensors, factor)
            except Exception as error:  # noqa: BLE001 - the others wait for this bucket, whatever is in it
                failure = failure or error
            send(bucket)
            if failure is None:
                try:
                    self._take(bucket, parts, tensors)
                except RankFailedError:
                    raise
                except Exception as error:  # noqa: BLE001 - and for the next one
                    failure = error
        return failure

    def _most(self, dtype: torch.dtype) -> int:
        return max(1, self._bucket_bytes // dtype.itemsize)

    @torch.no_grad()
    def _fill(
        self, bucket: Tensor, parts: Sequence[_Part], tensors: Sequence[Tensor | None], factor: float | Tensor
    ) -> None:
        for part, room in self._rooms(bucket, parts):
            tensor = tensors[part.index]
            if tensor is None:
                room.zero_()
            else:
                room.copy_(part.of(_real(tensor.detach())))
        if not isinstance(factor, float) or factor != 1.0:
            bucket.mul_(factor)

    @torch.no_grad()
    def _take(self, bucket: Tensor, parts: Sequence[_Part], tensors: Sequence[Tensor | None]) -> None:
        for part, room in self._rooms(bucket, parts):
            tensor = tensors[part.index]
            if tensor is not None:
                part.of(_real(tensor.detach())).copy_(room)

    def _rooms(self, bucket: Tensor, parts: Sequence[_Part]) -> list[tuple[_Part, Tensor]]:
        rooms, start = [], 0
        for part in parts:
            stop = start + part.end - part.begin
            room = bucket[start:stop]
            rooms.append((part, room.view(self._shapes[part.index]) if part.is_whole else room))
            start = stop
        return rooms


def _chunks(indices: Sequence[int], sizes: Sequence[int], most: int) -> list[list[_Part]]:
    """Return the parts of each bucket: whole tensors as long as they fit, larger ones in pieces."""
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
