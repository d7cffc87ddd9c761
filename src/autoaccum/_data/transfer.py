"""Moves micro-batches to the device, prefetching the next one while the current one computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.batches import copied, map_tensors

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from autoaccum._data.batches import Window


class Transfer:
    """Moves batches to one device.

    Args:
        device: The device to move them to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = False
        # Created with the first batch that has to be moved: it needs a driver, and memory of the card.
        self._stream: torch.cuda.Stream | None = None

    def place(self, batch: Any) -> Any:
        """Return the batch with its tensors on the device; those already there are not copied."""
        # To the CPU, a non-blocking copy could be read before it has completed.
        asynchronous = self._device.type != "cpu"
        return map_tensors(lambda tensor: tensor.to(self._device, non_blocking=asynchronous), batch)

    def copy_always(self) -> None:
        """From now on also copy batches already on the device, because the model modifies its input in place."""
        self._copies = True

    def feed(self, window: Window, sizes: Sequence[int], start: int = 0) -> Generator[Any, None, None]:
        """Return the micro-batches of a window on the device, prefetching the next one.

        Args:
            window: The samples, on any device.
            sizes: Sizes of the micro-batches, up to the window's end.
            start: The sample at which the first of them begins.
        """
        cuts = _cuts(window, sizes, start)
        if all(tensor.device == self._device for tensor in window.tensors()):
            return (copied(batch) for batch in cuts) if self._copies else cuts
        if self._device.type != "cuda":
            return (self.place(batch) for batch in cuts)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._ahead(cuts, self._stream)

    def _ahead(self, cuts: Iterable[Any], stream: torch.cuda.Stream) -> Generator[Any, None, None]:
        computing = torch.cuda.current_stream(self._device)
        on_their_way: list[tuple[Any, torch.cuda.Event]] = []
        for batch in cuts:
            # The memory comes from the computing stream's pool, so that copies need no pool of their own; the copying
            # stream has to wait for its previous use.
            stream.wait_stream(computing)
            moved = map_tensors(lambda tensor: self._begin(tensor, stream), batch)
            on_their_way.append((moved, stream.record_event()))
            if len(on_their_way) > 1:
                yield _arrived(on_their_way, computing)
        if on_their_way:
            yield _arrived(on_their_way, computing)

    def _begin(self, tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
        if tensor.device == self._device:
            return tensor
        host = tensor if tensor.is_pinned() else tensor.pin_memory()
        moved = torch.empty_like(host, device=self._device)
        with torch.cuda.stream(stream):
            moved.copy_(host, non_blocking=True)
        # If the window is abandoned during the copy, the memory must not be reused before the copy has ended.
        moved.record_stream(stream)
        return moved


def _cuts(window: Window, sizes: Sequence[int], start: int) -> Generator[Any, None, None]:
    for size in sizes:
        yield window.cut(start, start + size)
        start += size


def _arrived(on_their_way: list[tuple[Any, torch.cuda.Event]], computing: torch.cuda.Stream) -> Any:
    batch, arrival = on_their_way.pop(0)
    computing.wait_event(arrival)
    return batch
