"""The steady path through a window: slice, transfer, autocast, forward, times a factor, backward, and nothing else.

A window takes it where careful windows of its structure have seen to everything, and nothing has changed since that
would void what they saw. Misuse that begins later is found by the next careful window.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, itemgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from autoaccum._data.batches import KnownWindow
from autoaccum._data.pieces import flat_like
from autoaccum._engine.gradients import LossSum, PartResult
from autoaccum._engine.out_of_memory import Phase
from autoaccum._loss.graph_reader import leaves_of
from autoaccum._loss.loss_values import LossValue
from autoaccum._loss.summands import BY_SAMPLES, Reduction
from autoaccum._loss.torch_losses import everything_counts
from autoaccum._loss.window_weights import WindowWeights, refuse_nothing

if TYPE_CHECKING:
    from collections.abc import Hashable

    from autoaccum._data.batches import Window
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.gradients import Progress
    from autoaccum._loss.objective import Objective
    from autoaccum._sizing.sizing import Sizing

_BEFORE_TENSORS = len(("type", "keys"))
_KINDS_OF_PAIR = _BEFORE_TENSORS + len(("inputs", "targets"))
_IS_TRAINED, _PARAMETERS, _VALUES = attrgetter("requires_grad"), itemgetter("params"), methodcaller("values")
_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
# Windows of one structure that take the careful path: the first, second, fourth, ..., and then now and then.
_LAST_POWER = 1024
_EVERY = 1000
# More come of keys that differ from batch to batch.
_MOST_STRUCTURES = 256


def is_number_due(number: int) -> bool:
    """Whether the window of this number is careful: the first, second, fourth, ..., and then now and then."""
    return number % _EVERY == 0 or (number & (number - 1) == 0 and number <= _LAST_POWER)


class NotSteadyError(Exception):
    """A window is not like the careful ones: it is made again on the careful path."""

    def __init__(self) -> None:
        super().__init__("the loss is no number with a gradient, or was not checked")


@dataclass(slots=True)
class _Known:
    """What is known of windows of one structure."""

    structure: Hashable
    windows: int = 0  # how many there have been
    epoch: int = 0  # that of the steady path when this was learned
    # Their loss: its name, None if the steady path cannot compute it; and whether it is known how micro-batches are put
    # together.
    name: str | None = None
    may_cut: bool = False
    # The tensors of the last window, by type, shape and device, None if it was not a batch of them; and whether that
    # batch can be taken apart where it is.
    kinds: list[Any] | None = None
    is_split: bool = False


class SteadyPath:
    """Runs the micro-batches of windows that need no check, and leaves their gradient in `.grad`. Catches nothing.

    Attributes:
        is_due: Whether the window that `admits` was asked about is due for all checks.
    """

    def __init__(self, step: GradientStep, sizing: Sizing, *, is_part: bool) -> None:
        self._step = step
        self._objective: Objective = step.objective
        self._sizing = sizing
        self._is_part = is_part
        self._known: dict[Hashable, _Known] = {}
        self._now = _Known(None)
        self.is_due = True
        # What must not have changed: None for what is not known.
        self._state: tuple[Any, ...] | None = None
        self._epoch = 0  # rises when it changes: what is known of every structure is void then
        self._hooked: list[bool] = []
        # The parameters and parts of each module, where no optimizer is known.
        self._tables: list[dict[str, Any]] = []
        self._handles = 0

    # --- which path a window takes ------------------------------------------------------------------------------------

    def admits(self, window: Window) -> bool:
        """Whether a window may take this path."""
        structure = window.structure()
        known = self._known.get(structure)
        if known is None:
            if len(self._known) == _MOST_STRUCTURES:
                self._known.clear()
            known = self._known[structure] = _Known(structure)
        self._now = known
        number = known.windows = known.windows + 1
        if self._has_changed():
            self._state, self._epoch = None, self._epoch + 1
        self.is_due = is_number_due(number) or known.epoch != self._epoch
        if self.is_due or known.name is None or self._sizing.is_learning:
            return False
        return known.may_cut or not window.carries_numbers()  # of a batch that the window is a part of

    def is_first(self) -> bool:
        """Whether the window that `admits` was asked about is the first of its structure."""
        return self._now.windows == 1

    def learn(self, window: Window, given: PartResult) -> None:
        """Note that a careful window is complete, and whether those that are like it may take this path."""
        objective = self._objective
        knowledge = objective.knowledge
        is_plain = objective.gave_number and len(given.losses) == 1 and not given.reported
        may = is_plain and self._step.passes is None and not self._step.keeps_outputs and knowledge.are_predicted
        known = self._now
        known.name = known.kinds = None
        known.epoch = self._epoch
        if self._step.optimizer is None:
            parts = chain.from_iterable(module.modules() for module in objective.modules)
            self._tables = [table for part in parts for table in (part._parameters, part._modules)]
        self._state, self._hooked, self._handles = self._now_in_force(), self._are_hooked(), RemovableHandle.next_id
        if may:
            known.name = next(iter(given.losses))
            known.may_cut = knowledge.is_checked or knowledge.needs_no_check
            batch = window.plain_batch()
            tensors = batch.values() if type(batch) is dict else batch
            if batch is not None and all(type(tensor) is Tensor for tensor in tensors):
                known.kinds = _kinds(batch)
                known.is_split = window.is_on(self._step.memory.device)

    def forget(self) -> None:
        """Take the careful path with windows of the current structure: their loss has changed its form."""
        self._now.name = None

    def known(self, batch: Any) -> KnownWindow | None:
        """Return a window of a batch of tensors just like those of the last window; None if it is anything else."""
        known = self._now
        kinds, kind, tensors = known.kinds, type(batch), batch
        if kinds is None or kind is not kinds[0] or len(batch) != len(kinds) - _BEFORE_TENSORS:
            return None
        if kind is dict:
            # A single row may be several sequences, which only its values show: it is read anew.
            if tuple(batch) != kinds[1] or kinds[_BEFORE_TENSORS][0][0] == 1:
                return None
            tensors = batch.values()
        for tensor, own in zip(tensors, kinds[_BEFORE_TENSORS:], strict=True):
            if type(tensor) is not Tensor or (tensor.shape, tensor.dtype, tensor.device) != own:
                return None
        return KnownWindow(batch, known.structure, kinds)

    def void(self) -> None:
        """Take the careful path with the next window, whatever its structure."""
        self._state = None

    def _has_changed(self) -> bool:
        """Whether what careful windows saw may not hold any more."""
        if self._state is None or self._now_in_force() != self._state:
            return True
        handles = RemovableHandle.next_id
        if handles != self._handles:  # somewhere a hook was registered
            self._handles = handles
            return self._are_hooked() != self._hooked
        return False

    def _now_in_force(self) -> tuple[Any, ...]:
        step = self._step
        held = map(_VALUES, self._tables) if step.optimizer is None else map(_PARAMETERS, step.optimizer.param_groups)
        return (
            list(map(id, chain.from_iterable(held))),
            self._objective.calls.model.training,
            self._objective.settings(),
            torch.is_autocast_enabled(step.memory.device.type),
            id(step.scale),
            step.keeps_outputs,
            # Ranks do not add up gradients of parameters that come to be trained.
            list(map(_IS_TRAINED, step.parameters)) if self._is_part else None,
        )

    def _are_hooked(self) -> list[bool]:
        return [any(map(hooks, self._step.parameters)) for hooks in _HOOKS]

    # --- a window -----------------------------------------------------------------------------------------------------

    def run(self, window: Window, at: Progress) -> PartResult:  # noqa: C901, PLR0912, PLR0915 - calls would cost on this path
        """Run a window, or this process's part of it, from its start; `at` follows the micro-batches.

        Raises:
            NotSteadyError: The loss is no number with a gradient, or has to be checked.
            RecheckWindow: It is not what is known of it.
        """
        step, sizing, stage = self._step, self._sizing, self._step.stage
        objective, scale, context = self._objective, step.scale, step.precision.autocast()
        run, calls = objective.number_of, objective.calls
        model = calls.model
        loss_of: Any = calls.loss
        kinds = window.kinds
        is_of_two = kinds is not None and kinds[1] is None and len(kinds) == _KINDS_OF_PAIR  # tensors in no mapping
        is_pair = is_of_two and calls.takes_pairs
        known, knowledge, samples = self._now, objective.knowledge, window.samples
        plain = window.plain_batch() if window.kinds is not None else None
        name = known.name
        assert name is not None
        at.sizes = sizes = sizing.cut(0)
        measures = sizing.measures
        is_whole = len(sizes) == 1 and not self._is_part
        if not is_whole and not known.may_cut:
            raise NotSteadyError
        all_count = is_of_two and not self._is_part and everything_counts(loss_of)
        knowledge.begin_window()
        # Where everything counts, micro-batches count by their samples.
        by_samples = all_count and knowledge.is_torch_loss and knowledge.summands[name][0].reduction is Reduction.MEAN
        by_samples |= knowledge.default is BY_SAMPLES and not self._is_part
        weights = None if is_whole or by_samples else WindowWeights(knowledge, window)
        losses: list[Tensor] = []
        reached: list[Tensor] = []
        loss: Tensor | None
        may_be_nan = False
        stage.phase = Phase.TRANSFER
        if plain is None or not known.is_split or step.transfer.copies:
            batches: Any = step.transfer.feed(window, sizes)
        else:
            parts = zip(*map(Tensor.split, window.tensors(), repeat(sizes)), strict=True)
            batches = parts if type(plain) is tuple else map(flat_like, repeat(plain), parts)
        with closing(batches) if isinstance(batches, Generator) else nullcontext():
            for size in sizes:
                at.size = size  # before its transfer, which it can be made smaller for
                batch = next(batches)
                if measures:
                    sizing.start = at.done
                    sizing.enter(size)
                stage.phase = Phase.FORWARD
                with context:
                    value = loss_of(model(batch[0]), batch[1]) if is_pair else run(batch)
                if not isinstance(value, Tensor) or value.dim() or not value.requires_grad:
                    raise NotSteadyError
                if weights is not None:
                    loss = weights.weigh_at_once(name, value)
                    if loss is None:
                        weights.enter(at.done, size, batch)
                        loss = weights.weigh(own := LossValue(name, value))
                        may_be_nan |= own.may_be_nan
                elif is_whole:
                    loss = value
                    if not all_count:
                        refuse_nothing(knowledge, LossValue(name, value))
                else:
                    loss = value * (size / samples)
                if loss is not None:
                    # Without a factor, it may be a buffer that the next micro-batch overwrites.
                    losses.append(loss.detach() if loss is not value or is_whole else loss.detach().clone())
                    stage.phase = Phase.BACKWARD
                    (loss if scale is None else scale(loss)).backward()  # type: ignore[no-untyped-call]
                else:
                    losses.append(value.new_zeros(()))
                    reached += leaves_of(value)
                if measures:
                    sizing.leave(size)
                at.done += size
                stage.phase = Phase.TRANSFER
        at.size = None
        if weights is not None:
            weights.finish()
            losses = [loss.nan_to_num() for loss in losses] if may_be_nan else losses
        return PartResult(samples, {name: LossSum(losses)}, weights=weights, reached=reached)


def _kinds(batch: Any) -> list[Any]:
    keys, tensors = (tuple(batch), batch.values()) if type(batch) is dict else (None, batch)
    return [type(batch), keys, *((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)]
