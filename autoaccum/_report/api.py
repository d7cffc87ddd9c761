"""`autoaccum.preflight`: checks the arguments, measures and predicts, and assembles one `Report`.

The job is not changed: parameters, buffers, gradients, optimizer state, random state and the loader's generators are
bit for bit as before; only the model's device may change, if something is measured.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autoaccum._arguments import check_bool, check_call, check_positive_int, shown
from autoaccum._data.batches import by_size, count
from autoaccum._data.loaders import check_loader
from autoaccum._data.nesting import tensors_in
from autoaccum._engine import devices, optimizers
from autoaccum._engine.assembly import assemble, check_shapes
from autoaccum._engine.batchnorm import BatchNorms
from autoaccum._engine.optimizers import name_of
from autoaccum._engine.options import Options
from autoaccum._engine.precision import own_half_type
from autoaccum._engine.savings import Savings, check_memory
from autoaccum._estimate.estimate import NotTracedError, trace_step
from autoaccum._estimate.fake import built_on_meta
from autoaccum._estimate.fake_step import undisturbed
from autoaccum._estimate.gpus import DISPLAY_MIB, custom_gpu, display_bytes, gpu_named, with_display
from autoaccum._estimate.ranks import in_buckets, sharding
from autoaccum._estimate.step_memory import condensed
from autoaccum._loss.objective import Objective
from autoaccum._memory.host import Host
from autoaccum._oom import let_go
from autoaccum._report import Report
from autoaccum._report.capacity import Asked, measure_on, predict
from autoaccum._report.loader_speed import first_batches, listen_to, samples_of
from autoaccum._report.records import HostFacts, Subject
from autoaccum._report.remedies import Place, Remedies, are_due, computes_bf16, names_in, saving
from autoaccum._system.notices import Notices
from autoaccum._system.own_code import raised_here
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from autoaccum._data.pieces import Split
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.optimizers import MakesOptimizer
    from autoaccum._estimate.allocation_trace import Timeline
    from autoaccum._estimate.estimate import Traced
    from autoaccum._estimate.gpus import GPU
    from autoaccum._estimate.step_memory import StepMemory
    from autoaccum._estimate.trace import Estimate
    from autoaccum._loss.objective import Loss
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._report.records import LoaderFacts, Measured, Predicted, Remedy


_LOG = logging.getLogger("autoaccum.report")
# Batches of a loader of which the largest counts.
_LOOKED_AT = 8


def preflight(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    target_batch: int,
    *,
    loss: Loss | Sequence[Loss] | None = None,
    loss_reduction: str | None = None,
    loss_scope: str = "micro_batch",
    forward: Callable[[nn.Module, Any], Any] | None = None,
    split: Split | None = None,
    batchnorm: str = "keep",
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MakesOptimizer | str | None = None,
    device: str | torch.device | MemoryBackend | None = None,
    precision: str = "auto",
    max_micro_batch: int | None = None,
    memory_limit: float | str | None = None,
    memory: str | Sequence[str] | None = None,
    gpus: str | Sequence[str] = (),
    device_memory: str | None = None,
    display: int | str | None = None,
    ranks: int = 1,
    fsdp: bool = False,
    loader: Iterable[Any] | None = None,
    measure: bool | None = None,
) -> Report:
    """Report whether and how a job can be trained: measured on a device at hand, predicted for others.

    Measuring runs real steps, and leaves parameters, buffers, gradients, optimizer state, random state and modes bit
    for bit as they were; only the model's device may have changed.

    Args:
        model: The model, or a function without arguments that makes it; if nothing is measured, it is made on the meta
            device, so that models of any size can be predicted.
        batch: A batch as the loader yields it; its samples are repeated to make larger ones, those of a list from the
            largest on.
        target_batch: Samples of an optimizer step.
        loss: As for `fit`.
        loss_reduction: As for `fit`.
        loss_scope: As for `fit`.
        forward: As for `fit`.
        split: As for `fit`.
        batchnorm: As for `fit`.
        optimizer: As for `fit`; the report includes its state.
        device: As for `fit`.
        precision: As for `fit`.
        max_micro_batch: The largest size of interest; None means `target_batch`.
        memory_limit: As for `fit`; also applies to the GPUs in `gpus`, unless something is measured on the CPU.
        memory: What saves memory from the start, as for `fit`: the report is of steps with it, except for "auto".
        gpus: Names of GPUs to predict for, such as "h100-80gb".
        device_memory: The memory of an unlisted GPU to predict for, such as "24GiB".
        display: The memory of each GPU that a display uses, in bytes or as "600MiB"; None means none.
        ranks: The processes that train together, each with a device and its share of `target_batch`. Predictions count
            the buckets through which gradients are sent.
        fsdp: Whether the model is sharded over the ranks by `fully_shard`, each repeated block and then the whole.
        loader: The loader; its speed is measured by iterating over it briefly. If its first batches differ in size, the
            report is of the largest of them, in place of `batch`.
        measure: Whether to measure on a device at hand. None measures, unless GPUs are given and there is neither
            `device` nor an accelerator.

    Returns:
        The report. That nothing fits is a result, not an error.

    Raises:
        InvalidInputError: An argument cannot be used, a GPU is unknown, or there is nothing to report on.
        DeviceMissingError: This machine does not have `device`.
    """
    check_positive_int("target_batch", target_batch)
    options = Options.of(preflight, locals())
    share = _share(ranks, target_batch, fsdp)
    most = share if max_micro_batch is None else check_positive_int("max_micro_batch", max_micro_batch)
    if measure is not None:
        check_bool("measure", measure)
    if loader is not None:
        check_loader("loader", loader, split)
    count(batch, split)
    notices = Notices(silent=True)
    # As training takes them: the largest first.
    batch = by_size(_largest_of(batch, loader, notices), split)
    among = _chosen(gpus, device_memory, display)
    measures = _measures(measure, among, device)
    limits_gpus = not (measures and _is_host(device))
    _say_of_room(notices, among, memory_limit, display, limits_gpus=limits_gpus)
    _say_of_ranks(notices, ranks, share, fsdp)
    adapts = saving(names_in(memory, notices))
    made = _made(model, notices, on_meta=not measures)
    asked = Asked(batch, share, most, memory_limit, loss_scope)
    of_gpus = asked if limits_gpus else replace(asked, memory_limit=None)
    on_rank = _rank_of(made, ranks, fsdp)
    way: dict[str, Any] = {"loss": loss, "forward": forward, "loss_reduction": loss_reduction, "split": split}
    objective = Objective(made, notices=notices, **way)
    chosen = optimizers.resolve(optimizer, objective.modules, notices)
    way |= {"optimizer": chosen, "adapts": adapts}
    warnings: list[str] = []
    predicted: list[Predicted] = []
    estimates: dict[str, Estimate] = {}
    try:
        with undisturbed():
            for one, estimate in _predicted(of_gpus, among, made, precision, on_rank, way):
                predicted.append(one)
                estimates[one.gpu.name] = estimate
    except NotTracedError as error:
        if not measures:
            raise
        warnings.append(f"not predicted for {', '.join(gpu.name for gpu in among)}: {error}")
    measured: Measured | None = None
    if measures:
        backend = devices.resolve(device, made, notices)
        put_together = partial(assemble, made, replace(options, optimizer=chosen), memory=backend, notices=notices)
        measured, further = _measured(asked, backend, put_together, memory, notices)
        warnings += further
        measured = replace(measured, step_memory=_traced(asked, made, way, measured))
    with undisturbed():
        remedies_on, remedies, of_remedies = _remedies(asked, measured, predicted, estimates, made, way, on_rank)
    facts = None
    if measured is not None and loader is not None:
        _LOG.info("timing the loader")
        measured, facts = _with_loader(loader, measured, count(batch, split), split)
    return Report(
        subject=replace(
            _subject(made, chosen, asked),
            target_batch=target_batch,
            limits_gpus=limits_gpus,
            ranks=ranks,
            is_sharded=fsdp,
        ),
        measured=measured,
        predicted=tuple(predicted),
        host=_host(),
        loader=facts,
        remedies=remedies,
        remedies_on=remedies_on,
        warnings=(
            *warnings,
            *_plan_warnings(objective.modules, batchnorm, measured, predicted, facts),
            *of_remedies,
        ),
        notes=tuple(dict.fromkeys([*notices.texts, *(note for one in predicted for note in one.notes)])),
        timelines={one.gpu.name: estimates[one.gpu.name].timeline(one.footprint.size) for one in predicted},
    )


def _share(ranks: int, target_batch: int, fsdp: bool) -> int:
    """Check the arguments `ranks` and `fsdp`, and return the samples per optimizer step on one rank."""
    check_positive_int("ranks", ranks)
    check_bool("fsdp", fsdp)
    if ranks > target_batch:
        raise InvalidInputError(
            f"ranks={ranks}: a target batch of {target_batch} has not one sample for each; use fewer ranks, or a "
            "larger target batch"
        )
    if fsdp and ranks == 1:
        raise InvalidInputError("fsdp=True: nothing is sharded over one rank; pass ranks=, such as ranks=8")
    return -(-target_batch // ranks)


def _rank_of(model: nn.Module, ranks: int, fsdp: bool) -> Callable[[Timeline], Timeline]:
    """Return what makes the step of one rank from that of a process that trains alone."""
    if ranks == 1:
        return lambda timeline: timeline
    return sharding(model, ranks) if fsdp else in_buckets


def _say_of_ranks(notices: Notices, ranks: int, share: int, fsdp: bool) -> None:
    if ranks > 1:
        how = "each holds the whole model, and buckets of gradients"
        if fsdp:
            how = "fully_shard of each repeated block and of the model, which was not confirmed on GPUs"
        notices.say(
            f"ranks: {share} samples on each of {ranks}; {how}; the network library's own memory is not counted"
        )


def _largest_of(batch: Any, loader: Iterable[Any] | None, notices: Notices) -> Any:
    """Return the batch with the most numbers of a loader's first, whose sequences may differ in length."""
    several = [] if loader is None else first_batches(loader, _LOOKED_AT)
    sizes = [sum(tensor.numel() for tensor in tensors_in(one)) for one in several]
    if not sizes or min(sizes) == max(sizes):
        return batch
    notices.say(
        f"batches: the first {len(sizes)} of the loader differ in size; the report is of the largest, and a larger one "
        "takes more"
    )
    return several[sizes.index(max(sizes))]


def _measured(
    asked: Asked,
    backend: MemoryBackend,
    put_together: Callable[[], TrainingStep],
    memory: str | Sequence[str] | None,
    notices: Notices,
) -> tuple[Measured, tuple[str, ...]]:
    """Measure steps that save memory as asked, and put the model back as it was."""
    _LOG.info("measuring on %s", backend.name)
    names = names_in(memory, notices)
    check_memory(names, backend)
    with ExitStack() as saved:

        def saving_memory() -> TrainingStep:
            step = put_together()
            kept = Savings(step.objective.modules, names, backend, notices)
            saved.enter_context(kept.in_force())
            return step

        return measure_on(asked, backend, saving_memory)


def _traced(asked: Asked, model: nn.Module, way: Mapping[str, Any], measured: Measured) -> StepMemory | None:
    """Trace the step that was measured, to see who holds its memory; None if that cannot be done on fake tensors."""
    kind = measured.device.device.partition(":")[0]
    # A loss over the whole window runs every micro-batch twice, which a trace does not.
    if kind not in ("cpu", "cuda") or asked.loss_scope != "micro_batch":
        return None
    _LOG.info("tracing a step")
    size = 1 if measured.plan is None else measured.plan.micro_batch
    how: dict[str, Any] = {"kind": kind, "precision": measured.precision or "fp32", "sizes": [size], "most": size}
    try:
        traced = trace_step(model, asked.batch, tensor_float=computes_bf16(measured.device.device), **how, **way)
        return condensed(traced.step_of(size))
    except Exception as error:
        # It ran for real, and the report does not fail for lack of a picture.
        if raised_here(error) and not isinstance(error, InvalidInputError):
            raise
        let_go(error)
        return None


def _say_of_room(
    notices: Notices,
    gpus: Sequence[GPU],
    memory_limit: float | str | None,
    display: int | str | None,
    *,
    limits_gpus: bool,
) -> None:
    """Say what is assumed of the GPUs' memory."""
    if memory_limit is not None and gpus and not limits_gpus:
        notices.say(f"memory_limit={memory_limit!r}: the CPU's, on which is measured; the GPUs are not limited")
    if display is None and (with_outputs := [gpu.name for gpu in gpus if gpu.has_outputs]):
        notices.say(
            f"display: none is assumed on {', '.join(with_outputs)}; one took {DISPLAY_MIB[0]} to {DISPLAY_MIB[1]} MiB "
            "of RTX 4090s (--display SIZE, in Python display=)"
        )


def _is_host(device: object) -> bool:
    """Whether `device`, as passed to `preflight`, is the CPU."""
    if device is None:
        return not torch.accelerator.is_available()
    own = getattr(device, "device", device)  # a memory backend's
    return own.partition(":")[0] == "cpu" if isinstance(own, str) else getattr(own, "type", None) == "cpu"


def _chosen(gpus: str | Sequence[str], device_memory: str | None, display: int | str | None) -> list[GPU]:
    if not isinstance(gpus, str | list | tuple):
        raise InvalidInputError(f"gpus={shown(gpus)} must be a name or a list of names, such as ['h100-80gb']")
    names = [gpus] if isinstance(gpus, str) else gpus
    found = list(dict.fromkeys(gpu_named(name) for name in names))  # two names may mean the same GPU
    if device_memory is not None:
        found.append(custom_gpu(device_memory))
    if display is None:
        return found
    display_bytes(display)  # is wrong even without a GPU
    return [with_display(gpu, display) for gpu in found]


def _measures(asked: bool | None, gpus: Sequence[GPU], device: object) -> bool:
    if asked is not None and not asked and not gpus:
        raise InvalidInputError(
            "measure=False and no GPUs: there is nothing to report; name GPUs (gpus=['h100-80gb']), pass "
            "device_memory=, or measure"
        )
    if asked is not None:
        return asked
    return not gpus or device is not None or torch.accelerator.is_available()


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
    gpus: Sequence[GPU],
    model: nn.Module,
    precision: str,
    on_rank: Callable[[Timeline], Timeline],
    way: dict[str, Any],
) -> Iterator[tuple[Predicted, Estimate]]:
    """Trace the step once for each precision the GPUs would use, with and without TF32; yield what fits on each.

    GPUs of which the model asks what they answer differently each have a trace of their own.
    """
    traced: dict[tuple[str, bool], list[Traced]] = {}
    for gpu in gpus:
        name = _precision_on(gpu, model, precision)
        _LOG.info("predicting for %s in %s", gpu.name, name)
        known = traced.setdefault((name, gpu.tensor_float), [])
        fitting = next((one for one in known if one.holds_for(gpu)), None)
        if fitting is None:
            options = {"precision": name, "tensor_float": gpu.tensor_float, "gpu": gpu, "most": asked.most}
            fitting = trace_step(model, asked.batch, kind="cuda", **way | options).changed(on_rank)
            known.append(fitting)
        estimate = fitting.estimate(gpu)
        yield predict(asked, gpu, name, estimate), estimate


def _remedies(
    asked: Asked,
    measured: Measured | None,
    predicted: Sequence[Predicted],
    estimates: Mapping[str, Estimate],
    model: nn.Module,
    way: Mapping[str, Any],
    on_rank: Callable[[Timeline], Timeline],
) -> tuple[str | None, tuple[Remedy, ...], tuple[str, ...]]:
    """Return the first device that needs a smaller step, the remedies for it, and warnings."""
    if asked.loss_scope != "micro_batch":
        return None, (), ()
    found: list[Measured | Predicted] = [*([] if measured is None else [measured]), *predicted]
    due = [one for one in found if are_due(one, asked.target_batch)]
    if not due:
        return None, (), ()
    first, *further = due
    name, place = first.name, Place.of(first)
    if place.kind not in ("cpu", "cuda"):
        return None, (), (f"what would help on {name}: not predicted for {place.kind}",)
    _LOG.info("looking for what would help on %s", name)

    def trace(**options: Any) -> Traced:
        step = trace_step(**{"model": model} | dict(way) | options)
        return step if place.gpu is None else step.changed(on_rank)

    try:
        if place.gpu is not None:
            unchanged = estimates[name]
        else:
            how: dict[str, Any] = {"kind": place.kind, "precision": place.precision, "tensor_float": place.half}
            unchanged = trace(batch=asked.batch, sizes=sorted({1, asked.most}), **how).estimate()
        gpus = [one.gpu for one in predicted]
        tried = Remedies(asked, place, unchanged, trace, model, way["optimizer"], gpus)
        remedies = tried.all()
    except NotTracedError as error:  # it was measured
        return None, (), (f"what would help on {name}: {error}",)
    warnings = []
    if not remedies:
        warnings.append(f"what would help on {name}: none of the changes tried")
    if tried.failed:
        warnings.append(f"what would help on {name}: the model fails with {', '.join(tried.failed)}")
    if further:
        others = " and ".join(one.name for one in further)
        warnings.append(f"remedies are listed only for {name}; for {others} run a report without it")
    return name, remedies, tuple(warnings)


def _precision_on(gpu: GPU, model: nn.Module, asked: str) -> str:
    own = own_half_type(model)
    if own is not None or asked != "auto":
        return own or asked
    return "bf16" if gpu.bf16 else "fp16"


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
