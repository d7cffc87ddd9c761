"""Moves micro-batches to the device, on CUDA prefetching the next one while the current one computes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.nesting import copied, map_tensors
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from autoaccum._data.batches import Window


class Transfer:
    """Moves batches to one device.

    Attributes:
        copies: Whether batches already on the device are copied, since the model modifies its input in place.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.copies = False
        # Created with the first batch that has to be moved: it needs a driver, and memory of the GPU.
        self._stream: torch.cuda.Stream | None = None

    def place(self, batch: Any) -> Any:
        """Return the batch with its tensors on the device; those already there are copied only if `copies`."""
        # To the CPU, a non-blocking copy could be read before it has completed.
        asynchronous = self._device.type != "cpu"

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(self._device, non_blocking=asynchronous, copy=self.copies)

        return map_tensors(moved, batch, objects=self._place_object)

    def copy_always(self) -> None:
        """From now on also copy batches already on the device, because the model modifies its input in place."""
        self.copies = True

    def feed(self, window: Window, sizes: Sequence[int], start: int = 0) -> AbstractContextManager[Iterator[Any]]:
        """Give a window's micro-batches from sample `start` on, on the device, on CUDA prefetching the next one."""
        cuts = window.cuts(sizes, start)
        if window.is_on(self._device):
            return contextlib.nullcontext(map(copied, cuts) if self.copies else cuts)
        return contextlib.closing(self.send(cuts))

    def send(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        """Return micro-batches on the device, on CUDA prefetching the next one."""
        if self._device.type != "cuda":
            return (self.place(batch) for batch in batches)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._ahead(batches, self._stream)

    def _ahead(self, cuts: Iterable[Any], stream: torch.cuda.Stream) -> Generator[Any, None, None]:
        computing = torch.cuda.current_stream(self._device)
        on_their_way: list[tuple[Any, torch.cuda.Event]] = []
        try:
            for batch in cuts:
                on_their_way.append(self._begin(batch, stream, computing))
                if len(on_their_way) > 1:
                    yield _arrived(on_their_way, computing)
            if on_their_way:
                yield _arrived(on_their_way, computing)
        except BaseException as error:
            if on_their_way or not isinstance(error, GeneratorExit):
                # The window is abandoned, or a copy interrupted: the memory must not be used again before copies have
                # ended. `Tensor.record_stream` would do it too, but ends the process where such memory is freed on a
                # lost device.
                with contextlib.suppress(RuntimeError):  # the device is lost
                    computing.wait_stream(stream)
            raise

    def _begin(
        self, batch: Any, stream: torch.cuda.Stream, computing: torch.cuda.Stream
    ) -> tuple[Any, torch.cuda.Event]:
        """Begin to copy a batch; return it on the device, and the event of its arrival."""
        copies: list[tuple[Tensor, Tensor]] = []
        moved = map_tensors(functools.partial(self._place_for, copies), batch, objects=self._place_object)
        # The memory comes from the computing stream's pool, so that copies need no pool of their own. The copying
        # stream has to wait for its previous use, and for what the computing stream fills it with, as it does with
        # deterministic algorithms (torch.utils.deterministic.fill_uninitialized_memory).
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            for place, host in copies:
                place.copy_(host, non_blocking=True)
        return moved, stream.record_event()

    def _place_object(self, thing: Any) -> Any:
        """Return an object that holds tensors, such as a graph or a PackedSequence, with them on the device."""
        if callable(getattr(thing, "to", None)):
            return (copy.deepcopy(thing) if self.copies else thing).to(self._device)
        if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            fields = (field.name for field in dataclasses.fields(thing) if field.init)
            return dataclasses.replace(thing, **{name: self.place(getattr(thing, name)) for name in fields})
        if self._device.type == "cpu":
            return copy.deepcopy(thing) if self.copies else thing
        raise InvalidInputError(
            f"a micro-batch holds a {type(thing).__name__} with tensors inside, which cannot be moved to "
            f"{self._device}; give its class a method to(device), or let split.join return tensors"
        )

    def _place_for(self, copies: list[tuple[Tensor, Tensor]], tensor: Tensor) -> Tensor:
        """Return a place for a tensor on the device, and note what is to be copied there from pinned memory."""
        if tensor.device == self._device:
            return tensor.clone() if self.copies else tensor
        host = tensor if tensor.is_pinned() else tensor.pin_memory()
        place = torch.empty_like(host, device=self._device)
        copies.append((place, host))
        return place


def _arrived(on_their_way: list[tuple[Any, torch.cuda.Event]], computing: torch.cuda.Stream) -> Any:
    batch, arrival = on_their_way.pop(0)
    computing.wait_event(arrival)
    return batch
