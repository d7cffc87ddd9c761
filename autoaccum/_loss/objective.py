"""Runs a micro-batch through the model and the loss, and checks on a few samples how losses are put together.

Returns losses with their graphs, which the caller back-propagates. `window_weights` weighs them within their window.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autoaccum._data.nesting import as_leaf, map_tensors
from autoaccum._loss.knowledge import LossKnowledge
from autoaccum._loss.loss_sources import Source, check_loss_reduction, stated_by
from autoaccum._loss.loss_values import TOTAL, Entries, LossValue, describe, loss_value, reported_value
from autoaccum._loss.modes import run_eagerly, without_onednn
from autoaccum._loss.observation import FOUR_BYTES
from autoaccum._loss.sample_check import LossCheck
from autoaccum._loss.sample_choices import MOST_SAMPLES
from autoaccum._loss.summands import ADDED, Reduction
from autoaccum._loss.torch_losses import of_torch
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from autoaccum._data.batches import Window
    from autoaccum._data.pieces import Split
    from autoaccum._loss.calls import Calls
    from autoaccum._loss.modes import Savepoint
    from autoaccum._system.notices import Notices

CALLS_USER_CODE = True  # for own_code.raised_here


class Objective:
    """A model and its loss, evaluated on one micro-batch after another.

    Args:
        calls: Calls them.
        loss_reduction: "mean" or "sum"; None to find it out. A split's `weight` is what a mean runs over, except for
            losses of torch, per-sample losses and pairs.
        notices: Reports choices.

    Attributes:
        calls: As the argument.
        knowledge: What is known of the losses.
        may_repeat_pass: Whether a pass may be repeated with gradients to see which entries of a mapping have one.
        casts_itself: Whether the model, or a closure, enters autocast by itself.
        samples: Samples of the last pass.
        settings: The reduction of a loss of torch, in the current window; None for any other loss.
    """

    def __init__(self, calls: Calls, *, loss_reduction: str | None, notices: Notices) -> None:
        check_loss_reduction(loss_reduction)
        self.calls = calls
        self._notices = notices
        self.may_repeat_pass = True
        self.casts_itself = False
        self.samples = 0
        self.knowledge = LossKnowledge(stated_by(loss_reduction, calls.split))
        self.knowledge.is_models_own = calls.loss is None
        self._most = MOST_SAMPLES  # samples of the next check
        self._gave_no_loss = False  # a pass of the last check
        self._own: list[Any] = []  # the model's outputs in a pass of a check
        self._entries = Entries(notices)
        self._loss_reduction = loss_reduction
        self.settings: Any = None
        self._read_settings()

    @property
    def split(self) -> Split:
        """Counts, cuts and joins batches."""
        return self.calls.split

    @property
    def modules(self) -> list[nn.Module]:
        """All whose buffers and parameters belong to the step."""
        return self.calls.modules

    def values(self, source: Source, batch: Any, samples: int) -> tuple[list[LossValue], Any]:
        """Run one source on one micro-batch.

        Returns:
            The losses with their graphs, and the model's outputs (None for a callable that does not return them).
        """
        self.samples = samples
        raw, outputs = source.run(self.calls, batch)
        self._take_choice()
        if not raw and self.calls.loss is None:
            self._gave_no_loss = True
            return [], outputs
        if len(raw) == 1:  # the usual case
            ((name, value),) = raw.items()
            if isinstance(value, Tensor) and not value.dim() and not value.dtype.is_complex:
                losses = [LossValue(name, value)]
                self.knowledge.note(losses)
                return losses, outputs
        if self.may_repeat_pass and self._entries.needs_graphs(raw, source.total):
            with torch.enable_grad():
                raw, outputs = source.run(self.calls, batch)
        return self._values(raw, samples, source.total), outputs

    def read(self, raw: Any, samples: int) -> list[LossValue]:
        """Return the losses that a loss of a pair has returned."""
        return self._values(raw if isinstance(raw, Mapping) else {TOTAL: raw}, samples, TOTAL)

    def values_of(self, outputs: Any, batch: Any, samples: int) -> list[LossValue]:
        """Return the losses of existing outputs; not for a list of losses, which compute their own.

        Args:
            outputs: The model's outputs.
            batch: The batch that they were computed from, on the device; of a pair only the targets are used.
            samples: Its number of samples.
        """
        raw = self.calls.losses_of(outputs, batch)
        self._take_choice()
        if self.may_repeat_pass and self._entries.needs_graphs(raw, TOTAL):
            with torch.enable_grad():
                raw = self.calls.losses_of(map_tensors(lambda one: as_leaf(one.clone()), outputs), batch)
        return self._values(raw, samples, TOTAL)

    # --- what is known of losses --------------------------------------------------------------------------------------

    @property
    def tries_several(self) -> bool:
        """Whether the next check tries several samples: it has not run out of memory with two."""
        return self._most > 1

    def needs_check(self, window: Window, sizes: Sequence[int], *, is_part: bool, is_due: bool) -> bool:
        """Whether the losses have to be tried on a few samples before a window.

        Args:
            window: The window, or this process's part of it.
            sizes: The micro-batch sizes.
            is_part: Whether it is a part.
            is_due: Whether the window is due for all checks.
        """
        knowledge = self.knowledge
        if knowledge.needs_no_check or (len(sizes) == 1 and not is_part and not window.carries_numbers()):
            return False
        return is_due or not knowledge.is_checked

    def check(
        self,
        window: Window,
        place: Callable[[Any], Any],
        savepoint: Savepoint,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        parameters: Sequence[nn.Parameter] = (),
        *,
        at_most: int = MOST_SAMPLES,
    ) -> None:
        """Try the losses on a few samples of a window, and learn how they weigh samples.

        What forward passes change is as before afterwards. If memory runs out, later calls try half as many.

        Args:
            window: The window.
            place: Moves a batch to the device.
            savepoint: Saves what passes change, which is restored here.
            autocast: Returns the context that the model runs in.
            parameters: The parameters whose gradients are compared.
            at_most: The most samples to try.
        """
        most, self._most, self._gave_no_loss = self._most, self._most // 2, False
        knowledge = self.knowledge
        kind = next((parameter.device.type for parameter in parameters), "cpu")
        casts = self.casts_itself or not isinstance(autocast(), nullcontext) or torch.is_autocast_enabled(kind)
        passes = [functools.partial(self._tried, source) for source in self.calls.sources]
        parameters = [one for one in parameters if one.requires_grad]
        is_in_full = not casts and all(one.itemsize >= FOUR_BYTES for one in parameters)
        # In half precision, PyTorch's own convolutions are far slower.
        kernels = without_onednn() if is_in_full else nullcontext()
        before = savepoint.save(with_attributes=True)
        trial = LossCheck(
            passes, knowledge, place, before, autocast, casts=casts, parameters=parameters, modules=self.modules
        )
        try:
            with run_eagerly(), kernels, torch.enable_grad(), self._noting_own_loss():
                checked = trial.run(window, min(most, at_most))
                found = trial.alone(window) if checked is None else checked
        finally:
            before.restore()
        self._most, knowledge.now.contrasting = most, ((), ())  # which fit
        if not self._gave_no_loss:
            knowledge.learn(found, trial.tried, is_checked=checked is not None, is_complete=trial.is_complete)
        for name in knowledge.of_unlike_divisors():
            self._notices.say(
                f"loss {name!r} adds up terms that are divided by numbers of their own, of which the values are not "
                "known: the gradient is that of the whole batch, and the number that is reported is approximate; "
                "return the terms by name, as {'a': a, 'b': b}, to have each reported"
            )

    @contextmanager
    def _noting_own_loss(self) -> Iterator[None]:
        """Note whether a closure returns the loss that the model has computed, as model(**batch).loss is."""
        if not self.calls.is_closure or isinstance(self.calls.model, torch.jit.ScriptModule):
            yield
            return
        handle = self.calls.model.register_forward_hook(lambda _module, _inputs, outputs: self._own.append(outputs))
        try:
            yield
        finally:
            handle.remove()

    def _tried(self, source: Source, batch: Any, samples: int) -> tuple[list[LossValue], Any]:
        """Run one source in a check, as `values` does."""
        found = self.values(source, batch, samples)
        own = [getattr(outputs, TOTAL, None) for outputs in self._own]
        self._own.clear()
        self.knowledge.is_models_own |= any(loss.value is one for loss in found[0] for one in own)
        return found

    def check_anew(self) -> None:
        """Try as many samples as possible in the next check, since more memory may be there."""
        self._most = MOST_SAMPLES
        self.knowledge.ask_for_check()

    def begin_window(self) -> None:
        """Read the settings of a `torch.nn` loss, which may change from one window to the next."""
        self._read_settings()
        self.knowledge.begin_window()

    def _read_settings(self) -> None:
        """Read the settings of a loss of torch."""
        reduction = None if self.calls.kind is None else getattr(self.calls.loss, "reduction", "mean")
        if reduction == self.settings:
            return
        known, asked = of_torch(self.calls.loss), self._loss_reduction
        if known is not None and asked is not None and (asked == "sum") != (known.reduction is Reduction.SUM):
            raise InvalidInputError(
                f"loss_reduction={asked!r} contradicts the loss, a {self.calls.kind.__name__} with "
                f"reduction={reduction!r}; leave loss_reduction out"
            )
        self.settings = reduction
        self.knowledge.state(TOTAL, known)

    # --- losses -------------------------------------------------------------------------------------------------------

    def _take_choice(self) -> None:
        """Take that the model has computed its own loss, or that one was chosen by the type of its targets."""
        if self.calls.loss is not None:
            return
        chosen, knowledge = self.calls.chosen, self.knowledge
        if chosen is None and knowledge.is_torch_loss:
            knowledge.state(TOTAL, None)
        elif chosen is not None and not knowledge.is_stated:
            knowledge.state(TOTAL, of_torch(chosen))

    def _values(self, raw: Mapping[str, Any], samples: int, total: str) -> list[LossValue]:
        summed = self.knowledge.default is ADDED
        added = self._entries.added(raw, total)
        losses = [loss_value(name, value, samples, summed=summed) for name, value in raw.items() if name in added]
        self.knowledge.note(losses)
        for name, value in raw.items():
            if name in added or value is None:
                continue
            reported = reported_value(name, value, samples, summed=summed)
            if reported is not None:
                losses.append(reported)
                continue
            self._notices.say(
                f"loss {name!r} is {describe(value)}, so it is not reported; return a number, a vector of per-sample "
                "values or a (sum, weight) pair",
                key=f"not reported {name}",
            )
        return losses
