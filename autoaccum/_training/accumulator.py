"""Adds one batch's gradient to `.grad`, in micro-batches that fit, for loops that bring their own optimizer."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch

from autoaccum._arguments import check_choice, check_function, check_one_batch
from autoaccum._data.batches import as_window
from autoaccum._distributed.consistency import make_alike
from autoaccum._distributed.data_parallel import RankPeers
from autoaccum._distributed.fsdp import ShardedRankPeers
from autoaccum._distributed.process_group import all_ranks
from autoaccum._engine import devices
from autoaccum._engine.accumulator import GradientAccumulator
from autoaccum._engine.assembly import assemble_without_optimizer
from autoaccum._engine.at_work import AtWork
from autoaccum._engine.dtensor import check_sharded, least_size, refuse_sharded
from autoaccum._engine.options import Options
from autoaccum._engine.step_limit import StepLimit
from autoaccum._loss.closures import Closure, modules_used_by
from autoaccum._oom import clear_traceback_frames, is_oom
from autoaccum._saving.savings import Savings
from autoaccum._sizing.cache import CacheEntry, PlanCache
from autoaccum._sizing.events import Events
from autoaccum._sizing.job_key import key_of
from autoaccum._system.notices import Notices
from autoaccum._system.reason_file import writes_reason
from autoaccum.errors import InvalidInputError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from torch import Tensor, nn

    from autoaccum._callbacks import Callback
    from autoaccum._data.batches import Window
    from autoaccum._data.pieces import Split
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._loss.loss_sources import Loss
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import BackwardReport, Plan

_KEEP = ("outputs",)
_HALVES = ("bf16", "fp16")


class Accumulator:
    """Adds gradients of whole batches to `.grad`, whatever fits at once, in a loop with an optimizer of your own.

        accumulator = autoaccum.Accumulator(model, loss=loss)
        for batch in loader:  # batches of the size that you mean
            report = accumulator.backward(batch)
            optimizer.step()
            optimizer.zero_grad()

    `backward` takes the place of the forward pass, the loss and `loss.backward()`. It finds the largest micro-batch
    that fits while it trains, cuts smaller and continues when memory runs out, and grows back once memory is free
    again. It steps no optimizer and clears no gradients: called twice, gradients add up.

    Args:
        model: The model. It is moved to the device and stays there.
        loss: As for `fit`.
        closure: Instead of `loss`, a function of one micro-batch on the device that runs the model itself and returns
            the loss, in any form that `loss` may return; in a mapping, the entry "outputs" is no loss, but what
            `keep="outputs"` keeps. It is called again after memory has run out, so it must not
            change anything but the state of modules and random numbers. Modules that it refers to besides the model
            (a teacher, a discriminator) are found, moved to the device, and restored with the model.
        loss_reduction: As for `fit`.
        loss_scope: As for `fit`.
        forward: As for `fit`.
        split: As for `fit`.
        batchnorm: As for `fit`.
        scale: A `torch.amp.GradScaler`, or a function of the loss that returns what is backpropagated. Gradients stay
            scaled, for `scaler.unscale_` and `scaler.step`.
        callbacks: Called when memory runs out and when the plan changes.
        device: As for `fit`.
        precision: As for `fit`. Where your loop has entered `torch.autocast`, "auto" leaves that in force. "fp16" needs
            `scale`.
        micro_batch: The most samples at once; "auto" finds it, and remembers it as `fit` does.
        memory_limit: As for `fit`. It is in force within `backward`. On the host, it counts from when the accumulator
            is created.
        save_memory: As for `fit`. It is in force within `backward`; the model's forward passes elsewhere are as they
            were.
        oom_report: As for `fit`.

    A batch's gradient is computed from none and added to what was in `.grad` once it is complete, so that memory which
    runs out on the way does not affect earlier gradients. This takes the memory of a second set of gradients while
    there are earlier ones.

    Parameters must not have post-accumulate-grad hooks (an optimizer that steps in the backward pass), since they would
    run for each micro-batch. Gradients cannot be differentiated again (`create_graph`). Only parameters
    are looked after: another tensor that requires a gradient (an input, a number in the loss) keeps what a batch that
    was begun again had added to it, so make it a parameter of the model or of the loss.

    Raises:
        InvalidInputError: An argument cannot be used.
        DoesNotFitError: The model itself does not fit on the device.
    """

    @writes_reason
    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss | Sequence[Loss] | None = None,
        closure: Callable[[Any], Any] | None = None,
        loss_reduction: str | None = None,
        loss_scope: str = "micro_batch",
        forward: Callable[[nn.Module, Any], Any] | None = None,
        split: Split | None = None,
        batchnorm: str = "keep",
        scale: torch.amp.GradScaler | Callable[[Tensor], Tensor] | None = None,
        callbacks: Sequence[Callback] = (),
        device: str | torch.device | MemoryBackend | None = None,
        precision: str = "auto",
        micro_batch: int | str = "auto",
        memory_limit: float | str | None = None,
        save_memory: str | Sequence[str] | None = None,
        oom_report: str | PathLike[str] | None = None,
    ) -> None:
        self._set_up(model, Options.of(Accumulator, locals()), closure=closure, scale=scale)

    @classmethod
    def _of(cls, model: nn.Module, options: Options, **further: Any) -> Self:
        """Return an accumulator with the options of an adapter; others as for `_set_up`."""
        made = cls.__new__(cls)
        made._set_up(model, options, **further)
        return made

    def _set_up(
        self,
        model: nn.Module,
        options: Options,
        *,
        closure: Callable[[Any], Any] | None,
        scale: torch.amp.GradScaler | Callable[[Tensor], Tensor] | None,
        half: str | None = None,
        batches: Callable[[], int] | None = None,
        is_models_own: bool = False,
    ) -> None:
        """Make the parts.

        Args:
            model: The model.
            options: Those of the arguments that many entry points share.
            closure: As for the class.
            scale: As for the class.
            half: "bf16" or "fp16" if the model casts to it by itself, so that messages name it, and what is compared is
                compared as it rounds.
            batches: Returns how many batches a framework makes an optimizer step of, by which its backward pass
                divides.
            is_models_own: Whether the model, or a framework, computes the loss, and no function of the user's.
        """
        _check_functions(options, closure)
        self._notices = notices = options.notices or Notices(holds_choices=True)
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        backend = devices.resolve(options.device, model, notices)
        limit_bytes = options.limit_bytes(backend)
        names = options.savings(backend)
        used = [] if closure is None else modules_used_by(closure)
        losses = options.loss if isinstance(options.loss, list | tuple) else [options.loss]
        functions = [one for one in (*losses, options.forward) if callable(one)]
        used += [module for one in functions for module in modules_used_by(one)]
        self._step = assemble_without_optimizer(
            model,
            options if closure is None else replace(options, loss=[Closure(closure)]),
            memory=backend,
            notices=notices,
            further=[module for module in dict.fromkeys(used) if module not in losses],
            scale=scale,
            is_one_of_several=True,
        )
        self._step.objective.knowledge.is_models_own |= is_models_own
        if half in _HALVES:
            self._step.precision.name, self._step.objective.casts_itself = half, True
        if batches is not None:
            self._step.scale = _divided(self._step.scale, batches)
        self._ranks = _ranks(self._step, scale)
        self._limit = StepLimit(backend, limit_bytes)
        ranks, step = self._ranks, self._step
        self._savings = Savings(step.objective.modules, names, backend, notices)
        self._has_begun = False
        measures = options.micro_batch == "auto" and options.loss_scope == "micro_batch" and not step.is_sharded
        self._accumulating = GradientAccumulator(
            step,
            Events(backend, options.callbacks, notices),
            notices,
            peers=None if ranks is None else lambda: _peers(ranks, step),
            entry_of=_entries(step, limit_bytes, names, closure, notices) if measures else None,
            grows_from=least_size(step.objective.modules) if step.is_sharded else None,
        )
        self._at_work = AtWork("backward", model)
        notices.tell_choices()

    @property
    def plan(self) -> Plan | None:
        """How batches are split; None before the first batch."""
        return self._accumulating.plan

    @property
    def savings(self) -> tuple[str, ...]:
        """What saves memory in the next batch, by names of the argument `save_memory`."""
        return self._savings.names

    @writes_reason
    def backward(self, batch: Any, *others: Any, keep: str | None = None) -> BackwardReport:
        """Add the gradient of a batch to `.grad`, as one backward pass of the whole batch would.

        Under torchrun, every process calls it with its own part of the batch, and all get the gradient of the whole.

        Args:
            batch: One batch, of any size, or a sequence of batches that belong together (what `autoaccum.windows`
                yields).
            others: None; inputs and targets are one batch, a pair.
            keep: "outputs" to return what the model, or the closure as "outputs", returned for each micro-batch; None
                for nothing.

        Returns:
            What was done. Reading its loss waits for the device.

        Raises:
            InvalidInputError: The batch or the loss's return value cannot be used. After this and the other errors,
                `.grad`, buffers and random state are as before.
            DoesNotFitError: Not even one sample at a time fits.
            DeviceLostError: This process can no longer use the device.
            RankFailedError: Another process of this training failed.
        """
        check_one_batch("backward", others)
        if isinstance(batch, torch.Tensor) and not batch.dim():
            raise InvalidInputError(
                "backward takes the batch, and got a tensor of one number; pass the batch that its loss is of, since "
                "the forward pass and the loss are computed in micro-batches: backward(batch)"
            )
        if keep is not None:
            check_choice("keep", keep, _KEEP)
            if not self._step.objective.calls.gives_outputs:
                raise InvalidInputError(
                    "keep='outputs': a list of losses returns no outputs; leave it out, or pass closure= instead"
                )
        if torch.is_inference_mode_enabled():
            raise InvalidInputError("backward was called within torch.inference_mode(), where there are no gradients")
        with self._at_work:
            return self._backward(batch, keeps_outputs=keep is not None)

    def _backward(self, batch: Any, *, keeps_outputs: bool) -> BackwardReport:
        self._step.keeps_outputs = keeps_outputs
        try:
            window = self._accumulating.known(batch)
            if window is None:
                window = as_window(batch, self._step.objective.split)
            with self._limit.in_force():
                return self._added(window)
        except BaseException as error:
            if self._ranks is not None and not isinstance(error, RankFailedError):
                self._ranks.fail(error)  # the others wait for this one
            raise

    def _added(self, window: Window) -> BackwardReport:
        """Add the gradient of a window; with save_memory="auto" save more wherever not even one sample fits."""
        savings, accumulating = self._savings, self._accumulating
        if not (savings.is_auto or savings.names):
            return accumulating.add(window)

        def begin_level() -> None:
            accumulating.begin_level(savings.names)
            accumulating.look_up(window)

        if savings.is_auto:
            known = accumulating.look_up(window)
            if not self._has_begun:
                savings.begin(known)
                accumulating.begin_level(savings.names)
                self._has_begun = True
        return savings.run(lambda: accumulating.add(window), on_escalate=begin_level)


def _divided(scale: Callable[[Tensor], Tensor] | None, batches: Callable[[], int]) -> Callable[[Tensor], Tensor]:
    def divided(loss: Tensor) -> Tensor:
        number = batches()
        loss = loss if number == 1 else loss / number
        return loss if scale is None else scale(loss)

    return divided


def _entries(
    step: GradientStep,
    limit_bytes: int | None,
    savings: Sequence[str],
    closure: Callable[[Any], Any] | None,
    notices: Notices,
) -> Callable[[Window], CacheEntry]:
    """Return what finds the cache's entry for batches, as `GradientAccumulator` takes it."""
    cache = PlanCache(notices)
    name = "" if closure is None else getattr(closure, "__qualname__", type(closure).__qualname__)

    def entry(window: Window) -> CacheEntry:
        try:
            sample = window.largest().cut(0, 1)
        except Exception as error:
            if not is_oom(error):
                raise
            clear_traceback_frames(error)  # nothing is known, and the batch itself is run with smaller micro-batches
            return CacheEntry(step.memory)
        key = key_of(
            step.objective.modules,
            sample,
            optimizer=f"a loop's own, {name}",
            memory=step.memory,
            precision=step.precision.name,
            target_batch=window.samples,
            limit_bytes=limit_bytes,
            loss_scope="micro_batch",
            saves=list(savings),
        )
        return CacheEntry(step.memory, cache, key)

    return entry


def _ranks(step: GradientStep, scale: torch.amp.GradScaler | Callable[[Tensor], Tensor] | None) -> Ranks | None:
    """Join the other processes of this training, and give all of them the weights of the first; None if there are none.

    Raises:
        InvalidInputError: The processes differ, or the loss needs all samples in one of them.
    """
    ranks = all_ranks(step.memory, or_alone=step.is_sharded)
    if ranks is None:
        refuse_sharded(step.objective.modules)
        return None
    try:
        _check_ranks(ranks, step, scale)
    except Exception as error:
        ranks.fail(error)  # which the others may not find by themselves
        raise
    return ranks


def _check_ranks(
    ranks: Ranks, step: GradientStep, scale: torch.amp.GradScaler | Callable[[Tensor], Tensor] | None
) -> None:
    modules, saves = step.objective.modules, step.options.save_memory
    check_sharded(modules, ranks.size, {f"save_memory={saves!r}": bool(saves)})
    make_alike(ranks, step, {"scale": scale.state_dict() if isinstance(scale, torch.amp.GradScaler) else scale})


def _peers(ranks: Ranks, step: GradientStep) -> RankPeers:
    if not step.is_sharded:
        return RankPeers(ranks, step)
    return ShardedRankPeers(ranks, step, sys.maxsize if step.options.micro_batch == "auto" else None)


def _check_functions(options: Options, closure: object) -> None:
    if closure is None:
        return
    given = [name for name in ("loss", "forward") if getattr(options, name) is not None]
    if options.loss_scope == "window":
        given.append("loss_scope='window'")
    if given:
        raise InvalidInputError(
            f"closure= runs the model and returns the loss itself, so {' and '.join(given)} would have no effect; "
            "leave one of them out"
        )
    check_function("closure", closure, "batch")
