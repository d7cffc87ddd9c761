"""What would make a step smaller, and by how much: the same step gone through again, with one thing changed.

Asked only where not even one sample fits or windows are cut into many pieces. Nothing is measured: a remedy's memory is
what `_estimate/estimate.py` says of the changed step, held against what it says of the step as it is.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autoaccum._data.batches import count, map_tensors
from autoaccum._engine.fallback import checkpointed, offloaded
from autoaccum._estimate.gpus import known_cards
from autoaccum._memory.simulated import Simulated
from autoaccum._report.records import Remedy
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from autoaccum._estimate.gpus import Card
    from autoaccum._estimate.trace import Traced
    from autoaccum._report.answers import Asked
    from autoaccum._sizing.footprint import Estimate, Footprint

# From so many micro-batches a window on, a cut is worth mending.
MANY_MICRO_BATCHES = 8

# Optimizers that keep two numbers a parameter, of which there are forms with 8 bits each (bitsandbytes keeps one
# float32 scale for each of its blocks of 256 numbers: https://huggingface.co/docs/bitsandbytes, 8-bit optimizers).
_TWO_NUMBERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
_BITS8_BYTES = 2 * (1 + 4 / 256)
_HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class Place:
    """Where a step is to fit.

    Attributes:
        kind: "cpu" or "cuda".
        card: The card; None where the device is at hand.
        room_bytes: What a step may take there.
        unlimited_bytes: What it might take without the limit that was asked for; None where there is no such limit.
        holds_model: Whether that counts the model.
        precision: In which the step would run.
        half: Whether it computes in bf16, and with it float32 by Tensor Cores.
        failed: The smallest size that was tried there and did not fit; None where none was.
    """

    kind: str
    card: Card | None
    room_bytes: int
    unlimited_bytes: int | None
    holds_model: bool
    precision: str
    half: bool
    failed: int | None = None

    def largest(self, estimate: Estimate, most: int) -> int:
        """Return the largest micro-batch up to `most` that is predicted to fit; 0 where none is."""
        return estimate.largest(self.room_bytes + self._there(estimate), most)

    def as_tried(self, estimate: Estimate) -> Place:
        """Return it with no more room than that in which the step as it is, as predicted, fits no better than tried."""
        if self.failed is None:
            return self
        needed = estimate.reserved_bytes(self.failed) - self._there(estimate)
        return replace(self, room_bytes=min(self.room_bytes, needed - 1))

    def _there(self, estimate: Estimate) -> int:
        first = estimate.footprints[0]
        return 0 if self.holds_model else first.parameters_bytes + first.buffers_bytes


class Remedies:
    """Goes through changed steps.

    Args:
        asked: What is asked of the job.
        place: Where it is to fit.
        trace: `trace_step` with what the job holds; takes the arguments that a remedy changes.
        model: The model, only looked at.
        optimizer: The optimizer, only looked at.
    """

    def __init__(
        self,
        asked: Asked,
        place: Place,
        trace: Callable[..., Traced],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._asked = asked
        self._place = place
        self._trace = trace
        self._model = model
        self._optimizer = optimizer
        self._as_it_is = self._estimate()
        self._place = place.as_tried(self._as_it_is)

    def all(self) -> tuple[Remedy, ...]:
        """Return what would help, most first; nothing that would not."""
        before = self._place.largest(self._as_it_is, self._asked.most)
        size = self._as_it_is.footprints[0].size
        now_bytes = self._as_it_is.reserved_bytes(size)
        found = []
        for remedy, estimate, place in self._tried():
            peak, largest = estimate.reserved_bytes(size), place.largest(estimate, self._asked.most)
            if largest > before or (peak < now_bytes and largest >= max(before, 1)):
                found.append(replace(remedy, peak_bytes=peak, micro_batch=largest))
        return tuple(sorted(found, key=lambda one: (-(one.micro_batch or 0), one.peak_bytes or 0)))

    def _tried(self) -> Iterator[tuple[Remedy, Estimate, Place]]:
        ways = (
            self._half,
            self._half_weights,
            self._checkpointed,
            self._offloaded,
            self._bits8,
            self._adafactor,
            self._fused,
        )
        for way in (*ways, self._shorter, self._unlimited, self._larger):
            # One that cannot be gone through without values, where there are none, is left out: the others are of use
            # all the same.
            with suppress(InvalidInputError):
                yield from way()

    def _estimate(self, **changed: Any) -> Estimate:
        options = {
            "batch": self._asked.batch,
            "precision": self._place.precision,
            "kind": self._place.kind,
            "most": self._asked.most,
            "tensor_float": self._place.half,
        }
        return self._trace(**options | changed).estimate(self._place.card)

    def _half(self) -> Iterator[tuple[Remedy, Estimate, Place]]:
        if self._place.precision in _HALF or not self._place.half:
            return
        estimate = self._estimate(precision="bf16")
        yield _remedy("bf16", "precision='bf16'", "activations have 8 significant bits"), estimate, self._place

    def _half_weights(self) -> Iterator[tuple[Remedy, Estimate, Place]]:
        if not self._place.half or any(one.dtype is not torch.float32 for one in self._model.parameters()):
            return
        if any(one.is_complex() for one in self._model.buffers()):
            return  # they would lose what is imaginary
        # Something that it is given or makes itself may stay in float32 and not go with the rest, or it may refuse
        # other types in words of its own.
        estimate = None
        with suppress(Exception):
            estimate = self._estimate(weights=torch.bfloat16)
        if estimate is None:
            return
        how = "model.to(torch.bfloat16), before the optimizer is made; a loss with weights and floating inputs too"
        # Of a weight's 8 significant bits the last is worth 1/256 to 1/128 of it, and half of that is rounded away.
        cost = (
            "sums of gradients and updates have 8 significant bits: an update below 1/256 of its weight may be lost, "
            "so care with small learning rates"
        )
        yield _remedy("bf16 weights", how, cost), estimate, self._place

    def _checkpointed(self) -> Iterator[tuple[Remedy, Estimate, Place]]:
        with checkpointed([self._model], torch.device("cpu")) as blocks:
            pass
        if not blocks:
            return
        estimate = self._estimate(adapt=lambda model: checkpointed([model], torch.device("cpu")))
        how = f"fallback='checkpoint', or torch.utils.checkpoint on {blocks}"
        yield _remedy("activation checkpointing", how, "a second forward pass"), estimate, self._place

    def _offloaded(self) -> Iterator[tuple[Remedy, Estimate, Place]]:
        if self._place.kind == "cpu":
            return
        card = Simulated(2**50, torch.device("cuda", 0))  # says what is moved from where
        estimate = self._estimate(adapt=lambda model: offloaded([model], card))
        how = "fallback='offload', or torch.autograd.graph.save_on_cpu"
        cost = "what backward needs goes to the host and back"
        yield _remedy("offloaded activations", how, cost), estimate, self._place

    def _bits8(self) -> Iterator[tuple[Remedy, Estimate, Place]]:
        if self._place.kind != "cuda" or not isinstance(self._optimizer, _TWO_NUMBERS):
            return
        trained = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        less = int(sum(p.numel() * (2 * p.element_size() - _BITS8_BYTES) for p in trained))
        kind = type(self._optimizer).__name__
        footprints = tuple(_with_less_state(one, less) for one in self._as_it_is.footprints)
        estimate = replace(self._as_it_is, footprints=footprints)
        how = f"bitsandbytes.optim.{kind if kind in ('Adam', 'AdamW') else 'AdamW'}8bit"
        yield _remedy("8-bit optimizer", how, "its state is rounded to 8 bits"), estimate, self._place

    def _adafactor(self) -> Iterator[tuple[Remedy, Estimate, Place]]:
        if not isinstance(self._optimizer, _TWO_NUMBERS):
            return
        lr = float(self._optimizer.param_groups[0]["lr"])
        estimate = self._estimate(optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=lr))
        how = "torch.optim.Adafactor"
        yield _remedy("Adafactor", how, "another optimizer, with rates of its own"), estimate, self._place

    def _fused(self) -> Iterator[tuple[Remedy, Estimate, Place]]:
        kind: Any = type(self._optimizer)
        first = self._optimizer.param_groups[0]
        is_adam = isinstance(self._optimizer, torch.optim.Adam | torch.optim.AdamW)
        if self._place.kind != "cuda" or not is_adam or first.get("fused"):
            return
        lr = float(first["lr"])
        estimate = self._estimate(optimizer=lambda parameters: kind(parameters, lr=lr, fused=True))
        cost = "none but that a failure inside it cannot be told"
        yield _remedy("fused optimizer", f"{kind.__name__}(..., fused=True)", cost), estimate, self._place

    def _shorter(self) -> Iterator[tuple[Remedy, Estimate, Place]]:
        half = _half_as_long(self._asked.batch)
        if half is None:
            return
        batch, length = half
        estimate = None
        with suppress(Exception):  # the model may take sequences of one length only, and say so in its own words
            estimate = self._estimate(batch=batch)
        if estimate is None:
            return
        yield _remedy(f"inputs of length {length}", "half of what the batch has", "less context"), estimate, self._place

    def _unlimited(self) -> Iterator[tuple[Remedy, Estimate, Place]]:
        if self._place.unlimited_bytes is not None:
            place = replace(self._place, room_bytes=self._place.unlimited_bytes)
            cost = "the memory that it was to leave free"
            yield _remedy("a higher memory limit", "none, at the most", cost), self._as_it_is, place

    def _larger(self) -> Iterator[tuple[Remedy, Estimate, Place]]:
        """The smallest card that would do without many micro-batches."""
        if self._place.card is None or self._place.unlimited_bytes is not None:
            return
        traced: dict[bool, Traced] = {}
        for card in sorted(known_cards(), key=lambda one: one.free_bytes):
            if card.free_bytes <= self._place.card.free_bytes or (self._place.precision == "bf16" and not card.bf16):
                continue
            if card.tensor_float not in traced:
                traced[card.tensor_float] = self._trace(
                    batch=self._asked.batch,
                    precision=self._place.precision,
                    kind="cuda",
                    most=self._asked.most,
                    tensor_float=card.tensor_float,
                )
            estimate = traced[card.tensor_float].estimate(card)
            place = replace(self._place, card=card, room_bytes=card.free_bytes)
            if place.largest(estimate, self._asked.most) * MANY_MICRO_BATCHES >= self._asked.target_batch:
                yield _remedy("a larger card", f"such as {card.name}", "the card"), estimate, place
                return


def computes_bf16(device: str) -> bool:
    """Whether a device at hand computes in bf16; of NVIDIA's those from Ampere on do."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(torch.device(device)) >= (8, 0)


def are_due(largest: int, target_batch: int) -> bool:
    """Whether a step should become smaller: not one sample fits, or windows are cut into many pieces."""
    return largest * MANY_MICRO_BATCHES <= target_batch and largest < target_batch


def _remedy(name: str, description: str, cost: str) -> Remedy:
    return Remedy(name, description, None, None, cost)


def _with_less_state(footprint: Footprint, less_bytes: int) -> Footprint:
    less = min(less_bytes, footprint.optimizer_bytes)
    return replace(
        footprint,
        peak_bytes=footprint.peak_bytes - less,
        reserved_bytes=footprint.reserved_bytes - less,
        optimizer_bytes=footprint.optimizer_bytes - less,
    )


def _half_as_long(batch: Any) -> tuple[Any, int] | None:
    """Return a batch of token sequences cut to half their length; None where it holds none."""
    lengths: dict[int, int] = {}

    def look(tensor: Tensor) -> Tensor:
        if tensor.dim() == 2 and not tensor.is_floating_point():  # noqa: PLR2004 - samples and tokens
            lengths[tensor.shape[1]] = lengths.get(tensor.shape[1], 0) + 1
        return tensor

    map_tensors(look, batch)
    if not lengths or count(batch) < 1:
        return None
    length = max(lengths)
    if length < 2:  # noqa: PLR2004 - there is no half of one token
        return None

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:, : length // 2] if tensor.dim() >= 2 and tensor.shape[1] == length else tensor  # noqa: PLR2004

    return map_tensors(cut, batch), length // 2
