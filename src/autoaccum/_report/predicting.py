"""The predicted half of a pre-flight report: a traced step and a card in, what would fit there out.

Nothing is traced here, only asked of what `_estimate/estimate.py` has gone through.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from autoaccum._memory.limits import parse_limit
from autoaccum._memory.simulated import Simulated
from autoaccum._report.records import Predicted
from autoaccum._sizing.footprint import Footprint
from autoaccum._sizing.planner import TILE, plan

if TYPE_CHECKING:
    from autoaccum._estimate.gpus import Card
    from autoaccum._report.measuring import Asked
    from autoaccum._sizing.footprint import Estimate

_PARTS = tuple(
    field.name
    for field in fields(Footprint)
    if field.name.endswith("_bytes") and field.name not in ("peak_bytes", "reserved_bytes")
)


def predict(asked: Asked, card: Card, precision: str, estimate: Estimate) -> Predicted:
    """Say what would fit on a card.

    Args:
        asked: What is asked.
        card: The card.
        precision: In which the step was traced.
        estimate: What steps take there.

    Raises:
        InvalidInputError: The memory limit cannot be read.
    """
    limit_bytes = parse_limit(asked.memory_limit, Simulated(card.total_bytes))
    room = card.free_bytes if limit_bytes is None else min(limit_bytes, card.free_bytes)
    largest = estimate.largest(room, asked.most)
    chosen = None
    if largest:
        multiple_of = TILE if precision != "fp32" else 1
        most = min(largest, asked.target_batch)
        chosen = plan(asked.target_batch, most, strategy=asked.strategy, multiple_of=multiple_of)
    size = estimate.footprints[0].size if chosen is None else chosen.micro_batch
    return Predicted(card, precision, estimate, room, largest, chosen, footprint_at(estimate, size))


def footprint_at(estimate: Estimate, size: int) -> Footprint:
    """Return what takes the memory of a size: as it was gone through, or on the line that `Estimate` goes by."""
    known = {footprint.size: footprint for footprint in estimate.footprints}
    if size in known:
        return known[size]
    least, reserved = estimate.footprints[0], estimate.reserved_bytes(size)
    if len(known) == 1 or reserved <= least.reserved_bytes:
        # Small sizes all have the peak of what does not grow, such as the update's.
        return replace(least, size=size)
    low, high = estimate.footprints[-2:]
    share = (size - low.size) / (high.size - low.size)
    parts = {
        name: max(0, round(getattr(low, name) + share * (getattr(high, name) - getattr(low, name)))) for name in _PARTS
    }
    peak = sum(parts.values())
    return Footprint(size=size, phase=high.phase, peak_bytes=peak, reserved_bytes=max(peak, reserved), **parts)
