"""Defines `fit`, the main entry point: checks its arguments, assembles the training and runs the loop in `loop.py`."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from autoaccum._arguments import check_bool, check_positive_int, counted
from autoaccum._callbacks import EarlyStopping
from autoaccum._data.loaders import can_be_read_once, check_loader
from autoaccum._data.random_state import RandomState
from autoaccum._data.regrouping import check_target
from autoaccum._distributed.consistency import make_alike
from autoaccum._distributed.process_group import joined
from autoaccum._engine import devices, optimizers
from autoaccum._engine.assembly import assemble
from autoaccum._engine.at_work import AtWork
from autoaccum._engine.dtensor import check_sharded
from autoaccum._engine.noise_scale import NoiseScale
from autoaccum._engine.options import Options
from autoaccum._evaluation.metrics import check_metrics, metrics_by_name
from autoaccum._records import SAMPLES, TOKENS
from autoaccum._saving.savings import Savings
from autoaccum._system.launched import MAX_MICRO_BATCH, check_not_one_of_several, max_micro_batch, own_rank
from autoaccum._system.notices import Notices
from autoaccum._system.reason_file import writes_reason
from autoaccum._training.checkpoint_settings import EVERY, check_saving
from autoaccum._training.console import OomOnlyProgress, TellsChoices, progress_for
from autoaccum._training.fit_context import FitContext
from autoaccum._training.loop import Training
from autoaccum._training.lr_schedule import Schedule, check_scheduler
from autoaccum._training.rank_coordination import Coordinator
from autoaccum._training.restore_on_failure import RestoreOnFailure
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from os import PathLike

    from autoaccum._callbacks import Callback
    from autoaccum._data.pieces import Split
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.optimizers import MakesOptimizer
    from autoaccum._evaluation.metrics import Metric
    from autoaccum._loss.loss_sources import Loss
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import FitResult

# Arguments that must be the same on all ranks, beside those that are options of the step.
_ALIKE_ON_RANKS = (
    *("target_batch", "target_tokens", "drop_last", "shard_data", "epochs", "max_steps", "val_every"),
    *("scheduler_interval", "lr_scaling", "base_batch", "noise_scale", "save_memory"),
)


@writes_reason
def fit(
    model: nn.Module,
    loader: Iterable[Any],
    target_batch: int | None = None,
    *,
    # The loss and the batch.
    loss: Loss | Sequence[Loss] | None = None,
    loss_reduction: Literal["mean", "sum"] | None = None,
    loss_scope: Literal["micro_batch", "window"] = "micro_batch",
    forward: Callable[[nn.Module, Any], Any] | None = None,
    split: Split | None = None,
    target_tokens: int | None = None,
    batchnorm: Literal["keep", "rescale"] = "keep",
    # The optimizer step.
    optimizer: torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | MakesOptimizer
    | Literal["adamw", "sgd"]
    | None = None,
    scheduler: Any = None,
    scheduler_interval: Literal["step", "epoch"] = "step",
    lr_scaling: Literal["linear", "sqrt"] | None = None,
    base_batch: int | None = None,
    clip_grad_norm: float | None = None,
    # The loop.
    epochs: int | None = None,
    max_steps: int | None = None,
    drop_last: bool = False,
    val_loader: Iterable[Any] | None = None,
    val_every: int | None = None,
    metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | Literal["auto", "bar", "lines"] | Callback = "auto",
    on_nan: Literal["warn", "stop"] = "warn",
    # The device.
    device: str | torch.device | MemoryBackend | None = None,
    precision: Literal["auto", "fp32", "no", "bf16", "bf16-mixed", "fp16", "16-mixed"] = "auto",
    micro_batch: int | Literal["auto"] = "auto",
    memory_limit: float | str | None = None,
    save_memory: str | Sequence[str] | None = None,
    on_too_large: Literal["raise", "skip"] = "raise",
    # Long runs, ranks, diagnosis.
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_every: int | str | None = EVERY,
    resume: bool | Literal["auto"] = "auto",
    shard_data: bool = False,
    noise_scale: bool | int = False,
    oom_report: str | PathLike[str] | None = None,
) -> FitResult:
    """Train a model with optimizer steps of `target_batch` samples, regardless of how many fit on the device at once.

    Finds the largest micro-batch that fits, plans how to cut each window of `target_batch` samples into micro-batches,
    and makes one optimizer step with the gradient of the whole window. When memory runs out, `fit` begins
    the window again from the state before it, in smaller micro-batches; they grow back once memory is free again.

    Args:
        model: The model to train, in place. `fit` moves it to the device and leaves it there; its submodules keep their
            training or evaluation modes.
        loader: Any iterable of batches, of any size; the first dimension of their tensors indexes the samples, unless
            `split` says otherwise. A pair (inputs, targets) calls `model(inputs)`, a mapping calls
            `model(**batch)`, and anything else calls `model(batch)`.
        target_batch: Number of samples per optimizer step; None with `target_tokens`.
        loss: A callable of (outputs, targets), or of (outputs, batch) if a batch is not a pair, that returns a scalar,
            a vector of per-sample losses, a (sum, weight) pair, or a mapping of these; or a list of callables of
            (model, batch), each run and back-propagated separately. None: the model's own loss, else cross entropy for
            integer targets and mean squared error for floating-point ones. In a mapping, including one that the model
            returns, the entry "loss" is the total and the others are only reported; without that entry, those with a
            gradient are summed and detached ones are only reported (docs/losses.md).
        loss_reduction: "mean" (over the samples, not over tokens) or "sum": the reduction of the loss, taken at its
            word. None: read it from the loss's graph (docs/guarantees.md).
        loss_scope: "micro_batch": compute the loss of each micro-batch and weight it; "window": compute it once, from
            the model's outputs for the whole window, for any loss that is a deterministic function of per-sample
            outputs and no mean over them, such as one that compares samples with each other (docs/losses.md).
        forward: A callable of (model, batch) that returns the outputs and replaces the conventions for batches.
        split: How batches are counted, cut and joined if their samples do not run along the first dimension of every
            tensor: an object with `count`, `cut` and `join` (`autoaccum.Split`), such as `autoaccum.Along(1)` for
            time-first tensors or `autoaccum.ListOfSamples(collate)` for detection, graphs and flattened sequences
            (docs/batches.md).
        target_tokens: Number of tokens per optimizer step, over all ranks, in place of `target_batch`: an optimizer
            step is made from as many whole samples as come nearest to it. Those of a sample are its labels that are not
            -100, else what its `attention_mask` keeps, else the elements of its largest tensor (docs/batches.md).
        batchnorm: "keep": BatchNorm updates its running statistics with every micro-batch, with the layer's own
            momentum; "rescale": over a window, they move as far as with one batch (docs/losses.md).
        optimizer: An optimizer over the model's parameters, or a function of them that returns one. Several, in a list,
            if each has its own parameters (docs/losses.md). None or "adamw": AdamW(lr=1e-3);
            "sgd": SGD(lr=0.01, momentum=0.9).
        scheduler: A learning-rate scheduler for the optimizer in use, or a function of the optimizer that returns one.
            ReduceLROnPlateau steps on the loss of each evaluation.
        scheduler_interval: "step": step the scheduler after every optimizer step; "epoch": after every epoch.
        lr_scaling: "linear" or "sqrt": multiply the learning rates once, by `target_batch / base_batch` or its root.
            Rates that a scheduler gets as arguments (`OneCycleLR(max_lr=)`) are multiplied if it is passed, but not if
            a function makes it.
        base_batch: The batch size that the learning rates were chosen for.
        clip_grad_norm: Maximum norm of the whole window's gradient, over all parameters of the optimizer. float("inf")
            only measures that norm, for `StepReport.grad_norm`.
        epochs: Number of passes over the loader. None: 1, or as many as `max_steps` takes.
        max_steps: Number of windows after which training stops.
        drop_last: Whether to leave out a shorter last window of an epoch, in place of an optimizer step made from it.
        val_loader: Data to evaluate on after each epoch. To detect errors early, a few samples are also evaluated
            before the first optimizer step, which leaves parameters, buffers and random state as they are.
        val_every: Number of windows between evaluations, which then take the place of those after each epoch; the end
            of the training is evaluated in any case. None: evaluate after each epoch.
        metrics: Metrics for the evaluation: callables of (outputs, targets), averaged over samples, or torchmetrics
            objects. A model that returns no loss in evaluation mode is evaluated by them alone.
        callbacks: Callbacks to notify of plans, steps, evaluations and checkpoints.
        progress: "auto": a bar on a terminal, lines elsewhere; "bar"; "lines"; or False for no output, which also
            silences notices of what `fit` chose. Lines and notices are logged under "autoaccum", level INFO, where a
            handler takes them, and printed on stderr where none does.
            `logging.getLogger("autoaccum").setLevel("WARNING")` silences both.
        on_nan: What to do when a window's loss or gradient norm is NaN or infinite. "warn": print a warning on stderr
            once, even with progress=False; "stop": raise NotFiniteError on all ranks. No checkpoint of non-finite
            parameters is written, and the last finite one is kept.
        device: A device, its name, or a memory backend that stands for one. None: the model's device if that is an
            accelerator, else the available accelerator, else the CPU.
        precision: "fp32" (or "no"); "bf16" (or "bf16-mixed") and "fp16" (or "16-mixed") with autocast and, for
            fp16, a gradient scaler. "auto": on CUDA, bf16 or
            fp16, whichever the GPU supports well; fp32 elsewhere.
        micro_batch: Maximum number of samples at once, or "auto" to find it in the first windows of the training, whose
            micro-batches start small and grow; with loss_scope="window" by trials before it. The environment variable
            AUTOACCUM_MAX_MICRO_BATCH, which `autoaccum run` sets, bounds both. With a number, two runs cut alike,
            regardless of memory and timing; with "auto", a long training also times halves and quarters of what fits,
            and keeps what is fastest. Windows of compiled models are cut into equal sizes.
            What was found is remembered for the next run of the same job, which confirms it with a single micro-batch:
            in the user's cache directory, or in AUTOACCUM_CACHE_DIR; an empty AUTOACCUM_CACHE_DIR remembers nothing.
        memory_limit: Bytes, a string such as "12GiB", or a fraction of the device's total memory. On the host, it
            limits what the process takes beyond what it holds at the call and the batches of the loader. None: all free
            memory.
        save_memory: What saves memory, for time (docs/memory.md). "chunked_loss": the cross entropy of a Transformers
            model is computed a few tokens at a time, so that its logits are never whole; other models use
            `autoaccum.ChunkedLoss`. "checkpoint": activation checkpointing of the model's repeated blocks, or with
            "checkpoint:NAME" of those of a name or a class. "offload": activations are kept in host memory. Several in
            a list. "auto": one after the other wherever not even one sample fits, else nothing. Gradients stay the
            same, those of a loss in chunks up to rounding.
        on_too_large: What to do with a sample that does not fit even alone. "raise": raise DoesNotFitError. "skip":
            leave it out of its window, whose mean then runs over the rest, say which it is, and count it in the result;
            a window with nothing left makes no optimizer step. Not on several ranks, nor with loss_scope="window".
        checkpoint: A folder for the checkpoints of this run and no other. `fit` writes one at the end, on SIGTERM
            (which then takes effect), on SIGUSR1, when an error ends the call early, every `checkpoint_every`, and
            after an evaluation with the lowest loss so far. The newest two and that with the lowest loss are kept.
        checkpoint_every: Number of windows between checkpoints, or a time such as "15min", "90s" or "1h"; None: none
            at intervals.
        resume: "auto": resume from the folder's newest checkpoint, or start from the beginning if there is none. True:
            require one. False: start from the beginning; those in the folder move to a folder `earlier-N` in it when
            the first new one is written.
        shard_data: Under torchrun, whether every rank's loaders give all samples, so that each rank takes its part of
            every window and of the validation data. False: each rank's loaders give only its own samples
            (DistributedSampler); see docs/several-gpus.md.
        noise_scale: Whether to measure the gradient noise scale, which says whether a larger batch would pay, from two
            norms of every 50th window; a number measures every so many windows. A window that is measured takes
            its samples in random order, and is cut in two if it fits at once (docs/batch-size.md).
        oom_report: A folder. When memory first runs out, a text with the largest tensors, and on CUDA a snapshot for
            PyTorch's memory viewer, is written there (docs/troubleshooting.md).

    Returns:
        A summary of the run. The model itself is trained in place. An exception that ends the call early, such as
        KeyboardInterrupt at Ctrl-C, has the summary of what is done as its attribute `result`, unless it was raised
        while arguments were checked, refuses attributes, or has a `result` of its own. Before the first optimizer step
        that summary is of 0 steps.

    Raises:
        InvalidInputError: An argument, a batch or a loss cannot be used.
        DoesNotFitError: Not even one sample at a time fits.
        DeviceLostError: This process can no longer use the device.
        StateDamagedError: The optimizer, or a hook on its step, failed after it had begun to write.
        StepCompleteError: The scheduler failed, or memory ran out, after an optimizer step, which
            is made. If the scheduler has not stepped, no checkpoint of that state is written.
        StartAgainError: Memory ran out in a model that is sharded across ranks (docs/several-gpus.md).
        CheckpointError: A checkpoint cannot be written or read, or belongs to another run. The model is unchanged
            unless the error says that code of your own refused its state half-way.
        CheckpointInUseError: Another process trains with the checkpoint folder, or was let in while this one was
            suspended.
        RankFailedError: Another process of this training failed.
        NotFiniteError: A window was not finite, and on_nan="stop".
    """
    given, started = locals(), time.perf_counter()
    check_target(target_batch, target_tokens)
    in_tokens = target_tokens is not None
    target: Any = target_tokens if in_tokens else target_batch
    options = Options.of(fit, given)
    check_bool("drop_last", drop_last)
    optimizers.scaling_factor(lr_scaling, target, base_batch)
    epochs, max_steps = _check_length(epochs, max_steps)
    check_scheduler(scheduler, scheduler_interval, val_loader, optimizer)
    _check_data(loader, val_loader, split, val_every, metrics, epochs, callbacks)
    saving = check_saving(checkpoint, checkpoint_every, resume)
    folders = [None if saving is None else saving.folder, options.report_folder]
    check_bool("shard_data", shard_data)
    if shard_data:
        check_not_one_of_several()
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module  # DDP's own first forward pass would wait for all ranks
    rank, cap, counts = own_rank(), max_micro_batch(), TOKENS if in_tokens else SAMPLES
    notices = Notices(silent=progress is False or rank > 0, holds_choices=True)
    if cap is not None and cap < (micro_batch if isinstance(micro_batch, int) else target):
        notices.say(f"micro-batches of at most {counted(cap, 'sample')} ({MAX_MICRO_BATCH}={cap})")
    backend = devices.resolve(device, model, notices)
    limit_bytes = options.limit_bytes(backend)
    shown = progress_for(progress if rank == 0 else False, backend, limit_bytes, counts)
    if rank and progress is not False:
        shown = OomOnlyProgress(rank)
    savings = options.savings(backend)
    restoring = RestoreOnFailure(backend.device, folders, (loader, val_loader))
    with AtWork("fit", model, nests=True), restoring, joined(backend) as ranks:
        step = assemble(model, options, memory=backend, notices=notices, is_one_of_several=ranks is not None)
        restoring.keep_rates(step.optimizer, scheduler)
        earlier = None if saving is None else saving.cap(notices)
        cap = min((one for one in (cap, earlier) if one is not None), default=None)
        grows_from = None
        if ranks is not None:
            grows_from = _check_ranks(ranks, step, given, {"save_memory": savings, "noise_scale": options.noise_every})
        world = Coordinator(
            ranks,
            loader,
            target,
            drop_last=drop_last,
            shard_data=shard_data,
            split=step.objective.split,
            in_tokens=in_tokens,
            notices=notices,
        )
        per_epoch = None
        if not in_tokens:
            of_window = target if shard_data else world.target_batch
            per_epoch = _steps_per_epoch(loader, of_window, drop_last=drop_last)
        call = FitContext(
            step,
            world,
            Schedule(scheduler, scheduler_interval, step.optimizer, is_evaluated=val_loader is not None),
            RandomState(backend.device, step.objective.modules),
            notices,
            target_batch=target,
            counts=counts,
            drop_last=drop_last,
            epochs=epochs,
            max_steps=max_steps,
            steps_per_epoch=per_epoch,
            val_loader=val_loader,
            val_every=val_every,
            metrics=metrics,
            callbacks=(TellsChoices(notices, waits=loss is None), shown, *callbacks),
            saving=saving,
            limit_bytes=limit_bytes,
            cap=cap,
            grows_from=grows_from,
            saves=savings,
            savings=Savings(step.objective.modules, savings, backend, notices),
            noise=None if options.noise_every is None else NoiseScale(options.noise_every, notices),
        )
        training = Training(call)
        restoring.training = training
        if lr_scaling is not None:
            optimizers.scale_learning_rate(
                step.optimizer,
                lr_scaling,
                target_batch=target,
                base_batch=base_batch,
                notices=notices,
                scheduler=scheduler,
            )
        return training.run(started)


def _check_length(epochs: int | None, max_steps: int | None) -> tuple[int | None, int | None]:
    if epochs is not None:
        check_positive_int("epochs", epochs)
    if max_steps is not None:
        check_positive_int("max_steps", max_steps)
        return epochs, max_steps
    return (1 if epochs is None else epochs), None


def _check_data(
    loader: Any,
    val_loader: Any,
    split: Split | None,
    val_every: int | None,
    metrics: Any,
    epochs: int | None,
    callbacks: Sequence[Callback],
) -> None:
    check_loader("loader", loader, split)
    check_metrics(metrics)
    if val_every is not None:
        check_positive_int("val_every", val_every)
    if val_loader is None:
        waits = any(isinstance(callback, EarlyStopping) for callback in callbacks)
        asked = {f"val_every={val_every}": val_every is not None, "metrics=": metrics is not None}
        for name in (name for name, is_set in (asked | {"EarlyStopping": waits}).items() if is_set):
            raise InvalidInputError(f"{name} needs a val_loader= to evaluate, and there is none; pass both")
        return
    check_loader("val_loader", val_loader, split)
    is_read_again = val_loader is loader or val_every is not None or (epochs != 1 and not can_be_read_once(loader))
    if is_read_again and can_be_read_once(val_loader):
        raise InvalidInputError(
            f"val_loader, a {type(val_loader).__name__}, can be read only once, and would be read several times; pass "
            "a DataLoader or a list, which can be read every time"
        )
    if val_every is not None and val_loader is loader and not isinstance(loader, list | tuple):
        raise InvalidInputError(
            f"val_every={val_every} evaluates in the middle of an epoch, and val_loader= is the loader that the "
            "training is reading then; pass a second one over the same data"
        )


def _check_ranks(ranks: Ranks, step: TrainingStep, given: Mapping[str, Any], meant: Mapping[str, Any]) -> int | None:
    """Check that all ranks have the same model and arguments, and can do what these ask for.

    Args:
        ranks: All ranks.
        step: This rank's training step.
        given: The arguments.
        meant: What some of them mean.

    Returns:
        The micro-batch from which sizes grow if the model is sharded; else None.
    """
    if given["on_too_large"] == "skip":
        raise InvalidInputError(
            f"on_too_large='skip' is for one process, and there are {ranks.size} ranks; leave the samples out of the "
            "dataset"
        )
    means = {**given, **meant}
    asked = {f"{name}={given[name]!r}": bool(means[name]) for name in ("save_memory", "noise_scale", "target_tokens")}
    grows_from = check_sharded(step.objective.modules, ranks.size, asked)
    are_given = {name: given[name] is not None for name in ("checkpoint", "val_loader")}
    further = {
        "scheduler": optimizers.parts_of_scheduler(given["scheduler"]),
        "metrics": metrics_by_name(given["metrics"]),
    }
    make_alike(ranks, step, {name: means[name] for name in _ALIKE_ON_RANKS} | are_given | further)
    return grows_from


def _steps_per_epoch(loader: Iterable[Any], target_batch: int, *, drop_last: bool) -> int | None:
    """Return the number of windows per epoch; None if it is not known."""
    if not isinstance(loader, torch.utils.data.DataLoader) or loader.batch_size is None:
        return None
    try:
        samples = len(loader) * loader.batch_size if loader.drop_last else len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:  # an iterable dataset without a length
        return None
    return samples // target_batch if drop_last else math.ceil(samples / target_batch)
