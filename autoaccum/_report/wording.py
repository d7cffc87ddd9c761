"""The text of a report: verdicts and titled tables, which the terminal's table and the page both show.

Nothing here knows colours or markup.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from autoaccum._memory.limits import format_bytes
from autoaccum._report.records import DOES_NOT_FIT, FITS, TIGHT, Predicted
from autoaccum._sizing.planner import format_cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from autoaccum._estimate.footprint import Footprint
    from autoaccum._records import Plan
    from autoaccum._report.records import Measured, ReportContents, Subject

MEASURED = "measured"
PLANS = "Largest micro-batch and plan"
# Unknown, or not applicable.
NONE = "-"
# Rows of bytes fit in 80 characters: 2 of indentation, the longest name, then columns 3 apart that are as wide as
# "1023.9 MiB" or their own name.
_WIDTH, _NAMES, _NUMBER, _APART = 78, len("per extra sample"), 10, 3

# What a device holds at the peak outside tensors: the allocator's cache on a GPU, the heap on the CPU.
OUTSIDE = "outside tensors"
_NAMES_OF_KINDS = {"optimizer": "optimizer state"}


@dataclass(frozen=True, slots=True)
class Section:
    """A titled table of text.

    Attributes:
        title: Its title.
        header: Names of the columns; empty for rows of a name and its value.
        rows: One text for each column.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the job fits in one place, and how.

    Attributes:
        answer: "fits", "tight" or "does not fit"; the last also if it fits with smaller micro-batches than required.
        found: What was measured or predicted there.
        text: The cut, or why it does not fit.
    """

    answer: str
    found: Measured | Predicted
    text: str


def title_of(report: ReportContents) -> str:
    """Return the report's title, such as "ResNet, target batch 256"."""
    return f"{report.subject.model}, target batch {report.subject.target_batch}"


def verdicts_of(report: ReportContents) -> list[Verdict]:
    """Return a verdict for each place, the measured one first."""
    short = dict(report.short)
    required = f"; {report.required_micro_batch} at once are required"
    verdicts = [Verdict(one.verdict, one, _verdict_text(one, report.subject)) for one in report.places]
    return [
        replace(one, answer=DOES_NOT_FIT, text=one.text + required) if one.found.name in short else one
        for one in verdicts
    ]


def _verdict_text(found: Measured | Predicted, subject: Subject) -> str:
    if found.plan is None:
        if not isinstance(found, Predicted):
            return found.reason
        takes = format_bytes(found.footprint.reserved_bytes)
        return f"a micro-batch of {found.footprint.size} is predicted to take {takes}; there is {_memory_of(found)}"
    text = f"{_in_words(found, found.plan)}, {'predicted' if found.is_predicted else MEASURED}"
    if found.is_limited:
        text += f", within memory_limit={subject.memory_limit}"
    left = found.headroom_bytes or 0
    if found.verdict == TIGHT and isinstance(found, Predicted):
        return f"{text}; it may take {found.uncertainty:.1%} more, and {format_bytes(left)} are left"
    if left < 0:
        above = f"{format_bytes(-left)} ({-left / found.room_bytes:.1%})"
        text += f"; its peak is {above} above the limit, and on the CPU up to 3% above it count as fitting"
    return text


def headline_of(report: ReportContents) -> tuple[str, str, str]:
    """Return the answer for all places together, the same as a sentence, and the verdict of the worst place."""
    places = verdicts_of(report)
    answer = max((one.answer for one in places), key=[FITS, TIGHT, DOES_NOT_FIT].index)
    worst = [one for one in places if one.answer == answer]
    least = min(worst, key=lambda one: report.counts(one.found) or one.found.micro_batch)
    names = ", ".join(one.found.name for one in worst)
    if len(worst) == len(places) > 1:
        names = f"{'any of' if answer == DOES_NOT_FIT else 'all'} {len(places)} devices"
    on = "on" if least.found.is_gpu or len(worst) > 1 else "in"  # host memory
    place = f"{least.found.name}{', which holds least' if len(worst) > 1 else ''}: " if len(places) > 1 else ""
    return answer, f"{answer[0].upper()}{answer[1:]} {on} {names}.", f"{place}{least.text}."


def alive_of(report: ReportContents) -> Section:
    """Return the tensors that are alive at the peak of the first step that was traced."""
    traced = next(((one.name, step) for one in report.places if (step := one.footprint) is not None), None)
    if traced is None:
        return Section("", (), ())
    name, step = traced
    whole = max(1, step.peak_bytes)
    rows = [
        (one.kind, one.module or NONE, _plain(one.operator), str(one.tensors), format_bytes(one.held_bytes),
         f"{one.held_bytes / whole:.0%}")
        for one in step.alive
    ]  # fmt: skip
    rest = step.peak_bytes - sum(one.held_bytes for one in step.alive)
    if rest > 0:
        rows.append(("all others", NONE, NONE, NONE, format_bytes(rest), f"{rest / whole:.0%}"))
    peak = f"{format_bytes(step.peak_bytes)} of {format_bytes(step.reserved_bytes)}"
    title = f"Tensors alive at the peak on {name}: {peak}, in {step.phase}"
    return Section(title, ("kind", "module", "made by", "tensors", "bytes", "share"), tuple(rows))


def _plain(operator: str) -> str:
    return operator.removeprefix("aten.").removesuffix(".default") or "there before"


def sections_of(report: ReportContents) -> list[Section]:
    """Return all tables that have rows, in reading order."""
    gpus = tuple((one.gpu.name, _memory_of(one)) for one in report.predicted)
    sections = [
        Section("Job", (), tuple(_job(report))),
        Section("Device", (), tuple(_device(report.measured))),
        Section("GPUs", (), gpus),
        _plans(report),
        *_memory_sections(report),
        Section("Time", (), tuple(_times(report))),
        _remedies(report),
    ]
    return [section for section in sections if section.rows]


def notes_of(report: ReportContents) -> list[tuple[str, tuple[str, ...]]]:
    """Return the report's notes, under two titles."""
    known = {note for one in report.predicted for note in one.notes}
    chosen = tuple(note for note in report.notes if note not in known)
    about = tuple(note for note in report.notes if note in known)
    return [("Chosen by default", chosen), ("About the predictions", about)]


def format_seconds(seconds: float) -> str:
    """Return a time as text such as "12.3 ms", "0.82 s" or "2:05:30"."""
    if seconds < 0.1:  # noqa: PLR2004 - from here on seconds are easier to read
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.2g} s" if seconds < 10 else str(timedelta(seconds=round(seconds)))  # noqa: PLR2004 - as above


def are_numbers(texts: Sequence[str]) -> bool:
    """Whether a column is right-aligned: most of its known values begin with a digit."""
    known = [text for text in texts if text and text != NONE]
    return 2 * sum(text.lstrip("-")[0].isdigit() for text in known) > len(known)


def _in_words(found: Measured | Predicted, plan: Plan) -> str:
    if plan.accum_steps == 1:
        if found.micro_batch > plan.target_batch:  # the search went beyond the window
            return f"{plan.target_batch} at once, {_largest(found)} would fit"
        return f"{plan.target_batch} {'or more ' if found.is_capped else ''}at once"
    return f"{plan.target_batch} in {plan.accum_steps} micro-batches, {format_cut(plan.micro_batches)}"


def _largest(found: Measured | Predicted) -> str:
    return f"{found.micro_batch}{' or more' if found.is_capped else ''}"


def _memory_of(one: Predicted) -> str:
    """Describe the memory a step may use on a GPU, and why that is less than all of it."""
    whole, taken = format_bytes(one.gpu.total_bytes), format_bytes(one.gpu.context_bytes)
    limit = f"; limit {format_bytes(one.room_bytes)}" if one.is_limited else ""
    display = f" and {format_bytes(one.gpu.display_bytes)} for a display" if one.gpu.display_bytes else ""
    return f"{whole} less {taken} for CUDA{display}, which leaves {format_bytes(one.gpu.free_bytes)}{limit}"


def _job(report: ReportContents) -> Iterator[tuple[str, str]]:
    subject = report.subject
    if subject.script is not None:
        yield "script", subject.script
    trained = "all" if subject.trainable == subject.parameters else f"{subject.trainable:,}"
    yield "model", f"{subject.model}, {subject.parameters:,} parameters, {trained} of them trained"
    yield "optimizer", subject.optimizer
    sharded = ", which share the model" if subject.is_sharded else ""
    each = "" if subject.ranks == 1 else f", {subject.share} on each of {subject.ranks} ranks{sharded}"
    yield "target batch", f"{subject.target_batch} samples{each}"


def _device(measured: Measured | None) -> Iterator[tuple[str, str]]:
    if measured is None:
        yield "measured", "nothing; all numbers are predicted"
        return
    device = measured.device
    yield "device", f"{device.name} ({device.device})"
    yield "memory", f"{format_bytes(device.total_bytes)}, {format_bytes(device.free_bytes)} free for this process"
    if device.limit_bytes is not None:
        yield "memory limit", format_bytes(device.limit_bytes)
    if device.others_bytes is not None:
        yield "held by others", format_bytes(device.others_bytes)
    for other in device.neighbours:
        used = "an unknown share" if other.used_bytes is None else format_bytes(other.used_bytes)
        yield f"process {other.pid}", f"{other.name}, {used}"


def _plans(report: ReportContents) -> Section:
    def row(found: Measured | Predicted) -> tuple[str, ...]:
        cut = NONE if found.plan is None else format_cut(found.plan.micro_batches)
        peak, headroom = _bytes(found.peak_bytes), _bytes(found.headroom_bytes)
        return _title(found), _largest(found), str(found.safe_micro_batch), cut, peak, headroom

    header = ("where", "largest", "safe", f"plan for {report.subject.share}", "peak", "headroom")
    return Section(PLANS, header, tuple(map(row, report.places)))


def _title(found: Measured | Predicted) -> str:
    return found.name if found.is_predicted else MEASURED


def _memory_sections(report: ReportContents) -> list[Section]:
    """Return the memory of a step by part, with as many places per table as fit."""
    groups: list[list[Measured | Predicted]] = []
    left = 0
    for found in (one for one in report.places if one.footprint is not None):
        width = max(_NUMBER, len(_title(found))) + _APART
        if not groups or width > left:
            groups.append([])
            left = _WIDTH - _NAMES
        groups[-1].append(found)
        left -= width
    return [_memory_table(group) for group in groups]


def parts_of(step: Footprint) -> dict[str, int]:
    """Return what a device holds at the peak of a step, by name of its kind; it adds up to `reserved_bytes`."""
    return {_NAMES_OF_KINDS.get(kind, kind): size for kind, size in step.bytes_by_kind.items()} | {
        OUTSIDE: step.outside_bytes
    }


def _memory_table(places: Sequence[Measured | Predicted]) -> Section:
    steps = [one.footprint for one in places if one.footprint is not None]
    parts = [parts_of(one) for one in steps]

    def row(name: str, text: Callable[[Footprint], str]) -> tuple[str, ...]:
        return (name, *map(text, steps))

    def known(name: str, numbers: Sequence[int | None]) -> Iterator[tuple[str, ...]]:
        if any(number is not None for number in numbers):
            yield (name, *map(_bytes, numbers))

    rows = [row("samples", lambda one: str(one.size)), ("precision", *(one.precision or NONE for one in places))]
    rows += [(name, *(_bytes(one[name]) for one in parts)) for name in parts[0] if any(one[name] for one in parts)]
    rows.append(row("peak in all", lambda one: format_bytes(one.reserved_bytes)))
    rows.append(row("the peak is in", lambda one: one.phase))
    rows += known("excluding model", [None if one.is_gpu else one.peak_bytes for one in places])
    rows += known("per extra sample", [one.bytes_per_sample for one in places])
    return Section("Memory of a step", ("", *map(_title, places)), tuple(rows))


def _times(report: ReportContents) -> Iterator[tuple[str, str]]:
    if (measured := report.measured) is not None and (pace := measured.pace) is not None:
        assert measured.plan is not None
        steps = measured.plan.accum_steps
        largest = f"{steps} micro-batch{'es' if steps > 1 else ''}, {format_seconds(pace.micro_batch_s)} the largest"
        optimizer = format_seconds(pace.optimizer_s)
        yield "optimizer step", f"{format_seconds(pace.step_s)}: {largest}; optimizer {optimizer}"
        yield "training", f"{pace.samples_per_s:,.1f} samples/s"
        if pace.epoch_s is not None and pace.epoch_samples is not None:
            yield "an epoch", f"{format_seconds(pace.epoch_s)} for {pace.epoch_samples:,} samples, without the loader"


def _remedies(report: ReportContents) -> Section:
    most = report.subject.max_micro_batch or report.subject.share
    rows = []
    for one in report.remedies:
        more = " or more" if one.micro_batch >= most else ""  # larger ones were not tried
        fits = f"{one.micro_batch}{more} ({one.safe_micro_batch} safely), {format_bytes(one.peak_bytes)}"
        rows.append((f"save_memory={one.save_memory!r}", f"micro-batches of {fits}"))
    return Section(f"What would help on {report.remedies_on}", (), tuple(rows))


def _bytes(number: int | None) -> str:
    return NONE if number is None else format_bytes(number)
