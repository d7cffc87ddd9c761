"""Defines `fit`, the main entry point: checks its arguments, assembles the training and runs the loop in `loop.py`."""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from autoaccum._arguments import check_bool, check_positive_int, shown
from autoaccum._data.loaders import can_be_read_once, check_loader
from autoaccum._data.regrouping import check_target
from autoaccum._distributed.consistency import begin_alike, check_alike, refuse_what_talks
from autoaccum._distributed.process_group import joined
from autoaccum._engine import devices, optimizers
from autoaccum._engine.assembly import assemble
from autoaccum._engine.dtensor import check_sharded
from autoaccum._engine.metrics import check_metrics
from autoaccum._engine.noise_scale import NoiseScale
from autoaccum._engine.options import Options
from autoaccum._engine.savings import Savings
from autoaccum._records import SAMPLES, TOKENS
from autoaccum._sizing.cache import PlanCache
from autoaccum._system.launched import MAX_MICRO_BATCH, max_micro_batch, own_rank
from autoaccum._system.notices import Notices
from autoaccum._system.reason_file import writes_reason
from autoaccum._training.checkpoint_schedule import check_saving, saver_for
from autoaccum._training.console import OtherRank, progress_for
from autoaccum._training.first_plan import Finding
from autoaccum._training.loop import Training
from autoaccum._training.lr_schedule import Schedule, check_scheduler
from autoaccum._training.one_process import OneProcess
from autoaccum._training.progress import Data
from autoaccum._training.rank_coordination import SeveralRanks
from autoaccum._training.restore_on_failure import Untouched
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from os import PathLike

    from autoaccum._callbacks import Callback
    from autoaccum._data.pieces import Split
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.metrics import Metric
    from autoaccum._engine.optimizers import MakesOptimizer
    from autoaccum._loss.objective import Loss
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import FitResult

# The range that torch.manual_seed accepts.
_SEEDS = (-(2**63), 2**64 - 1)


@writes_reason
def fit(
    model: nn.Module,
    loader: Iterable[Any],
    target_batch: int | None = None,
    *,
    loss: Loss | Sequence[Loss] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MakesOptimizer | str | None = None,
    scheduler: Any = None,
    scheduler_interval: str = "step",
    epochs: int | None = None,
    max_steps: int | None = None,
    device: str | torch.device | MemoryBackend | None = None,
    precision: str = "auto",
    micro_batch: int | str = "auto",
    cache: bool = True,
    memory_limit: float | str | None = None,
    memory: str | Sequence[str] | None = None,
    clip_grad_norm: float | None = None,
    drop_last: bool = False,
    lr_scaling: str | None = None,
    base_batch: int | None = None,
    val_loader: Iterable[Any] | None = None,
    val_steps: int | None = None,
    metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    loss_reduction: str | None = None,
    loss_scope: str = "micro_batch",
    batchnorm: str = "keep",
    split: Split | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | str | Callback = "auto",
    seed: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_steps: int | None = None,
    checkpoint_minutes: float | None = 10.0,
    resume: bool | str = "auto",
    oom_report: str | PathLike[str] | None = None,
    shard: bool = False,
    on_nan: str = "warn",
    noise_scale: bool | int = False,
    target_tokens: int | None = None,
) -> FitResult:
    """Train a model with updates of `target_batch` samples, regardless of how many fit on the device at once.

    Finds the largest micro-batch that fits, plans how to cut each window of `target_batch` samples into micro-batches,
    and makes one optimizer update with the gradient of the whole window. When memory runs out, `fit` begins
    the window again from the state before it, in smaller micro-batches; they grow back once memory is free again.

    Args:
        model: The model to train, in place. `fit` moves it to the device and leaves it there; its submodules keep their
            training or evaluation modes.
        loader: Any iterable of batches, of any size; the first dimension of their tensors indexes the samples, unless
            `split` says otherwise. A pair (inputs, targets) calls `model(inputs)`, a mapping calls
            `model(**batch)`, and anything else calls `model(batch)`.
        target_batch: Number of samples per optimizer update; None with `target_tokens`.
        loss: A callable of (outputs, targets), or of (outputs, batch) if a batch is not a pair, that returns a scalar,
            a vector of per-sample losses, a (sum, weight) pair, or a mapping of these; or a list of callables of
            (model, batch), each run and back-propagated separately. None: the model's own loss, else cross entropy for
            integer targets and mean squared error for floating-point ones. In a mapping, including one that the model
            returns, the entry "loss" is the total and the others are only reported; without that entry, those with a
            gradient are summed and detached ones are only reported (docs/losses.md).
        optimizer: An optimizer over the model's parameters, or a function of them that returns one. Several, in a list,
            if each has its own parameters (docs/losses.md). None or "adamw": AdamW(lr=1e-3).
        scheduler: A learning-rate scheduler for the optimizer in use, or a function of the optimizer that returns one.
            ReduceLROnPlateau steps on the loss of each evaluation.
        scheduler_interval: "step": step the scheduler after every update; "epoch": after every epoch.
        epochs: Number of passes over the loader. None: 1, or as many as `max_steps` takes.
        max_steps: Number of windows after which training stops.
        device: A device, its name, or a memory backend that stands for one. None: the model's device if that is an
            accelerator, else the available accelerator, else the CPU.
        precision: "fp32", or "bf16" or "fp16" with autocast and, for fp16, a gradient scaler. "auto": on CUDA, bf16 or
            fp16, whichever the card supports well; fp32 elsewhere.
        micro_batch: Maximum number of samples at once, or "auto" to find it in the first windows of the training, whose
            micro-batches start small and grow; with loss_scope="window" by trials before it. The environment variable
            AUTOACCUM_MAX_MICRO_BATCH, which `autoaccum run` sets, bounds both. With a number, two runs cut alike,
            regardless of memory and timing; with "auto", a long training also times halves and quarters of what fits,
            and keeps what is fastest. Windows of compiled models are cut into equal sizes.
        cache: Whether to keep the micro-batch for the next run of the same job, which confirms it with a single
            micro-batch. The cache is in the user's cache directory, or in AUTOACCUM_CACHE_DIR.
        memory_limit: Bytes, a string such as "12GiB", or a fraction of the device's total memory. On the host, it
            limits what the process takes beyond what it holds at the call. None: all free memory.
        memory: What saves memory, for time (docs/memory.md). "chunked_loss": the cross entropy of a Transformers model
            is computed a few tokens at a time, so that its logits are never whole; other models use
            `autoaccum.ChunkedLoss`. "checkpoint": activation checkpointing of the model's repeated blocks, or with
            "checkpoint:NAME" of those of a name or a class. "offload": activations are kept in host memory. Several in
            a list. "auto": one after the other wherever not even one sample fits, else nothing. Gradients stay the
            same, those of a loss in chunks up to rounding.
        clip_grad_norm: Maximum norm of the whole window's gradient, over all parameters of the optimizer. float("inf")
            only measures that norm, for `StepReport.grad_norm`.
        drop_last: Whether to leave out a shorter last window of an epoch, in place of an update made from it.
        lr_scaling: "linear" or "sqrt": multiply the learning rates once, by `target_batch / base_batch` or its root.
        base_batch: The batch size that the learning rates were chosen for.
        val_loader: Data to evaluate on after each epoch. To detect errors early, a few samples are also evaluated
            before the first update, which leaves parameters, buffers and random state as they are.
        val_steps: Number of windows between evaluations, which then take the place of those after each epoch; the end
            of the training is evaluated in any case. None: evaluate after each epoch.
        metrics: Metrics for the evaluation: callables of (outputs, targets), averaged over samples, or torchmetrics
            objects.
        forward: A callable of (model, batch) that returns the outputs and replaces the conventions for batches.
        loss_reduction: "mean" (over the samples, not over tokens) or "sum": the reduction of the loss, taken at its
            word. None: read it from the loss's graph (docs/guarantees.md).
        loss_scope: "micro_batch": compute the loss of each micro-batch and weight it; "window": compute it once, from
            the model's outputs for the whole window, for any loss that is a deterministic function of per-sample
            outputs and no mean over them, such as one that compares samples with each other (docs/losses.md).
        batchnorm: "keep": BatchNorm updates its running statistics with every micro-batch, with the layer's own
            momentum; "rescale": over a window, they move as far as with one batch (docs/losses.md).
        split: How batches are counted, cut and joined if their samples do not run along the first dimension of every
            tensor: an object with `count`, `cut` and `join` (`autoaccum.Split`), such as `autoaccum.Along(1)` for
            time-first tensors or `autoaccum.ListOfSamples(collate)` for detection, graphs and flattened sequences
            (docs/batches.md).
        callbacks: Callbacks to notify of plans, steps, evaluations and checkpoints.
        progress: "auto": a bar on a terminal, lines elsewhere; "bar"; "lines"; or False for no output, which also
            silences notices of what `fit` chose. Printed on stderr.
        seed: Seed for the random generators of torch, Python and NumPy. Rank r uses `seed + r`.
        checkpoint: A folder for the checkpoints of this run and no other. `fit` writes one at the end, on SIGTERM
            (which then takes effect), on SIGUSR1, when an error ends the call early, and at the intervals of the next
            two arguments. The newest two are kept.
        checkpoint_steps: Number of windows between checkpoints.
        checkpoint_minutes: Minutes between checkpoints; None disables this interval.
        resume: "auto": resume from the folder's newest checkpoint, or start from the beginning if there is none. True:
            require one. False: start from the beginning; the first new checkpoint replaces those in the folder.
        oom_report: A folder. When memory first runs out, a text with the largest tensors, and on CUDA a snapshot for
            PyTorch's memory viewer, is written there (docs/troubleshooting.md).
        shard: Under torchrun, whether every rank's loaders give all samples, so that each rank takes its part of every
            window and of the validation data. False: each rank's loaders give only its own samples
            (DistributedSampler); see docs/several-gpus.md.
        on_nan: What to do when a window's loss or gradient norm is NaN or infinite. "warn": print a warning on stderr
            once, even with progress=False; "stop": raise NotFiniteError on all ranks. No checkpoint of non-finite
            parameters is written, and the last finite one is kept.
        noise_scale: Whether to measure the gradient noise scale, which says whether a larger batch would pay, from two
            norms of every 50th window; a number measures every so many windows. A window that is measured takes
            its samples in random order, and is cut in two if it fits at once (docs/batch-size.md).
        target_tokens: Number of tokens per optimizer update, over all ranks, in place of `target_batch`: an update is
            made from as many whole samples as come nearest to it. Those of a sample are its labels that are not -100,
            else what its `attention_mask` keeps, else the elements of its largest tensor (docs/batches.md).

    Returns:
        A summary of the run. The model itself is trained in place. An exception that ends the call early, such as
        KeyboardInterrupt at Ctrl-C, has the summary of what is done as its attribute `result`, unless it was raised
        while arguments were checked, refuses attributes, or has a `result` of its own. Before the first update that
        summary is of 0 steps.

    Raises:
        InvalidInputError: An argument, a batch or a loss cannot be used.
        DoesNotFitError: Not even one sample at a time fits.
        DeviceLostError: This process can no longer use the device.
        StateDamagedError: The optimizer, or a hook on its step, failed after it had begun to write, and there is no
            checkpoint to go back to, or it failed again after going back.
        UpdateCompleteError: The scheduler failed, or memory ran out, after an update; the update is made. If the
            scheduler has not stepped, no checkpoint of that state is written.
        StartAgainError: Memory ran out in a model that is sharded across ranks (docs/several-gpus.md), or on one rank
            while the others made an update.
        CheckpointError: A checkpoint cannot be written or read, or belongs to another run. The model is unchanged
            unless the error says that code of your own refused its state half-way.
        CheckpointInUseError: Another process trains with the checkpoint folder, or took it over while this one was
            suspended.
        RankFailedError: Another process of this training failed.
        NotFiniteError: A window was not finite, and on_nan="stop".
    """
    started = time.perf_counter()
    check_target(target_batch, target_tokens)
    in_tokens = target_tokens is not None
    target: Any = target_tokens if in_tokens else target_batch
    options = Options.of(fit, locals())
    check_bool("drop_last", drop_last)
    optimizers.scaling_factor(lr_scaling, target, base_batch)
    epochs, max_steps = _check_length(epochs, max_steps)
    check_scheduler(scheduler, scheduler_interval, val_loader, optimizer)
    _check_data(loader, val_loader, split, val_steps, metrics, epochs)
    folders = [check_saving(checkpoint, checkpoint_steps, checkpoint_minutes, resume), options.report_folder]
    check_seed(seed)
    check_bool("shard", shard)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module  # DDP's own first forward pass would wait for all ranks
    rank, cap, counts = own_rank(), max_micro_batch(), TOKENS if in_tokens else SAMPLES
    notices = Notices(silent=progress is False or rank > 0)
    _tell_of_cap(cap, micro_batch if isinstance(micro_batch, int) else target, notices)
    backend = devices.resolve(device, model, notices)
    limit_bytes = options.limit_bytes(backend)
    shown = OtherRank(rank, silent=progress is False) if rank else progress_for(progress, backend, limit_bytes, counts)
    savings = options.savings(backend)
    with Untouched(backend.device, folders, (loader, val_loader)) as untouched, joined(backend) as ranks:
        if seed is not None:
            _seed(seed + rank)
        step = assemble(model, options, memory=backend, notices=notices, is_one_of_several=ranks is not None)
        untouched.keep_rates(step.optimizer, scheduler)
        saver = saver_for(checkpoint, checkpoint_steps, checkpoint_minutes, resume)
        earlier = None if saver is None else saver.cap(notices)
        cap = min((one for one in (cap, earlier) if one is not None), default=None)
        world = OneProcess(loader, target, drop_last, step.objective.split, in_tokens=in_tokens)
        grows_from = None
        if ranks is not None:
            alike = {
                "target_batch": target,
                "drop_last": drop_last,
                "shard": shard,
                "epochs": epochs,
                "max_steps": max_steps,
                "clip_grad_norm": clip_grad_norm,
                "val_steps": val_steps,
                "loss_reduction": loss_reduction,
                "batchnorm": batchnorm,
                "on_nan": on_nan,
                "noise_scale": options.noise_every,
                "memory": savings,
                "lr_scaling": lr_scaling,
                "base_batch": base_batch,
                "checkpoint": saver is not None,
                "val_loader": val_loader is not None,
            }
            asked = {
                f"memory={memory!r}": bool(savings),
                f"noise_scale={noise_scale!r}": bool(noise_scale),
                f"target_tokens={target_tokens}": in_tokens,
            }
            grows_from = check_sharded(step.objective.modules, ranks.size, asked)
            world = _ranks_of(
                ranks,
                step,
                loader,
                alike | {"target_tokens": target_tokens},
                in_tokens=in_tokens,
                notices=notices,
            )
        training = Training(
            step,
            Data(
                loader,
                target,
                drop_last,
                epochs,
                max_steps,
                None if in_tokens else _steps_per_epoch(loader, target if shard else world.target_batch, drop_last),
                counts,
            ),
            Schedule(scheduler, scheduler_interval, step.optimizer, is_evaluated=val_loader is not None),
            finding=Finding(
                step,
                world.target_batch,
                cache=PlanCache(notices) if cache else None,
                limit_bytes=limit_bytes,
                cap=cap,
                grows_from=grows_from,
                counts=counts,
                saves=savings,
            ),
            val_loader=val_loader,
            val_steps=val_steps,
            metrics=metrics,
            callbacks=(shown, *callbacks),
            notices=notices,
            saver=saver,
            noise=None if options.noise_every is None else NoiseScale(options.noise_every, notices),
            savings=Savings(step.objective.modules, savings, backend, notices),
            world=world,
        )
        untouched.training = training
        if lr_scaling is not None:
            optimizers.scale_learning_rate(
                step.optimizer,
                lr_scaling,
                target_batch=target,
                base_batch=base_batch,
                notices=notices,
                scheduler=scheduler,
            )
        return training.run(limit_bytes=limit_bytes, started=started)


def _ranks_of(
    ranks: Ranks,
    step: TrainingStep,
    loader: Iterable[Any],
    arguments: dict[str, Any],
    *,
    in_tokens: bool,
    notices: Notices,
) -> SeveralRanks:
    """Set up training on several ranks: check that they agree, and broadcast the weights.

    Raises:
        InvalidInputError: The ranks differ, or the training needs something that ranks cannot do together.
    """
    refuse_what_talks(step.objective.modules)
    if (scope := step.options.loss_scope) != "micro_batch":
        raise InvalidInputError(
            f"loss_scope={scope!r} computes the loss of a whole window at once, but each of {ranks.size} "
            "ranks holds only a part of it; train in one process"
        )
    check_alike(ranks, step, arguments)
    begin_alike(ranks, step)
    return SeveralRanks(
        ranks,
        loader,
        arguments["target_batch"],
        drop_last=arguments["drop_last"],
        shard=arguments["shard"],
        notices=notices,
        split=step.objective.split,
        in_tokens=in_tokens,
    )


def _tell_of_cap(cap: int | None, most: int, notices: Notices) -> None:
    if cap is not None and cap < most:
        notices.say(f"micro-batches of at most {cap} samples ({MAX_MICRO_BATCH}={cap})")


def _check_length(epochs: int | None, max_steps: int | None) -> tuple[int | None, int | None]:
    if epochs is not None:
        check_positive_int("epochs", epochs)
    if max_steps is not None:
        check_positive_int("max_steps", max_steps)
        return epochs, max_steps
    return (1 if epochs is None else epochs), None


def _check_data(
    loader: Any, val_loader: Any, split: Split | None, val_steps: int | None, metrics: Any, epochs: int | None
) -> None:
    check_loader("loader", loader, split)
    check_metrics(metrics)
    _check_val_steps(val_steps, loader, val_loader)
    if val_loader is None:
        if metrics is not None:
            raise InvalidInputError("metrics= require a val_loader= to evaluate, and there is none; pass both")
        return
    check_loader("val_loader", val_loader, split)
    if can_be_read_once(val_loader) and (val_loader is loader or (epochs or 1) > 1):
        others = "the training reads it too" if val_loader is loader else f"epochs={epochs} evaluate {epochs} times"
        raise InvalidInputError(
            f"val_loader, a {type(val_loader).__name__}, can be read only once, and {others}; pass a DataLoader or a "
            "list, which can be read every time"
        )


def _check_val_steps(val_steps: int | None, loader: Any, val_loader: Any) -> None:
    if val_steps is None:
        return
    check_positive_int("val_steps", val_steps)
    if val_loader is None:
        raise InvalidInputError(f"val_steps={val_steps} needs a val_loader= to evaluate, and there is none; pass both")
    if can_be_read_once(val_loader):
        raise InvalidInputError(
            f"val_loader, a {type(val_loader).__name__}, can be read only once, and val_steps={val_steps} evaluates "
            "several times; pass a DataLoader or a list, which can be read every time"
        )
    if val_loader is loader and not isinstance(loader, list | tuple):
        raise InvalidInputError(
            f"val_steps={val_steps} evaluates in the middle of an epoch, and val_loader= is the loader that the "
            "training is reading then; pass a second one over the same data"
        )


def check_seed(seed: int | None) -> None:
    """Check the argument `seed`.

    Raises:
        InvalidInputError: It is not an integer that torch's generators accept.
    """
    if seed is not None and (type(seed) is not int or not _SEEDS[0] <= seed <= _SEEDS[1]):
        raise InvalidInputError(f"seed={shown(seed)} must be a whole number from {_SEEDS[0]} to {_SEEDS[1]}")


def _seed(seed: int) -> None:
    seed = seed if seed <= _SEEDS[1] else seed - 2**64  # adding the rank may exceed the maximum
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the user's global generator


def _steps_per_epoch(loader: Iterable[Any], target_batch: int, drop_last: bool) -> int | None:
    """Return the number of windows per epoch, or None if the loader does not tell it beforehand."""
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
    return samples // target_batch if drop_last else math.ceil(samples / target_batch)
