"""Flat buffers for sending lists of tensors between ranks, with the same layout on every rank.

The buffers are allocated once and kept, so that collective operations need no allocation: if filling a buffer fails on
one rank, its old contents are sent nevertheless, and no other rank is left waiting.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    # Starts to replace a bucket's contents by the result; returns a function that waits for it.
    Send = Callable[[Tensor], Callable[[], None]]

# The default of DistributedDataParallel (bucket_cap_mb=25): large enough for the bandwidth of a network.
BUCKET_BYTES = 25 * 2**20
# Of half the size each: one is filled or read while the other is under way.
_BUFFERS = 2


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
    """Sends tensors of fixed shapes in buckets.

    Args:
        like: Tensors with the shapes, types and device of those that will be sent.
        total_bytes: Maximum size of the two buckets that are under way at once.
    """

    def __init__(self, like: Sequence[Tensor], total_bytes: int = BUCKET_BYTES) -> None:
        self._bucket_bytes = total_bytes // _BUFFERS
        by_type: dict[torch.dtype, list[tuple[int, int]]] = defaultdict(list)
        for index, tensor in enumerate(map(_real, like)):
            by_type[tensor.dtype].append((index, tensor.numel()))
        self._buckets: list[tuple[list[Tensor], list[_Piece]]] = []  # with the buffers that each may take
        for dtype, sizes in by_type.items():
            chunks = _chunks(sizes, self._most(dtype))
            largest = max((sum(piece.end - piece.begin for piece in chunk) for chunk in chunks), default=0)
            buffers = [torch.zeros(largest, dtype=dtype, device=like[0].device) for _ in chunks[:_BUFFERS]]
            self._buckets += [(buffers, chunk) for chunk in chunks]

    def make_sendable(self, tensor: Tensor | None) -> Tensor | None:
        """Return a tensor in a form that can be sent: one that is sent in pieces must be contiguous."""
        if tensor is None or tensor.is_contiguous() or tensor.numel() <= self._most(tensor.dtype):
            return tensor
        return tensor.contiguous()

    def begin(
        self,
        tensors: Sequence[Tensor | None],
        send: Send,
        *,
        factor: float | Tensor = 1.0,
        wanted: Sequence[bool] | None = None,
    ) -> Callable[[], Exception | None]:
        """Begin to send tensors, and to copy the results back, in place.

        Args:
            tensors: In the order of `like`. None sends zeros.
            send: Sends a bucket.
            factor: Multiplied with the tensors before they are sent.
            wanted: Which of them are sent, the same on every rank; None for all.

        Returns:
            A function that completes it and returns the first failure on this rank, after which the contents of the
            tensors are undefined; None on success. It raises what `send` raises.
        """
        exchange = _Exchange(tensors, send, factor)
        chosen: list[tuple[Tensor, list[_Piece]]] = []
        for buffers, all_pieces in self._buckets:
            if pieces := [piece for piece in all_pieces if wanted is None or wanted[piece.index]]:
                chosen.append((buffers[len(chosen) % len(buffers)], pieces))  # those under way have unlike buffers
        for bucket in chosen[:_BUFFERS]:
            exchange.start(*bucket)

        def finish() -> Exception | None:
            for bucket in chosen[_BUFFERS:]:
                exchange.complete()
                exchange.start(*bucket)
            while exchange.under_way:
                exchange.complete()
            return exchange.failure

        return finish

    def _most(self, dtype: torch.dtype) -> int:
        return max(1, self._bucket_bytes // dtype.itemsize)


class _Exchange:
    """Fills, sends and reads one bucket after the other."""

    def __init__(self, tensors: Sequence[Tensor | None], send: Send, factor: float | Tensor) -> None:
        self.failure: Exception | None = None
        # What waits for each, tensors, and where they lie in the bucket.
        self.under_way: deque[tuple[Callable[[], None], list[Tensor], list[Tensor]]] = deque()
        self._tensors, self._send, self._factor = tensors, send, factor

    @torch.no_grad()
    def start(self, buffer: Tensor, pieces: Sequence[_Piece]) -> None:
        sizes = [piece.end - piece.begin for piece in pieces]
        bucket, parts, rooms = buffer[: sum(sizes)], [], []
        try:
            for piece, room in zip(pieces, torch.split(bucket, sizes), strict=True):
                tensor = self._tensors[piece.index]
                if tensor is None:
                    room.zero_()
                else:
                    parts.append(piece.of(_real(tensor)))
                    rooms.append(room.view(parts[-1].shape))
            if parts:
                torch._foreach_copy_(rooms, parts)
            if not isinstance(self._factor, float) or self._factor != 1.0:
                bucket.mul_(self._factor)
        except Exception as error:  # noqa: BLE001 - the others wait for this bucket, whatever its contents
            self.failure = self.failure or error
        self.under_way.append((self._send(bucket), parts, rooms))

    @torch.no_grad()
    def complete(self) -> None:
        wait, parts, rooms = self.under_way.popleft()
        wait()
        if self.failure is None and parts:
            try:
                torch._foreach_copy_(parts, rooms)
            except Exception as error:  # noqa: BLE001 - the others also wait for the next bucket
                self.failure = error


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
