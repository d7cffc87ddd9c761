"""Moves micro-batches to the device, the next one on its way while the present one computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.batches import copied, map_tensors

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from autoaccum._data.batches import Window


class Transfer:
    """Moves batches from where the loader left them to one device.

    Args:
        device: Where they are needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = False
        # Made with the first batch that has to be moved: it takes a driver, and memory of the card.
        self._stream: torch.cuda.Stream | None = None

    def place(self, batch: Any) -> Any:
        """Return the batch with its tensors on the device; one that is there already is passed on as it is."""
        # Off the device a copy that does not block would be read before it has arrived.
        asynchronous = self._device.type != "cpu"
        return map_tensors(lambda tensor: tensor.to(self._device, non_blocking=asynchronous), batch)

    def copy_always(self) -> None:
        """From now on copy what is on the device already, too: the model changes its input in place."""
        self._copies = True

    def feed(self, window: Window, sizes: Sequence[int], start: int = 0) -> Generator[Any, None, None]:
        """Return the micro-batches of a window on the device, the next one on its way while one is used.

        Args:
            window: The samples, wherever the loader left them.
            sizes: Sizes of the micro-batches, which reach to the window's end.
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
            # The memory is taken from the computing stream's pool, so that copies do not need one of their own; the
            # copying stream has to wait for what that memory was last used for.
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
        # If the window is given up while the copy runs, its memory must not be used again before it has ended.
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
