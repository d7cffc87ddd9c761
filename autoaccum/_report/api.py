"""`autoaccum.preflight`: checks the arguments, measures and predicts, and assembles one `Report`.

The job is not changed: parameters, buffers, gradients, optimizer state, random state and the loader's generators are
bit for bit as before; only the model's device may change, if something is measured.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autoaccum._arguments import (
    check_bool,
    check_call,
    check_function,
    check_positive_int,
    check_positive_number,
    shown,
)
from autoaccum._data.batches import count
from autoaccum._data.loaders import check_loader
from autoaccum._data.sample_sizes import by_size
from autoaccum._data.splits import is_first
from autoaccum._engine import devices, optimizers
from autoaccum._engine.assembly import assemble, check_shapes
from autoaccum._engine.batchnorm import BatchNorms
from autoaccum._engine.optimizer_list import name_of
from autoaccum._engine.options import Options
from autoaccum._engine.precision import own_half_type
from autoaccum._engine.saving_names import check_memory
from autoaccum._engine.savings import Savings
from autoaccum._estimate.estimate import trace_step
from autoaccum._estimate.fake import built_on_meta
from autoaccum._estimate.gpus import DISPLAY_MIB, card_named, custom_card, display_bytes, with_display
from autoaccum._estimate.moments import condensed
from autoaccum._loss.objective import Objective
from autoaccum._memory.host import Host
from autoaccum._oom import let_go
from autoaccum._report import Report
from autoaccum._report.capacity import Asked, measure_on, predict
from autoaccum._report.durations import seconds_in
from autoaccum._report.loader_speed import first_batches, listen_to, samples_of
from autoaccum._report.many_ranks import ManyRanks
from autoaccum._report.records import HostFacts, Subject
from autoaccum._report.remedies import Place, Remedies, are_due, computes_bf16
from autoaccum._report.savings import names_in, saving, together
from autoaccum._report.sequence_lengths import may_vary, of_length
from autoaccum._report.wording import format_seconds
from autoaccum._system.notices import Notices
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from autoaccum._data.pieces import Split
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.optimizers import MakesOptimizer
    from autoaccum._estimate.allocation_trace import Timeline
    from autoaccum._estimate.estimate import Traced
    from autoaccum._estimate.gpus import Card
    from autoaccum._estimate.moments import StepMemory
    from autoaccum._loss.objective import Loss
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import Trial
    from autoaccum._report.records import Lengths, LoaderFacts, Measured, Predicted, Remedy


# Batches of a loader whose sequence lengths are read.
_LOOKED_AT = 8


def preflight(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    target_batch: int,
    *,
    loss: Loss | Sequence[Loss] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MakesOptimizer | str | None = None,
    device: str | torch.device | MemoryBackend | None = None,
    precision: str = "auto",
    memory_limit: float | str | None = None,
    memory: str | Sequence[str] | None = None,
    max_micro_batch: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    loss_reduction: str | None = None,
    loss_scope: str = "micro_batch",
    batchnorm: str = "keep",
    split: Split | None = None,
    gpus: str | Sequence[str] = (),
    device_memory: str | None = None,
    display: int | str | None = None,
    ranks: int = 1,
    fsdp: bool = False,
    loader: Iterable[Any] | None = None,
    length: int | Mapping[str, int] | None = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    time_limit: float | str | None = None,
    measure: bool | None = None,
    on_trial: Callable[[Trial], None] = lambda _: None,
    on_part: Callable[[str], None] = lambda _: None,
) -> Report:
    """Report whether and how a job can be trained: measured on a device at hand, predicted for others.

    Measuring runs real steps, and leaves parameters, buffers, gradients, optimizer state, random state and modes bit
    for bit as they were; only the model's device may have changed.

    Args:
        model: The model, or a function without arguments that makes it; if nothing is measured, it is made on the meta
            device, so that models of any size can be predicted.
        batch: A batch as the loader yields it; its samples are repeated to make larger ones, those of a list from the
            largest on.
        target_batch: Samples per update.
        loss: As for `fit`.
        optimizer: As for `fit`; the report includes its state.
        device: As for `fit`.
        precision: As for `fit`.
        memory_limit: As for `fit`; also applies to the cards in `gpus`, unless something is measured on the CPU.
        memory: What saves memory from the start, as for `fit`: the report is of steps with it, except for "auto".
        max_micro_batch: The largest size of interest; None means `target_batch`.
        forward: As for `fit`.
        loss_reduction: As for `fit`.
        loss_scope: As for `fit`.
        batchnorm: As for `fit`.
        split: As for `fit`.
        gpus: Names of cards to predict for, such as "h100-80gb".
        device_memory: The memory of an unlisted card to predict for, such as "24GiB".
        display: The memory of each card that a display uses, in bytes or as "600MiB"; None means none.
        ranks: The processes that train together, each with a device and its share of `target_batch`. Predictions count
            the buckets through which gradients are sent.
        fsdp: Whether the model is sharded over the ranks by `fully_shard`, each repeated block and then the whole.
        loader: The loader; its speed is measured by iterating over it briefly.
        length: The sequence length; batches are cut or padded to it. If the sequences of a batch differ in length, a
            mapping by their names in the batch: `{"input_ids": 512, "labels": 64}`. None keeps the batch's length, or
            the longest in the loader's first batches if those differ.
        epochs: As for `fit`; with this or `max_steps` the report estimates the time of the whole training.
        max_steps: As for `fit`.
        time_limit: The time allowed for the whole training, in seconds or as "12h" or "1-12:00:00"; the report warns if
            training takes longer.
        measure: Whether to measure on a device at hand. None measures, unless cards are given and there is neither
            `device` nor an accelerator.
        on_trial: Called after each trial.
        on_part: Called with a short description before each slow part.

    Returns:
        The report. That nothing fits is a result, not an error.

    Raises:
        InvalidInputError: An argument cannot be used, a card is unknown, or there is nothing to report on.
        DeviceMissingError: This machine does not have `device`.
    """
    check_positive_int("target_batch", target_batch)
    options = Options.of(preflight, locals())
    group = ManyRanks(ranks, target_batch, fsdp)
    most = group.share if max_micro_batch is None else check_positive_int("max_micro_batch", max_micro_batch)
    _check_ways(measure, loader, split, on_trial, on_part)
    limit_s = _limit_s(epochs, max_steps, time_limit)
    batch, lengths = _at_length(batch, loader, length, split)
    batch = by_size(batch, split)  # as training takes them
    cards = _cards(gpus, device_memory, display)
    measures = _measures(measure, cards, device)
    notices = Notices(silent=True)
    limits_cards = not (measures and _is_host(device))
    about_cards = _about_room(cards, memory_limit, display, limits_cards=limits_cards)
    for note in (*about_cards, *group.notes):
        notices.say(note)
    adapt = saving(names_in(memory, notices))
    made = _made(model, notices, on_meta=not measures)
    asked = Asked(batch, group.share, most, memory_limit, loss_scope)

    way: dict[str, Any] = {"loss": loss, "forward": forward, "loss_reduction": loss_reduction, "split": split}

    def predicted_for(made: nn.Module) -> tuple[Objective, torch.optim.Optimizer, tuple[Predicted, ...]]:
        objective = Objective(made, notices=notices, **way)
        chosen = optimizers.resolve(optimizer, objective.modules, notices)
        of_cards = asked if limits_cards else replace(asked, memory_limit=None)
        tracing = {"optimizer": chosen, "adapt": adapt, **way}
        predicted = _predicted(of_cards, cards, made, precision, on_part, group.changed(made), **tracing)
        return objective, chosen, predicted

    objective, chosen, predicted = predicted_for(made)
    measured: Measured | None = None
    warnings: tuple[str, ...] = ()
    if measures:
        backend = devices.resolve(device, made, notices)
        ways = (
            partial(assemble, made, replace(options, optimizer=chosen), memory=backend, notices=notices),
            partial(_traced, asked, made, {"optimizer": chosen, "adapt": adapt, **way}),
        )
        measured, warnings = _measured(asked, backend, *ways, on_trial, on_part, memory, notices)
    remedies_on, remedies, of_remedies = _remedies(
        asked,
        measured,
        predicted,
        made,
        chosen,
        on_part,
        {**way, "adapt": adapt},
        group.changed(made),
    )
    facts = None
    if measured is not None:
        if loader is not None:
            on_part("timing the loader")
            measured, facts = _with_loader(loader, measured, count(batch, split), split)
        measured = _to_the_end(measured, group.share, epochs, max_steps, limit_s)
    return Report(
        subject=replace(
            _subject(made, chosen, asked),
            target_batch=target_batch,
            limits_cards=limits_cards,
            ranks=ranks,
            is_sharded=fsdp,
        ),
        measured=measured,
        predicted=predicted,
        host=_host(),
        loader=facts,
        remedies=remedies,
        remedies_on=remedies_on,
        lengths=lengths,
        warnings=(
            *_length_warnings(lengths),
            *warnings,
            *_plan_warnings(objective.modules, batchnorm, measured, predicted, facts),
            *_time_warnings(measured, limit_s),
            *of_remedies,
        ),
        notes=tuple(dict.fromkeys([*notices.texts, *(note for one in predicted for note in one.estimate.notes)])),
    )


def _measured(
    asked: Asked,
    backend: MemoryBackend,
    put_together: Callable[[], TrainingStep],
    trace: Callable[[Measured], StepMemory | None],
    on_trial: Callable[[Trial], None],
    on_part: Callable[[str], None],
    memory: str | Sequence[str] | None,
    notices: Notices,
) -> tuple[Measured, tuple[str, ...]]:
    """Measure steps that save memory as asked, and put the model back as it was."""
    on_part(f"measuring on {backend.name}")
    names = names_in(memory, notices)
    check_memory(names, backend)
    with ExitStack() as saved:

        def saving_memory() -> TrainingStep:
            step = put_together()
            kept = Savings(step.objective.modules, names, backend, notices)
            saved.enter_context(kept.in_force())
            return step

        measured, warnings = measure_on(asked, backend, saving_memory, on_trial)
    on_part("tracing a step")
    return replace(measured, step_memory=trace(measured)), warnings


def _traced(asked: Asked, model: nn.Module, what: Mapping[str, Any], measured: Measured) -> StepMemory | None:
    """Trace the step that was measured, to see who holds its memory; None if that cannot be done on fake tensors."""
    kind = measured.device.device.partition(":")[0]
    # A loss over the whole window runs every micro-batch twice, which a trace does not.
    if kind not in ("cpu", "cuda") or asked.loss_scope != "micro_batch":
        return None
    size = 1 if measured.plan is None else measured.plan.micro_batch
    how: dict[str, Any] = {
        "kind": kind,
        "precision": measured.precision or "fp32",
        "sizes": [size],
        "most": size,
    }
    try:
        tensor_float = computes_bf16(measured.device.device)
        traced = trace_step(model, asked.batch, tensor_float=tensor_float, **how, **what)
        return condensed(traced.step_of(size))
    except Exception as error:  # noqa: BLE001 - it ran for real, and the report does not fail for lack of a picture
        let_go(error)
        return None


def _at_length(
    batch: Any, loader: Iterable[Any] | None, length: int | Mapping[str, int] | None, split: Split | None
) -> tuple[Any, Lengths | None]:
    """Return the batch at the length that the report holds for, and the lengths seen; None without sequences."""
    count(batch, split)
    if is_first(split):
        further = [] if loader is None or not may_vary(batch) else first_batches(loader, _LOOKED_AT)
        return of_length(batch, further, length)
    if length is not None:
        raise InvalidInputError(
            f"length={shown(length)} cuts or pads tensors whose first dimension is the samples, and with "
            f"split={shown(split)} they are not so; pass a batch of that length"
        )
    return batch, None


def _about_room(
    cards: Sequence[Card], memory_limit: float | str | None, display: int | str | None, *, limits_cards: bool
) -> Iterator[str]:
    """Yield what is assumed of the cards' memory."""
    if memory_limit is not None and cards and not limits_cards:
        yield f"memory_limit={memory_limit!r}: the CPU's, on which is measured; the cards are not limited"
    if display is None and (with_outputs := [card.name for card in cards if card.has_outputs]):
        yield (
            f"display: none is assumed on {', '.join(with_outputs)}; one took {DISPLAY_MIB[0]} to {DISPLAY_MIB[1]} MiB "
            "of RTX 4090s (--display SIZE, in Python display=)"
        )


def _check_ways(measure: object, loader: object, split: Split | None, on_trial: object, on_part: object) -> None:
    if measure is not None:
        check_bool("measure", measure)
    if loader is not None:
        check_loader("loader", loader, split)
    check_function("on_trial", on_trial, "trial")
    check_function("on_part", on_part, "text")


def _limit_s(epochs: int | None, max_steps: int | None, time_limit: float | str | None) -> float | None:
    """Check the length of the training and its time limit; return the limit in seconds."""
    for name, number in (("epochs", epochs), ("max_steps", max_steps)):
        if number is not None:
            check_positive_int(name, number)
    if time_limit is None:
        return None
    if isinstance(time_limit, str):
        return seconds_in(time_limit, name="time_limit")
    return check_positive_number("time_limit", time_limit)


def _length_warnings(lengths: Lengths | None) -> list[str]:
    if lengths is None or not lengths.varies or lengths.is_asked:
        return []
    seen = f"{lengths.batches} batches hold sequences of length {lengths.shortest} to {lengths.longest}"
    holds = f"this report holds for length {lengths.used}, the longest seen"
    return [f"{seen}: {holds}; pass the longest length expected (--length, in Python length=)"]


def _is_host(device: object) -> bool:
    """Whether `device`, as passed to `preflight`, is the CPU."""
    if device is None:
        return not torch.accelerator.is_available()
    own = getattr(device, "device", device)  # a memory backend's
    return own.partition(":")[0] == "cpu" if isinstance(own, str) else getattr(own, "type", None) == "cpu"


def _cards(gpus: str | Sequence[str], device_memory: str | None, display: int | str | None) -> list[Card]:
    if not isinstance(gpus, str | list | tuple):
        raise InvalidInputError(f"gpus={shown(gpus)} must be a name or a list of names, such as ['h100-80gb']")
    names = [gpus] if isinstance(gpus, str) else gpus
    cards = list(dict.fromkeys(card_named(name) for name in names))  # two names may mean the same card
    if device_memory is not None:
        cards.append(custom_card(device_memory))
    if display is None:
        return cards
    display_bytes(display)  # is wrong even without a card
    return [with_display(card, display) for card in cards]


def _measures(asked: bool | None, cards: Sequence[Card], device: object) -> bool:
    if asked is not None and not asked and not cards:
        raise InvalidInputError(
            "measure=False and no cards: there is nothing to report; name cards (gpus=['h100-80gb']), pass "
            "device_memory=, or measure"
        )
    if asked is not None:
        return asked
    return not cards or device is not None or torch.accelerator.is_available()


def _made(model: nn.Module | Callable[[], nn.Module], notices: Notices, *, on_meta: bool) -> nn.Module:
    made = model
    if callable(model) and not isinstance(model, nn.Module):
        check_call("model", model, "")
        made = built_on_meta(model, notices) if on_meta else model()
    if not isinstance(made, nn.Module):
        raise InvalidInputError(
            f"model={shown(model)} must be a torch.nn.Module, or a function without arguments that makes one"
        )
    check_shapes(made)
    return made


def _predicted(
    asked: Asked,
    cards: Sequence[Card],
    model: nn.Module,
    precision: str,
    on_part: Callable[[str], None],
    on_rank: Callable[[Timeline], Timeline],
    **what: Any,
) -> tuple[Predicted, ...]:
    """Trace the step once for each precision the cards would use, with and without TF32.

    Cards of which the model asks what they answer differently each have a trace of their own.
    """
    traced: dict[tuple[str, bool], list[Traced]] = {}
    predicted = []
    for card in cards:
        name = _precision_on(card, model, precision)
        on_part(f"predicting for {card.name} in {name}")
        known = traced.setdefault((name, card.tensor_float), [])
        fitting = next((one for one in known if one.holds_for(card)), None)
        if fitting is None:
            options = what | {"precision": name, "tensor_float": card.tensor_float, "card": card}
            step = trace_step(model, asked.batch, kind="cuda", most=asked.most, **options)
            fitting = step.changed(on_rank)
            known.append(fitting)
        predicted.append(predict(asked, card, name, fitting.estimate(card)))
    return tuple(predicted)


def _remedies(
    asked: Asked,
    measured: Measured | None,
    predicted: Sequence[Predicted],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    on_part: Callable[[str], None],
    way: Mapping[str, Any],
    on_rank: Callable[[Timeline], Timeline],
) -> tuple[str | None, tuple[Remedy, ...], tuple[str, ...]]:
    """Return the first device that needs a smaller step, the remedies for it, and warnings."""
    if asked.loss_scope != "micro_batch":
        return None, (), ()
    on_part("looking for remedies")
    places: list[tuple[str, Place]] = []
    if measured is not None and are_due(measured.micro_batch, asked.target_batch):
        device = measured.device
        place = Place(
            kind="cuda" if device.device.startswith("cuda") else "cpu",
            card=None,
            room_bytes=device.room_bytes,
            unlimited_bytes=None if device.limit_bytes is None else max(device.free_bytes, device.room_bytes),
            holds_model=device.holds_model,
            precision=measured.precision or "fp32",
            half=computes_bf16(device.device),
            failed=1 if measured.micro_batch == 0 else measured.smallest_failed,
        )
        places.append((device.name, place))
    for one in predicted:
        if are_due(one.safe_micro_batch, asked.target_batch):
            is_limited = one.room_bytes < one.card.free_bytes
            place = Place(
                kind="cuda",
                card=one.card,
                room_bytes=one.room_bytes,
                unlimited_bytes=one.card.free_bytes if is_limited else None,
                holds_model=True,
                precision=one.precision,
                half=one.card.bf16,
            )
            places.append((one.card.name, place))
    if not places:
        return None, (), ()
    (name, place), *further = places

    def trace(**options: Any) -> Traced:
        adapt = together([way["adapt"], options.get("adapt")])  # beside what is in force already
        step = trace_step(**{"model": model, "optimizer": optimizer, **way} | options | {"adapt": adapt})
        return step if place.card is None else step.changed(on_rank)

    cards = [one.card for one in predicted]
    remedies = Remedies(asked, place, trace, model, optimizer, cards).all()
    warnings = []
    if not remedies:
        warnings.append(f"what would help on {name}: none of the changes tried")
    if further:
        others = " and ".join(other for other, _ in further)
        warnings.append(
            f"remedies are listed only for {name}, the first that needs them; for {others} run a report without it"
        )
    return name, remedies, tuple(warnings)


def _precision_on(card: Card, model: nn.Module, asked: str) -> str:
    own = own_half_type(model)
    if own is not None or asked != "auto":
        return own or asked
    return "bf16" if card.bf16 else "fp16"


def _with_loader(
    loader: Iterable[Any], measured: Measured, samples_of_first: int, split: Split | None
) -> tuple[Measured, LoaderFacts | None]:
    """Time the loader, and estimate the time of an epoch with it."""
    heard, pace = listen_to(loader, split), measured.pace
    loads = None if heard is None else heard.samples_per_s
    if pace is None:
        return measured, heard
    if heard is not None and loads is not None:
        heard = replace(heard, feeds=loads >= pace.samples_per_s)
    samples = samples_of(loader, samples_of_first)
    epoch_s = None
    if samples is not None:
        trains_s, loads_s = samples / pace.samples_per_s, 0.0 if loads is None else samples / loads
        # Workers load while the device computes; without workers the two alternate.
        in_turns = heard is not None and not heard.workers
        epoch_s = trains_s + loads_s if in_turns else max(trains_s, loads_s)
    return replace(measured, pace=replace(pace, epoch_samples=samples, epoch_s=epoch_s)), heard


def _to_the_end(
    measured: Measured, target_batch: int, epochs: int | None, max_steps: int | None, limit_s: float | None
) -> Measured:
    """Estimate the time of the whole training, which epochs or steps end."""
    pace = measured.pace
    if pace is None:
        return measured
    whole = []
    if epochs is not None and pace.epoch_s is not None:
        whole.append(epochs * pace.epoch_s)
    if max_steps is not None:
        with_loader = pace.epoch_s is not None and pace.epoch_samples
        sample_s = pace.epoch_s / pace.epoch_samples if with_loader else 1 / pace.samples_per_s  # type: ignore[operator]
        whole.append(max_steps * target_batch * sample_s)
    return replace(measured, pace=replace(pace, training_s=min(whole, default=None), limit_s=limit_s))


def _time_warnings(measured: Measured | None, limit_s: float | None) -> list[str]:
    if limit_s is None:
        return []
    pace = None if measured is None else measured.pace
    if pace is None or pace.training_s is None:
        why = "nothing was timed" if pace is None else "its length is unknown (epochs=, max_steps=)"
        return [f"cannot estimate whether training finishes within {format_seconds(limit_s)}: {why}"]
    if pace.training_s <= limit_s:
        return []
    taken = f"the whole training takes {format_seconds(pace.training_s)} of {format_seconds(limit_s)} allowed"
    return [f"{taken}: train fewer epochs or steps, allow more time, or continue in another job (checkpoint=)"]


def _plan_warnings(
    modules: Sequence[nn.Module],
    batchnorm: str,
    measured: Measured | None,
    predicted: Sequence[Predicted],
    loader: LoaderFacts | None,
) -> list[str]:
    warnings = Notices(silent=True)
    norms = BatchNorms(modules, batchnorm, warnings)
    plans = [one.plan for one in predicted] if measured is None else [measured.plan]
    for plan in plans:
        if plan is not None:
            norms.announce(plan.micro_batches)
    if loader is not None and loader.feeds is False:
        warnings.say(
            "the loader is slower than the training, which will wait for it; use more workers (num_workers=) or less "
            "work per sample"
        )
    return list(warnings.texts)


def _subject(model: nn.Module, optimizer: torch.optim.Optimizer, asked: Asked) -> Subject:
    parameters = list(model.parameters())
    return Subject(
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        optimizer=name_of(optimizer),
        target_batch=asked.target_batch,
        max_micro_batch=asked.most,
        memory_limit=None if asked.memory_limit is None else str(asked.memory_limit),
    )


def _host() -> HostFacts:
    reading = Host().reading()
    return HostFacts(reading.total_bytes, reading.free_bytes)
