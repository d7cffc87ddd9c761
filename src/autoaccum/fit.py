"""The main job, as users call it: arguments checked and put together, then handed to the loop in `training.py`."""

from __future__ import annotations

import math
import random
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from autoaccum import devices, optimizers
from autoaccum.alike import begin_alike, check_alike, refuse_what_talks
from autoaccum.batches import check_windows
from autoaccum.batchnorm import check_batchnorm
from autoaccum.callbacks import Callback
from autoaccum.company import Company
from autoaccum.compiling import Compiling, check_that_it_can_be_limited, compile_options
from autoaccum.environment import MAX_MICRO_BATCH, max_micro_batch
from autoaccum.errors import InvalidInputError
from autoaccum.fallback import Fallbacks, check_fallback
from autoaccum.finding import Finding, check_finding
from autoaccum.memory.limits import parse_limit
from autoaccum.notices import Notices
from autoaccum.overlap import check_overlap, hindrance
from autoaccum.plan_cache import PlanCache
from autoaccum.postmortem import PostMortem, check_folder
from autoaccum.progress import OtherRank, progress_for
from autoaccum.ranks import joined, own_rank
from autoaccum.records import check_positive_int
from autoaccum.saving import saver_for
from autoaccum.schedule import check_scheduler
from autoaccum.scope import check_loss_scope
from autoaccum.sharded_model import check_sharded
from autoaccum.shares import check_shares
from autoaccum.step import assemble, check_clip
from autoaccum.training import Training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from os import PathLike

    from autoaccum.evaluation import Metric
    from autoaccum.memory.base import MemoryBackend
    from autoaccum.objective import Loss
    from autoaccum.optimizers import MakesOptimizer
    from autoaccum.ranks import Ranks
    from autoaccum.records import FitResult
    from autoaccum.step import TrainingStep


def fit(
    model: nn.Module,
    loader: Iterable[Any],
    target_batch: int,
    *,
    loss: Loss | Sequence[Loss] | None = None,
    optimizer: torch.optim.Optimizer | MakesOptimizer | None = None,
    scheduler: Any = None,
    scheduler_interval: str = "step",
    epochs: int | None = None,
    max_steps: int | None = None,
    device: str | torch.device | MemoryBackend | None = None,
    precision: str = "auto",
    micro_batch: int | str = "auto",
    probe: str = "inline",
    strategy: str | None = None,
    cache: bool = True,
    compile: bool | Mapping[str, Any] = False,  # noqa: A002 - as everywhere in PyTorch
    memory_limit: float | str | None = None,
    clip_grad_norm: float | None = None,
    last_window: str = "step",
    lr_scaling: str | None = None,
    base_batch: int | None = None,
    val_loader: Iterable[Any] | None = None,
    metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    loss_reduction: str | None = None,
    loss_scope: str = "micro_batch",
    batchnorm: str = "keep",
    fallback: str | Sequence[str] | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | str | Callback = "auto",
    seed: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_steps: int | None = None,
    checkpoint_minutes: float | None = 10.0,
    resume: bool | str = "auto",
    oom_report: str | PathLike[str] | None = None,
    shard: bool = False,
    shares: str = "equal",
    overlap: bool = False,
) -> FitResult:
    """Train with updates of `target_batch` samples, whatever the device can hold at once.

    Finds the largest micro-batch that fits, plans how to cut each window of `target_batch` samples, and trains with the
    gradient of the whole window. When memory runs out, the micro-batch that failed is undone and the rest of its window
    is cut smaller; once memory is free again, micro-batches grow back.

    Args:
        model: The model, trained in place. It is moved to the device and stays there; its submodules keep the modes
            (training or evaluation) that they have.
        loader: Any iterable of batches, of whatever size. A batch is (inputs, targets), which calls `model(inputs)`; a
            mapping, which calls `model(**batch)`; or anything else, which calls `model(batch)`.
        target_batch: Samples an update is made from.
        loss: A callable of (outputs, targets), or of (outputs, batch) where a batch is no pair, that returns a scalar,
            a vector of per-sample losses, a (sum, weight) pair, or a mapping of those; or a list of callables of
            (model, batch), each run and back-propagated by itself. None: the model's own loss, else cross entropy for
            whole-number targets and mean squared error for floating ones.
        optimizer: An optimizer over the model's parameters, or a function of them that makes one. None: AdamW(lr=1e-3).
        scheduler: A learning-rate scheduler, or a function of the optimizer that makes one. ReduceLROnPlateau moves
            with each evaluation's loss.
        scheduler_interval: "step": the scheduler moves after every update; "epoch": after every epoch.
        epochs: Times to go through the loader. None: 1, or as many as `max_steps` takes.
        max_steps: Windows after which to stop.
        device: A device, its name, or a memory backend that stands for one. None: where the model is if that is an
            accelerator, else the accelerator, else the CPU.
        precision: "fp32", "bf16" or "fp16" by autocast, with a gradient scaler for fp16. "auto": bf16 or fp16 on CUDA
            by what the card does well, fp32 elsewhere.
        micro_batch: Most samples at once, or "auto" to find out. The environment variable AUTOACCUM_MAX_MICRO_BATCH,
            as `autoaccum run` sets it, bounds both.
        probe: How that is found out. "inline": by the first windows of the training itself, whose micro-batches begin
            small and grow; "before": by trials that leave no trace, before training (always so with
            loss_scope="window"); "off": not at all, training begins without a cut and cuts when memory runs out.
        strategy: How windows are cut. "balanced": in the fewest micro-batches; "uniform": in equal ones; "greedy": in
            the largest and a rest; "fastest": as is fastest by the clock, found out in the first windows of a long
            training. None: "fastest" where `micro_batch` is "auto", else "balanced". With a fixed `micro_batch` and
            "balanced" two runs cut alike, whatever memory and clock say.
        cache: Whether what was found is kept for the next run of the same job, where one micro-batch confirms it
            (in the user's cache directory, or AUTOACCUM_CACHE_DIR).
        compile: Whether the model is compiled by torch.compile, or a mapping of arguments for that. It is compiled once
            its cut is known, which then is "uniform" unless `strategy` says otherwise: a graph for each size. After the
            call the model is as it was written. Not with a `memory_limit` on the host, which the compiler would meet.
        memory_limit: Bytes, a text such as "12GiB", or a fraction. On a card it is of the whole device; on the host it
            is what may be taken beyond what the process holds now. None: what is free.
        clip_grad_norm: Norm to which the gradient of the whole window is clipped.
        last_window: "step": a shorter last window of an epoch makes an update of its own; "drop": it is left out.
        lr_scaling: "linear" or "sqrt": multiply the learning rates once, by `target_batch / base_batch` or its root.
        base_batch: The batch size that the learning rates were chosen for.
        val_loader: Evaluated after each epoch.
        metrics: For the evaluation: callables of (outputs, targets) averaged over samples, or torchmetrics objects.
        forward: A callable of (model, batch) that returns the outputs, in place of the conventions for batches.
        loss_reduction: "mean" or "sum", for a loss of which this should not be found out.
        loss_scope: "micro_batch": the loss is taken of each micro-batch, and they are weighed; "window": of the model's
            outputs for the whole window at once, for losses that compare samples with each other (docs/contrastive.md).
        batchnorm: "keep": BatchNorm's running statistics move with every micro-batch by the layer's own momentum;
            "rescale": over a window they move as far as with one batch (docs/batchnorm.md).
        fallback: What to do, in this order, where not even one sample fits. "checkpoint": activation checkpointing of
            the model's repeated blocks; "offload": what backward needs waits in the host's memory. Gradients stay what
            they are, updates take longer; after the call the model is as it was written.
        callbacks: Told what happens.
        progress: "auto": a bar on a terminal, lines elsewhere; "bar", "lines", or False for nothing, not even what was
            chosen. On stderr.
        seed: Seeds torch's, Python's and NumPy's generators first.
        checkpoint: A folder for checkpoints, of this run alone. One is written at the end, at SIGTERM (which then takes
            its effect), at SIGUSR1, where anything else ends the call early, and as often as the next two say. The
            newest two are kept.
        checkpoint_steps: Windows from one checkpoint to the next.
        checkpoint_minutes: Minutes from one checkpoint to the next; None for no such interval.
        resume: "auto": go on from the folder's newest checkpoint, or start anew where there is none. True: there must
            be one. False: start anew; those that are there are replaced by the first new one.
        oom_report: A folder. When memory first runs out, a file is written there that tells what was alive, and where
            it was made (docs/oom-report.md). Until then every module leaves marks, about 10 µs in each forward pass.
        shard: Under torchrun: whether every rank's loader gives all samples, of which each rank is to take its part of
            every window, and val_loader likewise. False: each rank's loaders give that rank's own
            (DistributedSampler). docs/ranks.md.
        shares: Of a window, with `shard`: "equal"; "speed": as fast as each rank has been.
        overlap: On several ranks: whether gradients are added up while the last backward pass of a window still makes
            others, which takes memory for a second set of them. docs/ranks.md.

    Returns:
        What was done. The model is trained in place.

    Raises:
        InvalidInputError: An argument, a batch or a loss cannot be used.
        DoesNotFitError: Not even one sample at a time fits.
        DeviceLostError: The device can no longer be used by this process.
        StateDamagedError: The optimizer failed after it had begun to write, and there is no checkpoint to go back to,
            or it failed there again.
        UpdateCompleteError: The scheduler or a hook of the optimizer failed after an update, or memory ran out there;
            the update is made, and where the scheduler has not moved no checkpoint of that moment is written.
        StartAgainError: Memory ran out in a model that is spread over ranks (docs/fsdp.md), or on one rank while the
            others made an update.
        CheckpointError: A checkpoint cannot be written, cannot be read, or is of something else; then the model is as
            it was.
        RankFailedError: Another process of this training has failed.
    """
    started = time.perf_counter()
    check_windows(target_batch, last_window)
    check_clip(clip_grad_norm)
    epochs, max_steps = _check_length(epochs, max_steps)
    check_finding(micro_batch, probe, strategy)
    cap = max_micro_batch()
    check_scheduler(scheduler, scheduler_interval, val_loader)
    _check_data(loader, val_loader, metrics)
    _check_callbacks(callbacks)
    check_loss_scope(loss_scope)
    check_batchnorm(batchnorm)
    if lr_scaling is not None:
        optimizers.scaling_factor(lr_scaling, target_batch, base_batch)
    options = compile_options(compile)
    saver = saver_for(checkpoint, checkpoint_steps, checkpoint_minutes, resume)
    if oom_report is not None:
        check_folder(oom_report)
    check_shares(shares, shard=shard)
    check_overlap(overlap)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module  # its own first forward pass would wait for all ranks
    rank = own_rank()
    shown = progress_for(progress) if rank == 0 else OtherRank(rank, silent=progress is False)
    notices = Notices(silent=progress is False or rank > 0)
    if cap is not None and cap < (micro_batch if isinstance(micro_batch, int) else target_batch):
        notices.say(f"micro-batches of at most {cap} samples ({MAX_MICRO_BATCH}={cap})")
    cap = min((one for one in (cap, None if saver is None else saver.cap(notices)) if one is not None), default=None)
    memory = devices.resolve(device, model, notices)
    limit_bytes = parse_limit(memory_limit, memory)
    if options is not None:
        check_that_it_can_be_limited(memory, limit_bytes)
    fallbacks = check_fallback(fallback, memory, compiles=options is not None)
    with joined(memory) as ranks:
        if seed is not None:
            _seed(seed + rank)
        step = assemble(
            model,
            loss,
            optimizer,
            memory=memory,
            precision_name=precision,
            forward=forward,
            loss_reduction=loss_reduction,
            clip_grad_norm=clip_grad_norm,
            notices=notices,
            is_one_of_several=ranks is not None,
        )
        company = None
        grows_from = None
        if ranks is not None:
            alike = {
                "target_batch": target_batch,
                "last_window": last_window,
                "shard": shard,
                "shares": shares,
                "overlap": overlap,
                "epochs": epochs,
                "max_steps": max_steps,
                "clip_grad_norm": clip_grad_norm,
                "loss_reduction": loss_reduction,
                "batchnorm": batchnorm,
                "lr_scaling": lr_scaling,
                "base_batch": base_batch,
                "checkpoint": saver is not None,
                "val_loader": val_loader is not None,
            }
            asked = {
                f"shares={shares!r}": shares != "equal",
                f"fallback={fallback!r}": bool(fallback),
                "compile=": options is not None,
                f"overlap={overlap!r}": overlap,
                f"probe={probe!r}": probe == "before" and micro_batch == "auto",
            }
            grows_from = check_sharded(step.objective.modules, ranks.size, asked)
            company = _company(
                ranks,
                step,
                loader,
                alike,
                loss_scope=loss_scope,
                hindrance=hindrance(memory, limit_bytes),
                notices=notices,
            )
        part = target_batch if company is None else company.target_batch
        training = Training(
            step,
            loader,
            target_batch,
            epochs=epochs,
            max_steps=max_steps,
            steps_per_epoch=_steps_per_epoch(loader, target_batch if shard else part, last_window),
            last_window=last_window,
            finding=Finding(
                step,
                part,
                micro_batch=micro_batch,
                probe=probe,
                strategy=strategy or (None if options is None else "uniform"),
                cache=PlanCache(notices) if cache else None,
                limit_bytes=limit_bytes,
                loss_scope=loss_scope,
                forward=forward,
                cap=cap,
                grows_from=grows_from,
            ),
            val_loader=val_loader,
            metrics=metrics,
            callbacks=(shown, *callbacks),
            notices=notices,
            saver=saver,
            loss_scope=loss_scope,
            batchnorm=batchnorm,
            compiling=None if options is None else Compiling(model, options),
            fallbacks=Fallbacks(step.objective.modules, fallbacks, memory),
            company=company,
        )
        if lr_scaling is not None:
            optimizers.scale_learning_rate(
                step.optimizer,
                lr_scaling,
                target_batch=target_batch,
                base_batch=base_batch,
                notices=notices,
                scheduler=scheduler,
            )
        is_compiled = options is not None
        with nullcontext() if oom_report is None else PostMortem(oom_report, step, notices, compiles=is_compiled):
            return training.run(
                limit_bytes=limit_bytes,
                scheduler=scheduler,
                scheduler_interval=scheduler_interval,
                started=started,
            )


def _company(
    ranks: Ranks,
    step: TrainingStep,
    loader: Iterable[Any],
    arguments: dict[str, Any],
    *,
    loss_scope: str,
    hindrance: str,
    notices: Notices,
) -> Company:
    """Begin a training with other processes: alike, and from the same weights.

    Raises:
        InvalidInputError: Something differs, or cannot be done by several.
    """
    refuse_what_talks(step.objective.modules)
    if loss_scope != "micro_batch":
        raise InvalidInputError(
            f"loss_scope={loss_scope!r} takes the loss over all of a window at once, of which each of {ranks.size} "
            "ranks holds a part; train in one process"
        )
    check_alike(ranks, step, arguments)
    begin_alike(ranks, step, notices)
    return Company(
        ranks,
        loader,
        arguments["target_batch"],
        last_window=arguments["last_window"],
        shard=arguments["shard"],
        shares=arguments["shares"],
        overlap=arguments["overlap"],
        hindrance=hindrance,
        notices=notices,
    )


def _check_length(epochs: int | None, max_steps: int | None) -> tuple[int | None, int | None]:
    if epochs is not None:
        check_positive_int("epochs", epochs)
    if max_steps is not None:
        check_positive_int("max_steps", max_steps)
        return epochs, max_steps
    return (1 if epochs is None else epochs), None


def _check_data(loader: Any, val_loader: Any, metrics: Any) -> None:
    _check_iterable("loader", loader)
    if val_loader is not None:
        _check_iterable("val_loader", val_loader)
    elif metrics is not None:
        raise InvalidInputError("metrics= are for the evaluation of a val_loader=, and there is none; pass both")


def _check_iterable(name: str, loader: Any) -> None:
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise InvalidInputError(
            f"{name}={loader!r} cannot be iterated over; pass a DataLoader, or any iterable of batches"
        )


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
        if not isinstance(callback, Callback):
            raise InvalidInputError(f"callbacks={callbacks!r} must be a list of autoaccum.Callback objects")
    if not isinstance(callbacks, list | tuple):
        raise InvalidInputError(f"callbacks={callbacks!r} is a single callback; pass [it]")


def _seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidInputError(f"seed={seed!r} must be a whole number")
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the user's global generator


def _steps_per_epoch(loader: Iterable[Any], target_batch: int, last_window: str) -> int | None:
    """Return the number of windows an epoch has, where the loader lets it be known beforehand."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return None
    try:
        samples = len(loader.sampler) if loader.batch_size is not None else None  # type: ignore[arg-type]
        if samples is not None and loader.drop_last:
            samples = len(loader) * int(loader.batch_size or 1)
    except TypeError:  # an iterable dataset without a length
        return None
    if samples is None:
        return None
    return math.ceil(samples / target_batch) if last_window == "step" else samples // target_batch
