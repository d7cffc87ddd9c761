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
    from collections.abc import Callable, Generator, Sequence

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

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.end - self.begin

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
        self._buckets: list[tuple[Tensor, list[_Piece]]] = []
        for dtype, sizes in by_type.items():
            chunks = _chunks(sizes, self._most(dtype))
            largest = max((sum(piece.size for piece in chunk) for chunk in chunks), default=0)
            buffers = [torch.zeros(largest, dtype=dtype, device=like[0].device) for _ in chunks[:_BUFFERS]]
            self._buckets += [(buffers[turn % _BUFFERS], chunk) for turn, chunk in enumerate(chunks)]

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
        steps = self._steps(tensors, send, factor, wanted)
        next(steps)

        def finish() -> Exception | None:
            try:
                next(steps)
            except StopIteration as ended:
                found: Exception | None = ended.value
                return found
            raise AssertionError

        return finish

    @torch.no_grad()
    def _steps(
        self, tensors: Sequence[Tensor | None], send: Send, factor: float | Tensor, wanted: Sequence[bool] | None
    ) -> Generator[None, None, Exception | None]:
        """Send all buckets, in two steps: until the first has to be waited for, and the rest."""
        failure: Exception | None = None
        under_way: deque[tuple[Callable[[], None], list[Tensor], list[Tensor]]] = deque()
        chosen = [
            (buffer, pieces)
            for buffer, all_pieces in self._buckets
            if (pieces := [piece for piece in all_pieces if wanted is None or wanted[piece.index]])
        ]
        for number in range(len(chosen) + _BUFFERS):
            if number == min(len(chosen), _BUFFERS):
                yield
            if under_way and (number >= len(chosen) or len(under_way) == _BUFFERS):
                wait, parts, rooms = under_way.popleft()
                wait()
                try:
                    if failure is None and parts:
                        torch._foreach_copy_(parts, rooms)
                except Exception as error:  # noqa: BLE001 - the others also wait for the next bucket
                    failure = error
            if number < len(chosen):
                buffer, pieces = chosen[number]
                bucket = buffer[: sum(piece.size for piece in pieces)]
                parts, rooms = [], []
                try:
                    parts, rooms = _fill(bucket, pieces, tensors)
                    if not isinstance(factor, float) or factor != 1.0:
                        bucket.mul_(factor)
                except Exception as error:  # noqa: BLE001 - the others wait for this bucket, whatever its contents
                    failure = failure or error
                under_way.append((send(bucket), parts, rooms))
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


def _fill(
    bucket: Tensor, pieces: Sequence[_Piece], tensors: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Copy pieces of tensors into a bucket; return the pieces that exist, and where they lie in the bucket."""
    parts, rooms = [], []
    for piece, room in zip(pieces, torch.split(bucket, [piece.size for piece in pieces]), strict=True):
        tensor = tensors[piece.index]
        if tensor is None:
            room.zero_()
        else:
            part = piece.of(_real(tensor))
            parts.append(part)
            rooms.append(room.view(part.shape))
    if parts:
        torch._foreach_copy_(rooms, parts)
    return parts, rooms


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
