"""Sums up a call of `fit` for people: where its time went, what it took, and what would make the next one faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum._memory.limits import format_bytes
from autoaccum._sizing.planner import format_cut

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoaccum._records import FitResult, Plan

# Of a call's time. Below, other calls differ by as much without a reason.
_MUCH = 0.1
_MUCH_RECOMPUTED = 0.03
# A call that is over sooner says little about a training.
_LEAST_S = 5.0
# Of the capacity: with more of it free, larger micro-batches would fit as well.
_LITTLE_USED = 0.6


def rows_of(result: FitResult, peak_bytes: int | None, capacity_bytes: int | None) -> Iterator[tuple[str, str]]:
    """Yield what to show of a call: names and texts.

    Args:
        result: What `fit` returns.
        peak_bytes: The largest peak of its windows; None if unknown.
        capacity_bytes: What the training may take on its device; None if unknown.
    """
    if result.elapsed_s > 0 and result.history:
        speed = sum(report.samples for report in result.history) / result.elapsed_s
        yield "speed", f"{speed:.4g} samples/s, everything included"
    yield "cut", cut_at_end(result)
    if peak_bytes is not None:
        yield "peak memory", of_capacity(peak_bytes, capacity_bytes)
    yield "out of memory", f"{result.oom_events} time{'' if result.oom_events == 1 else 's'}"
    if shares := ", ".join(f"{what} {seconds:.1f} s ({share:.0%})" for what, seconds, share in _shares(result)):
        yield "time", shares


def cut_at_end(result: FitResult) -> str:
    """Return how the last windows were cut: as planned, unless that plan was found for windows that did not come."""
    since, _ = result.plans[-1]
    if since <= result.steps or not result.history:
        return cut_of(result.plan)
    return format_cut(result.history[-1].micro_batches)


def cut_of(plan: Plan) -> str:
    """Return such as "34+33+33"."""
    return format_cut(plan.micro_batches)


def of_capacity(used_bytes: int, capacity_bytes: int | None) -> str:
    """Return such as "512.0 MiB of 600.0 MiB"."""
    whole = "" if capacity_bytes is None else f" of {format_bytes(capacity_bytes)}"
    return f"{format_bytes(used_bytes)}{whole}"


def _shares(result: FitResult) -> Iterator[tuple[str, float, float]]:
    """Yield where a call's time went besides its updates, if it shows: a name, seconds, and a share."""
    spent = result.time_spent
    named = {
        "start": spent.start_s,
        "search": spent.search_s,
        "computing again": spent.recomputation_s,
        "waiting for data": spent.data_s,
        "evaluations": spent.evaluation_s,
        "checkpoints": spent.checkpoint_s,
    }
    for what, seconds in named.items():
        if seconds >= 0.05 and result.elapsed_s > 0:  # noqa: PLR2004 - it would be printed as 0.0 s
            yield what, seconds, min(1.0, seconds / result.elapsed_s)


def advice_on(result: FitResult, peak_bytes: int | None, capacity_bytes: int | None) -> Iterator[str]:
    """Yield what would make the next call faster; nothing for a short one.

    Args:
        result: What `fit` returns.
        peak_bytes: As for `rows_of`.
        capacity_bytes: As for `rows_of`.
    """
    if result.elapsed_s < _LEAST_S:
        return
    spent, whole = result.time_spent, result.elapsed_s
    sizes = result.plan.micro_batches
    if spent.data_s > _MUCH * whole:
        yield "the loader is waited for: more num_workers=, persistent_workers=True, or cheaper transforms"
    if spent.recomputation_s > _MUCH_RECOMPUTED * whole:
        yield f"memory ran out {result.oom_events} times: begin with micro_batch={max(sizes)}, which fits"
    if spent.evaluation_s > _MUCH * 3 * whole:
        yield "evaluations take much of the time: evaluate less often (val_every=), or on fewer samples"
    if spent.checkpoint_s > _MUCH * whole:
        yield "checkpoints take much of the time: write fewer (checkpoint_every=)"
    was_set = not spent.search_s and result.resumed_from is None  # sizes that were searched for are the fastest
    if peak_bytes is None or not capacity_bytes or len(sizes) == 1 or not was_set:
        return
    if peak_bytes < _LITTLE_USED * capacity_bytes:
        yield (
            f"{format_bytes(capacity_bytes - peak_bytes)} of memory stayed free: larger micro-batches than "
            f"{max(sizes)} fit, which micro_batch='auto' finds"
        )
