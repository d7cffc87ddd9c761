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
from autoaccum._data.batches import count
from autoaccum._data.loaders import check_loader
from autoaccum._data.nesting import tensors_in
from autoaccum._data.order import by_size
from autoaccum._data.random_state import RandomState
from autoaccum._engine import devices, optimizers
from autoaccum._engine.assembly import assemble, check_shapes
from autoaccum._engine.batchnorm import BatchNorms
from autoaccum._engine.optimizers import name_of
from autoaccum._engine.options import Options
from autoaccum._engine.precision import own_half_type
from autoaccum._estimate.estimate import NotTracedError, trace_step
from autoaccum._estimate.fake import built_on_meta
from autoaccum._estimate.fake_step import undisturbed
from autoaccum._estimate.gpus import custom_gpu, gpu_named, is_known, with_display
from autoaccum._estimate.ranks import in_buckets, sharding
from autoaccum._loss.calls import Calls
from autoaccum._loss.loss_sources import check_loss_reduction
from autoaccum._memory.limits import parse_size
from autoaccum._oom import clear_traceback_frames, first_line
from autoaccum._report import Report
from autoaccum._report.capacity import Question, measure_on, predict
from autoaccum._report.loaders import first_batches, samples_of
from autoaccum._report.records import Measured, Predicted, Subject
from autoaccum._report.remedies import adapts_of, are_due, kernels_of, names_in, suggested
from autoaccum._saving.savings import Savings, check_savings
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
    from autoaccum._estimate.trace import Estimate
    from autoaccum._loss.loss_sources import Loss
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._report.records import Remedy


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
    save_memory: str | Sequence[str] | None = None,
    gpus: str | Sequence[str] = (),
    device_memory: str | None = None,
    display: str | None = None,
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
        save_memory: As for `fit`: the report is of steps with it from the start, except for "auto".
        gpus: Names of GPUs to predict for, such as "h100-80gb".
        device_memory: The memory of an unlisted GPU to predict for, such as "24GiB".
        display: The memory of each of these GPUs that a display uses, such as "600MiB"; None means none.
        ranks: The processes that train together, each with a device and its share of `target_batch`. Predictions count
            the buckets through which gradients are sent.
        fsdp: Whether the model is sharded over the ranks by `fully_shard`, each repeated block and then the whole.
        loader: The loader, for the samples of an epoch. If its first batches differ in size, the report is of the
            largest of them, in place of `batch`.
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
    among = chosen_gpus(gpus, device_memory, display)
    measures = _measures(measure, among, device)
    _say_of_ranks(notices, ranks, share, fsdp)
    names = names_in(save_memory, notices)
    adapts = adapts_of(names)
    made = _made(model, notices, on_meta=not measures)
    backend = devices.resolve(device, made, notices) if measures else None
    limits_gpus = backend is None or backend.device.type != "cpu"
    if memory_limit is not None and among and not limits_gpus:
        notices.say(f"memory_limit={memory_limit!r}: the CPU's, on which is measured; the GPUs are not limited")
    asked = Question(batch, share, most, memory_limit, loss_scope)
    on_rank = _rank_of(made, ranks, fsdp)
    way: dict[str, Any] = {"loss": loss, "forward": forward, "loss_reduction": loss_reduction, "split": split}
    calls = Calls(made, loss, forward=forward, split=split, notices=notices)
    check_loss_reduction(loss_reduction)
    chosen = optimizers.resolve(optimizer, calls.modules, notices)
    way |= {"optimizer": chosen, "adapts": adapts}
    warnings: list[str] = []
    found: list[tuple[Measured | Predicted, Estimate | None]] = []
    try:
        with undisturbed():
            of_gpus = asked if limits_gpus else replace(asked, memory_limit=None)
            found = [*_predicted(of_gpus, among, made, options.precision, on_rank, way)]
    except NotTracedError as error:
        if backend is None:
            raise
        warnings.append(f"not predicted for {', '.join(gpu.name for gpu in among)}: {error}")
    if backend is not None:
        put_together = partial(assemble, made, replace(options, optimizer=chosen), memory=backend, notices=notices)
        measured, further = _measured(asked, backend, put_together, save_memory, notices)
        warnings += further
        with undisturbed():
            measured = _with_epoch(measured, loader, batch, split)
            found.insert(0, _with_footprint(asked, made, way, measured, notices))
    with undisturbed():
        remedies_on, helpful, of_remedies = _remedies(asked, found, made, names, notices)
    places = [one for one, _ in found]
    predicted = tuple(one for one in places if isinstance(one, Predicted))
    return Report(
        subject=_subject(
            made,
            chosen,
            target_batch=target_batch,
            max_micro_batch=most,
            memory_limit=None if memory_limit is None else str(memory_limit),
            ranks=ranks,
            is_sharded=fsdp,
        ),
        measured=next((one for one in places if isinstance(one, Measured)), None),
        predicted=predicted,
        remedies=helpful,
        remedies_on=remedies_on,
        warnings=(*warnings, *_of_batchnorm(calls.modules, batchnorm, places), *of_remedies),
        notes=tuple(dict.fromkeys([*notices.texts, *(note for one in predicted for note in one.notes)])),
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
    asked: Question,
    backend: MemoryBackend,
    put_together: Callable[[], TrainingStep],
    save_memory: str | Sequence[str] | None,
    notices: Notices,
) -> tuple[Measured, tuple[str, ...]]:
    """Measure steps that save memory as asked, and put the model back as it was."""
    _LOG.info("measuring on %s", backend.name)
    names = names_in(save_memory, notices)
    check_savings(names, backend)
    with ExitStack() as saved:

        def saving_memory() -> TrainingStep:
            step = put_together()
            kept = Savings(step.objective.modules, names, backend, notices)
            saved.enter_context(kept.in_force())
            return step

        return measure_on(asked, backend, saving_memory)


def _with_footprint(
    asked: Question, model: nn.Module, way: Mapping[str, Any], measured: Measured, notices: Notices
) -> tuple[Measured, Estimate | None]:
    """Trace the step that was measured, to see what holds its memory; not if that cannot be done on fake tensors."""
    kind = kernels_of(measured)
    # A loss over the whole window runs every micro-batch twice, which a trace does not.
    if kind not in ("cpu", "cuda") or asked.loss_scope != "micro_batch":
        return measured, None
    _LOG.info("tracing a step")
    how: dict[str, Any] = {"kind": kind, "precision": measured.precision or "fp32", "sizes": sorted({1, asked.most})}
    try:
        estimate = trace_step(model, asked.batch, tensor_float=_has_tensor_float(measured), **how, **way).estimate()
        step = estimate.at(1 if measured.plan is None else measured.plan.micro_batch)
    except Exception as error:
        # It ran for real, and the report does not fail for lack of a picture.
        if raised_here(error) and not isinstance(error, InvalidInputError):
            raise
        notices.say(f"what takes the memory on {measured.name}: {first_line(error)}")
        clear_traceback_frames(error)
        return measured, None
    if measured.peak_bytes is not None:
        of_model = 0 if measured.device.holds_model else step.parameters_bytes + step.buffers_bytes
        step = replace(step, reserved_bytes=measured.peak_bytes + of_model)
    return replace(measured, footprint=step), estimate


def _has_tensor_float(measured: Measured) -> bool:
    """Whether the device has TF32; NVIDIA GPUs do from Ampere on."""
    if kernels_of(measured) != "cuda" or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(torch.device(measured.device.device)) >= (8, 0)


def _with_epoch(measured: Measured, loader: Iterable[Any] | None, batch: Any, split: Split | None) -> Measured:
    """Estimate the time of an epoch."""
    samples = None if loader is None else samples_of(loader, count(batch, split))
    if measured.pace is None or samples is None:
        return measured
    epoch_s = samples / measured.pace.samples_per_s
    return replace(measured, pace=replace(measured.pace, epoch_samples=samples, epoch_s=epoch_s))


def chosen_gpus(gpus: str | Sequence[str], device_memory: str | None, display: str | None) -> list[GPU]:
    """Return the GPUs that arguments of `preflight` name, each once.

    Raises:
        InvalidInputError: One is unknown, or has no memory left.
    """
    if not isinstance(gpus, str | list | tuple):
        raise InvalidInputError(f"gpus={shown(gpus)} must be a name or a list of names, such as ['h100-80gb']")
    names = [gpus] if isinstance(gpus, str) else gpus
    found = list(dict.fromkeys(gpu_named(name) for name in names))  # two names may mean the same GPU
    found += [] if device_memory is None else [custom_gpu(device_memory)]
    if display is None:
        return found
    parse_size(display, name="display")  # is wrong even without a GPU
    return [with_display(gpu, display) for gpu in found]


def _measures(asked: bool | None, gpus: Sequence[GPU], device: object) -> bool:
    if is_known(device):
        raise InvalidInputError(
            f"device={device!r} is not a device of this machine, but a GPU to predict for; pass gpus={device!r}"
        )
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
        random = RandomState(torch.device("cpu"))
        before = random.capture()
        try:
            made = built_on_meta(model, notices) if on_meta else model()
        finally:
            random.restore(before)
    if not isinstance(made, nn.Module):
        raise InvalidInputError(
            f"model={shown(model)} must be a torch.nn.Module, or a function without arguments that makes one"
        )
    check_shapes(made)
    return made


def _predicted(
    asked: Question,
    gpus: Sequence[GPU],
    model: nn.Module,
    precision: str,
    on_rank: Callable[[Timeline], Timeline],
    way: Mapping[str, Any],
) -> Iterator[tuple[Predicted, Estimate]]:
    """Trace the step once for each precision the GPUs would use, with and without TF32; yield what fits on each.

    GPUs of which the model asks what they answer differently each have a trace of their own.
    """
    traced: dict[tuple[str, bool], list[Traced]] = {}
    for gpu in gpus:
        name = _precision_on(gpu, model, precision)
        _LOG.info("predicting for %s in %s", gpu.name, name)
        known = traced.setdefault((name, gpu.bf16), [])
        fitting = next((one for one in known if one.holds_for(gpu)), None)
        if fitting is None:
            options: dict[str, Any] = {
                "precision": name,
                "tensor_float": gpu.bf16,
                "gpu": gpu,
                "most": asked.most,
            }
            fitting = trace_step(model, asked.batch, kind="cuda", **way, **options).changed(on_rank)
            known.append(fitting)
        estimate = fitting.estimate(gpu)
        yield predict(asked, gpu, name, estimate), estimate


def _remedies(
    asked: Question,
    found: Sequence[tuple[Measured | Predicted, Estimate | None]],
    model: nn.Module,
    names: Sequence[str],
    notices: Notices,
) -> tuple[str | None, tuple[Remedy, ...], tuple[str, ...]]:
    """Return the first device that needs a smaller step, the remedies for it, and warnings."""
    due = [(one, estimate) for one, estimate in found if are_due(one, asked.target_batch)]
    if not due or asked.loss_scope != "micro_batch":
        return None, (), ()
    place, unchanged = due[0]
    title = f"what would help on {place.name}"
    if unchanged is None:
        return None, (), (f"{title}: not known, since the step cannot be traced",)
    _LOG.info("looking for what would help on %s", place.name)
    helpful, failed = suggested(asked, place, unchanged, model, names)
    warnings = []
    if not helpful:
        warnings.append(f"{title}: nothing that save_memory takes")
    if failed:
        warnings.append(f"{title}: the model fails with {', '.join(failed)}")
    if others := [one.name for one, _ in due[1:]]:
        notices.say(f"{title}: listed only for it; for {' and '.join(others)} run a report without it")
    return place.name, helpful, tuple(warnings)


def _precision_on(gpu: GPU, model: nn.Module, asked: str) -> str:
    own = own_half_type(model)
    if own is not None or asked != "auto":
        return own or asked
    return "bf16" if gpu.bf16 else "fp16"


def _of_batchnorm(modules: Sequence[nn.Module], batchnorm: str, places: Sequence[Measured | Predicted]) -> list[str]:
    """Return the warnings of BatchNorm in the plans: in the measured one, or else in the predicted ones."""
    warnings = Notices(silent=True)
    norms = BatchNorms(modules, batchnorm, warnings)
    for one in places[:1] if isinstance(places[0], Measured) else places:
        if one.plan is not None:
            norms.announce(one.plan.micro_batches)
    return list(warnings.texts)


def _subject(model: nn.Module, optimizer: torch.optim.Optimizer, **about: Any) -> Subject:
    parameters = list(model.parameters())
    return Subject(
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        optimizer=name_of(optimizer),
        **about,
    )
