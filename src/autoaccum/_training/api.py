"""The main job, as users call it: arguments checked, put together and handed to the loop in `loop.py`."""

from __future__ import annotations

import math
import random
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from autoaccum._arguments import check_bool, check_iterable, check_positive_int, check_whole_number
from autoaccum._callbacks import check_callbacks
from autoaccum._data.batches import check_windows
from autoaccum._data.peeking import can_be_read_once
from autoaccum._distributed.consistency import begin_alike, check_alike, refuse_what_talks
from autoaccum._distributed.load_balance import check_shares
from autoaccum._distributed.overlap import check_overlap, hindrance
from autoaccum._distributed.process_group import joined
from autoaccum._engine import devices, optimizers
from autoaccum._engine.batchnorm import check_batchnorm
from autoaccum._engine.compiling import Compiling, check_that_it_can_be_limited, compile_options
from autoaccum._engine.dtensor import check_sharded
from autoaccum._engine.evaluation import check_metrics
from autoaccum._engine.fallback import Fallbacks, check_fallback
from autoaccum._engine.finiteness import check_on_nan
from autoaccum._engine.oom_report import PostMortem, check_folder_name
from autoaccum._engine.step import assemble, check_clip
from autoaccum._engine.window_loss import check_loss_scope
from autoaccum._memory.limits import parse_limit
from autoaccum._sizing.cache import PlanCache
from autoaccum._sizing.planner import check_finding
from autoaccum._system.environment import MAX_MICRO_BATCH, max_micro_batch
from autoaccum._system.launched import own_rank
from autoaccum._system.notices import Notices
from autoaccum._training.checkpoint_schedule import check_saving, saver_for
from autoaccum._training.console import OtherRank, progress_for
from autoaccum._training.finding import Finding
from autoaccum._training.loop import Training
from autoaccum._training.lr_schedule import Schedule, check_scheduler
from autoaccum._training.one_process import OneProcess
from autoaccum._training.progress import Data
from autoaccum._training.rank_coordination import SeveralRanks
from autoaccum._training.untouched import Untouched
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from os import PathLike

    from autoaccum._callbacks import Callback
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.evaluation import Metric
    from autoaccum._engine.optimizers import MakesOptimizer
    from autoaccum._engine.step import TrainingStep
    from autoaccum._loss.objective import Loss
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import FitResult

# What torch.manual_seed takes.
_SEEDS = (-(2**63), 2**64 - 1)


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
    on_nan: str = "warn",
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
            whole-number targets and mean squared error for floating ones. Of a mapping, also a model's, an entry "loss"
            is the total and the others are only reported; without it, the entries with a gradient are added up and
            detached ones are reported (docs/recipes.md).
        optimizer: An optimizer over the model's parameters, or a function of them that makes one. None: AdamW(lr=1e-3).
        scheduler: A learning-rate scheduler over the optimizer in use, or a function of it that makes one.
            ReduceLROnPlateau moves with each evaluation's loss.
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
        clip_grad_norm: Norm to which the gradient of the whole window is clipped, over all that the optimizer holds;
            infinity only measures it.
        last_window: "step": a shorter last window of an epoch makes an update of its own; "drop": it is left out.
        lr_scaling: "linear" or "sqrt": multiply the learning rates once, by `target_batch / base_batch` or its root.
        base_batch: The batch size that the learning rates were chosen for.
        val_loader: Evaluated after each epoch; a few samples also before the first update, without a trace, to find out
            whether that can be done.
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
        on_nan: What to do where a window's loss, or its gradient's norm, is NaN or infinite. "warn": say so on stderr
            once, also with progress=False; "stop": raise NotFiniteError, on all ranks; "ignore": nothing. But for
            "ignore", no checkpoint is written of parameters that are no longer finite, and the last finite one is kept.

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
        CheckpointInUseError: Another process trains with the checkpoint folder, or has taken it over while this one was
            suspended.
        RankFailedError: Another process of this training has failed.
        NotFiniteError: A window was not finite, and on_nan="stop".
    """
    started = time.perf_counter()
    _check_cuts(target_batch, last_window, micro_batch, probe, strategy, cache)
    _check_updates(target_batch, clip_grad_norm, lr_scaling, base_batch, loss_scope, batchnorm, on_nan)
    epochs, max_steps = _check_length(epochs, max_steps)
    cap = max_micro_batch()
    check_scheduler(scheduler, scheduler_interval, val_loader, optimizer)
    _check_data(loader, val_loader, metrics, epochs)
    check_callbacks(callbacks)
    options = compile_options(compile)
    folders = [check_saving(checkpoint, checkpoint_steps, checkpoint_minutes, resume), check_folder_name(oom_report)]
    check_seed(seed)
    check_shares(shares, shard=shard)
    check_overlap(overlap)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module  # its own first forward pass would wait for all ranks
    rank = own_rank()
    shown = progress_for(progress) if rank == 0 else OtherRank(rank, silent=progress is False)
    notices = Notices(silent=progress is False or rank > 0)
    if cap is not None and cap < (micro_batch if isinstance(micro_batch, int) else target_batch):
        notices.say(f"micro-batches of at most {cap} samples ({MAX_MICRO_BATCH}={cap})")
    memory = devices.resolve(device, model, notices)
    limit_bytes = parse_limit(memory_limit, memory)
    if options is not None:
        check_that_it_can_be_limited(memory, limit_bytes)
    fallbacks = check_fallback(fallback, memory, compiles=options is not None)
    with Untouched(memory.device, folders, (loader, val_loader)) as untouched, joined(memory) as ranks:
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
        untouched.keep_rates(step.optimizer, scheduler)
        saver = saver_for(checkpoint, checkpoint_steps, checkpoint_minutes, resume)
        earlier = None if saver is None else saver.cap(notices)
        cap = min((one for one in (cap, earlier) if one is not None), default=None)
        is_compiled = options is not None
        watching = nullcontext() if oom_report is None else PostMortem(oom_report, step, notices, compiles=is_compiled)
        world = OneProcess(loader, target_batch, last_window)
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
                "on_nan": on_nan,
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
            world = _ranks_of(
                ranks,
                step,
                loader,
                alike,
                loss_scope=loss_scope,
                hindrance=hindrance(memory, limit_bytes),
                notices=notices,
            )
        training = Training(
            step,
            Data(
                loader,
                target_batch,
                last_window,
                epochs,
                max_steps,
                _steps_per_epoch(loader, target_batch if shard else world.target_batch, last_window),
            ),
            Schedule(scheduler, scheduler_interval, step.optimizer, is_evaluated=val_loader is not None),
            finding=Finding(
                step,
                world.target_batch,
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
            on_nan=on_nan,
            compiling=None if options is None else Compiling(model, options),
            fallbacks=Fallbacks(step.objective.modules, fallbacks, memory),
            world=world,
        )
        untouched.training = training
        if lr_scaling is not None:
            optimizers.scale_learning_rate(
                step.optimizer,
                lr_scaling,
                target_batch=target_batch,
                base_batch=base_batch,
                notices=notices,
                scheduler=scheduler,
            )
        with watching:
            return training.run(limit_bytes=limit_bytes, started=started)


def _ranks_of(
    ranks: Ranks,
    step: TrainingStep,
    loader: Iterable[Any],
    arguments: dict[str, Any],
    *,
    loss_scope: str,
    hindrance: str,
    notices: Notices,
) -> SeveralRanks:
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
    return SeveralRanks(
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


def _check_cuts(
    target_batch: int, last_window: str, micro_batch: int | str, probe: str, strategy: str | None, cache: bool
) -> None:
    check_windows(target_batch, last_window)
    check_finding(micro_batch, probe, strategy)
    check_bool("cache", cache)


def _check_updates(
    target_batch: int,
    clip_grad_norm: float | None,
    lr_scaling: str | None,
    base_batch: int | None,
    loss_scope: str,
    batchnorm: str,
    on_nan: str,
) -> None:
    check_clip(clip_grad_norm)
    optimizers.check_scaling(lr_scaling, target_batch, base_batch)
    check_loss_scope(loss_scope)
    check_batchnorm(batchnorm)
    check_on_nan(on_nan)


def _check_length(epochs: int | None, max_steps: int | None) -> tuple[int | None, int | None]:
    if epochs is not None:
        check_positive_int("epochs", epochs)
    if max_steps is not None:
        check_positive_int("max_steps", max_steps)
        return epochs, max_steps
    return (1 if epochs is None else epochs), None


def _check_data(loader: Any, val_loader: Any, metrics: Any, epochs: int | None) -> None:
    check_iterable("loader", loader)
    check_metrics(metrics)
    if val_loader is None:
        if metrics is not None:
            raise InvalidInputError("metrics= are for the evaluation of a val_loader=, and there is none; pass both")
        return
    check_iterable("val_loader", val_loader)
    if can_be_read_once(val_loader) and (val_loader is loader or (epochs or 1) > 1):
        others = "the training reads it too" if val_loader is loader else f"epochs={epochs} evaluate {epochs} times"
        raise InvalidInputError(
            f"val_loader, a {type(val_loader).__name__}, can be read only once, and {others}; pass a DataLoader or a "
            "list, which can be read every time"
        )


def check_seed(seed: int | None) -> None:
    """Check the argument `seed`.

    Raises:
        InvalidInputError: It is no whole number that torch's generators take.
    """
    if seed is not None:
        check_whole_number("seed", seed, *_SEEDS)


def _seed(seed: int) -> None:
    seed = seed if seed <= _SEEDS[1] else seed - 2**64  # the number of a rank may lead beyond the last one
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
