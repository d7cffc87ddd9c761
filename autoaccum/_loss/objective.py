"""Runs a micro-batch through the model and the loss.

Returns losses with their graphs, which the caller back-propagates. `window_weights` weighs them within their window.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autoaccum._arguments import check_function
from autoaccum._data.nesting import as_leaf, map_tensors
from autoaccum._data.splits import ByDefault, check_split
from autoaccum._loss import calling_conventions
from autoaccum._loss.closures import Closure
from autoaccum._loss.default_loss import by_default, check_same_shape, has_classes_last, own_loss
from autoaccum._loss.knowledge import LossKnowledge
from autoaccum._loss.loss_entries import TOTAL, Entries
from autoaccum._loss.loss_sources import Loss, Source, check_loss, check_loss_reduction, sources_of, stated_by
from autoaccum._loss.loss_values import LossValue, describe, is_pair, loss_value, reported_value
from autoaccum._loss.modes import quiet_training, run_eagerly, without_onednn
from autoaccum._loss.observation import FOUR_BYTES
from autoaccum._loss.sample_check import LossCheck
from autoaccum._loss.sample_choices import MOST_SAMPLES
from autoaccum._loss.summands import ADDED, Reduction
from autoaccum._loss.torch_losses import ELEMENTWISE, kind_of, of_torch
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from autoaccum._data.batches import Window
    from autoaccum._data.pieces import Split
    from autoaccum._loss.modes import Mark
    from autoaccum._system.notices import Notices

CALLS_USER_CODE = True  # for own_code.raised_here

# For recognising (inputs, targets) as `is_pair` does, inlined because it is done for every micro-batch.
_PAIRS, _PAIR = (tuple, list), 2


class _NoLossError(InvalidInputError):
    """A model returned no loss, and none can be chosen."""


class Objective:
    """A model and its loss, evaluated on one micro-batch after another.

    Args:
        model: Called with a pair's first half, a mapping's items, or the batch itself.
        loss: A callable of (outputs, targets) or (outputs, batch); a list of callables of (model, batch), each with a
            forward pass of its own; None for the model's own loss or one chosen by the targets' type.
        forward: A callable of (model, batch) that returns the outputs, replacing the conventions.
        loss_reduction: "mean" or "sum"; None to find it out.
        notices: Reports choices.
        split: Counts, cuts and joins batches; None where samples run along the first dimension. Its `weight` is what a
            mean runs over, except for losses of torch, per-sample losses and pairs.
        further: Modules beside the model that the loss uses, whose buffers and parameters belong to the step too.

    Attributes:
        loss: As the argument.
        split: As the argument.
        knowledge: What is known of the losses.
        may_lack_loss: Whether a pass may give no loss, as in an evaluation by metrics alone.
        may_repeat_pass: Whether a pass may be repeated with gradients to see which entries of a mapping have one.
        takes_pairs: Whether a pair (inputs, targets) simply becomes loss(model(inputs), targets).
        casts_itself: Whether the model, or a closure, enters autocast by itself.
        gave_number: Whether the last pass returned a single number.
        samples: Samples of the last pass.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Sequence[Loss] | None,
        *,
        forward: Callable[[nn.Module, Any], Any] | None,
        loss_reduction: str | None,
        notices: Notices,
        split: Split | None = None,
        further: Sequence[nn.Module] = (),
    ) -> None:
        check_loss_reduction(loss_reduction)
        check_loss(loss)
        check_split(split)
        if forward is not None:
            check_function("forward", forward, "model, batch")
        self.model = model
        self.split = ByDefault() if split is None else split
        self.loss = loss
        self._further = [module for module in further if module is not model]
        self._forward = forward
        self._notices = notices
        self._accepted = _accepted_names(model)
        self.may_repeat_pass, self.may_lack_loss = True, False
        self.casts_itself = False
        self.gave_number = False
        self.samples = 0
        self._chosen_in: bool | None = None  # the mode of the model when a loss was chosen by its outputs
        self.knowledge = LossKnowledge(stated_by(loss_reduction, split))
        self.knowledge.is_models_own = loss is None
        self._most = MOST_SAMPLES  # samples of the next check
        self._gave_no_loss = False  # a pass of the last check
        self._own: list[Any] = []  # the model's outputs in a pass of a check
        self._losses: Sequence[Any] = loss if isinstance(loss, list | tuple) else [loss]
        is_list = self._losses is loss
        self.sources = sources_of(self._losses) if is_list else [Source(Objective._forward_and_loss)]
        self._kind = kind_of(loss)
        # Whether the loss is a function of outputs, so that it can be called on some of their rows alone.
        self.takes_outputs = loss is not None and not is_list
        # Whether a pass gives outputs beside the loss: the model's, or those that a closure returns.
        self.gives_outputs = not is_list or isinstance(self._losses[0], Closure)
        self.takes_pairs = self._forward is None and self.takes_outputs
        self._entries = Entries(notices)
        self._loss_reduction = loss_reduction
        self._settings: Any = None
        self._read_settings()

    @property
    def modules(self) -> list[nn.Module]:
        """The model, losses that are modules, and further ones: all whose buffers and parameters belong to the step."""
        return [self.model, *(loss for loss in self._losses if isinstance(loss, nn.Module)), *self._further]

    @property
    def functions(self) -> list[Any]:
        """The functions of the user's that run in a pass, or join a micro-batch."""
        losses = [loss.function if isinstance(loss, Closure) else loss for loss in self._losses]
        return [one for one in (*losses, self._forward, self.split) if one is not None]

    def values(self, source: Source, batch: Any, samples: int) -> tuple[list[LossValue], Any]:
        """Run one source on one micro-batch.

        Returns:
            The losses with their graphs, and the model's outputs (None for a callable that does not return them).
        """
        self.samples = samples
        raw, outputs = source.run(self, batch)
        if not raw and self.loss is None:
            self._gave_no_loss = True
            return [], outputs
        value: Any
        name, value = next(iter(raw.items())) if len(raw) == 1 else ("", None)
        self.gave_number = isinstance(value, Tensor) and value.dim() == 0
        if self.gave_number and not value.dtype.is_complex:  # the usual case
            return self._noted([LossValue(name, value)]), outputs
        if self.may_repeat_pass and self._entries.needs_graphs(raw, source.total):
            with torch.enable_grad():
                raw, outputs = source.run(self, batch)
        return self._values(raw, samples, source.total), outputs

    def number_of(self, batch: Any) -> Any:
        """Run the only source on one micro-batch, and return its only loss as it is."""
        if self.takes_pairs and isinstance(batch, _PAIRS) and len(batch) == _PAIR:
            return self.loss(self.model(batch[0]), batch[1])  # type: ignore[operator,misc]
        raw = self.sources[0].run(self, batch)[0]
        return next(iter(raw.values())) if len(raw) == 1 else raw

    def outputs(self, batch: Any) -> Any:
        """Return the model's outputs for a batch, without its loss."""
        return self._by_convention(batch) if self._forward is None else self._forward(self.model, batch)

    def values_of(self, outputs: Any, batch: Any, samples: int) -> list[LossValue]:
        """Return the losses of existing outputs; not for a list of losses, which compute their own.

        Args:
            outputs: The model's outputs.
            batch: The batch that they were computed from, on the device; of a pair only the targets are used.
            samples: Its number of samples.
        """
        raw = self._losses_of(outputs, batch)
        if self.may_repeat_pass and self._entries.needs_graphs(raw, TOTAL):
            with torch.enable_grad():
                raw = self._losses_of(map_tensors(lambda one: as_leaf(one.clone()), outputs), batch)
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
        mark: Mark,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        parameters: Sequence[nn.Parameter] = (),
        *,
        at_most: int = MOST_SAMPLES,
        larger: int = 0,
    ) -> None:
        """Try the losses on a few samples of a window, and learn how they weigh samples.

        What forward passes change is as before afterwards. If memory runs out, later calls try half as many.

        Args:
            window: The window.
            place: Moves a batch to the device.
            mark: Taken and restored here.
            autocast: Returns the context that the model runs in.
            parameters: The parameters whose gradients are compared.
            at_most: The most samples to try.
            larger: The most to try where nothing counts in those.
        """
        most, self._most, self._gave_no_loss = self._most, self._most // 2, False
        knowledge, modules = self.knowledge, self.modules
        kind = next((parameter.device.type for parameter in parameters), "cpu")
        casts = self.casts_itself or not isinstance(autocast(), nullcontext) or torch.is_autocast_enabled(kind)
        passes = [functools.partial(self._tried, source) for source in self.sources]
        parameters = [one for one in parameters if one.requires_grad]
        is_in_full = not casts and all(one.itemsize >= FOUR_BYTES for one in parameters)
        # In half precision, PyTorch's own convolutions are far slower.
        kernels = without_onednn() if is_in_full else nullcontext()
        trial = LossCheck(passes, knowledge, place, mark, autocast, casts=casts, parameters=parameters)
        trial.tells_of_state = any(module.training for module in modules)
        mark.take(with_attributes=True)
        try:
            with run_eagerly(), kernels, torch.enable_grad(), quiet_training(modules), self._notingown_loss():
                checked = trial.run(window, min(most, at_most), larger)
                found = trial.alone(window) if checked is None else checked
        finally:
            mark.restore()
        self._most = most  # which fit
        if not self._gave_no_loss:
            knowledge.learn(found, is_checked=checked is not None, is_complete=trial.is_complete)

    @contextmanager
    def _notingown_loss(self) -> Iterator[None]:
        """Note whether a closure returns the loss that the model has computed, as model(**batch).loss is."""
        if not isinstance(self._losses[0], Closure) or isinstance(self.model, torch.jit.ScriptModule):
            yield
            return
        handle = self.model.register_forward_hook(lambda _module, _inputs, outputs: self._own.append(outputs))
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
        self._most, self.knowledge.is_checked = MOST_SAMPLES, False

    def begin_window(self) -> None:
        """Read the settings of a `torch.nn` loss, which may change from one window to the next."""
        self._read_settings()
        self.knowledge.begin_window()

    def settings(self) -> tuple[Any, ...]:
        """Return the settings of a loss of torch, and how losses weigh samples, to be compared with later ones."""
        return self._reduction(), dict(self.knowledge.summands)

    def _reduction(self) -> Any:
        return None if self._kind is None else getattr(self.loss, "reduction", "mean")

    def _read_settings(self) -> None:
        """Read the settings of a loss of torch."""
        reduction = self._reduction()
        if reduction == self._settings:
            return
        self._settings = reduction
        known, asked = of_torch(self.loss), self._loss_reduction
        if known is not None and asked is not None and (asked == "sum") != (known.reduction is Reduction.SUM):
            raise InvalidInputError(
                f"loss_reduction={asked!r} contradicts the loss, a {self._kind.__name__} with "
                f"reduction={reduction!r}; leave loss_reduction out"
            )
        self.knowledge.state(TOTAL, known)

    # --- calling the model and the loss -------------------------------------------------------------------------------

    def _forward_and_loss(self, batch: Any) -> tuple[dict[str, Any], Any]:
        outputs = self._by_convention(batch) if self._forward is None else self._forward(self.model, batch)
        return self._losses_of(outputs, batch), outputs

    def _losses_of(self, outputs: Any, batch: Any) -> dict[str, Any]:
        if self.loss is None:
            try:
                raw = self._own_or_default(outputs, batch)
            except _NoLossError:
                if not self.may_lack_loss:
                    raise
                return {}
        elif isinstance(batch, _PAIRS) and len(batch) == _PAIR:
            if self._kind in ELEMENTWISE:
                check_same_shape(outputs, batch[1], self._kind.__name__)
            try:
                raw = self._called(outputs, batch[1])
            except (ValueError, RuntimeError) as error:
                if self._kind is nn.CrossEntropyLoss and has_classes_last(outputs, batch[1]):
                    raise InvalidInputError(
                        f"CrossEntropyLoss takes outputs of shape (N, C, ...), and got {tuple(outputs.shape)} for "
                        f"targets of shape {tuple(batch[1].shape)}: the classes seem to be last. Move them, "
                        "forward=lambda model, batch: model(batch[0]).movedim(-1, 1), or pass no loss=, which takes "
                        "both"
                    ) from error
                raise
        elif self._kind is not None:
            raise InvalidInputError(
                f"{self._kind.__name__} needs targets, but a batch of type {type(batch).__name__} is not an "
                "(inputs, targets) pair; pass loss=lambda outputs, batch: ... to select them"
            )
        else:
            raw = self._called(outputs, batch)
        # Asking whether a tensor is a Mapping is slow.
        return {TOTAL: raw} if isinstance(raw, Tensor) or not isinstance(raw, Mapping) else dict(raw)

    def _noted(self, losses: list[LossValue]) -> list[LossValue]:
        self.knowledge.note(losses)
        return losses

    def _values(self, raw: Mapping[str, Any], samples: int, total: str) -> list[LossValue]:
        summed = self.knowledge.default is ADDED
        added = self._entries.added(raw, total)
        losses = [loss_value(name, value, samples, summed=summed) for name, value in raw.items() if name in added]
        self.knowledge.note(losses)
        for name, value in raw.items():
            if name in added:
                continue
            self.knowledge.forget(name)  # it may have been taken for a loss
            if value is None:
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

    def _called(self, outputs: Any, targets: Any) -> Any:
        try:
            return self.loss(outputs, targets)  # type: ignore[operator,misc]
        except TypeError as error:
            calling_conventions.explain_single(error, self._losses[0], outputs)
            raise

    def _own_or_default(self, outputs: Any, batch: Any) -> Any:
        own = own_loss(outputs)
        if own is not None:
            self._notices.choose("the model's own loss", "loss=")
            if self.knowledge.is_torch_loss:
                is_one = isinstance(own, Tensor) and is_pair(batch) and getattr(batch[1], "shape", ())[:1] == (1,)
                if is_one and self._chosen_in is self.model.training:
                    raise InvalidInputError(
                        "the model returned outputs for several samples, and a single number for a micro-batch of 1, "
                        "which would be its own loss; use squeeze(-1) for squeeze(), or pass loss= or micro_batch=2"
                    )
                self.knowledge.state(TOTAL, None)
            return own
        if not is_pair(batch):
            got = f"a batch of type {type(batch).__name__} is not an (inputs, targets) pair"
            what = "pass loss=, or targets (labels) to the model"
            if isinstance(batch, Tensor):
                got = "the loader yields tensors, not (inputs, targets) pairs"
                what = "pass loss=, or a DataLoader of a TensorDataset(inputs, targets)"
            raise self._no_loss(
                f"no loss: the model returned {describe(outputs)}, which contains none, and {got}; {what}"
            )
        targets = batch[1]
        if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or targets.dtype is torch.bool:
            own = "forward=lambda model, batch: model(*batch) if the model computes its loss from inputs and targets"
            if self._forward is not None:
                own = "let forward= return the loss that the model computes"
            said = f"no loss can be chosen for outputs {describe(outputs)} and targets {describe(targets)}"
            raise self._no_loss(f"{said}; pass loss=, or {own}")
        loss, value = by_default(outputs, targets)
        if not self.knowledge.is_stated:
            self.knowledge.state(TOTAL, of_torch(loss))
            self._chosen_in = self.model.training
        self._notices.choose(f"{loss.__name__} for {targets.dtype} targets", "loss=")
        return value

    def _no_loss(self, said: str) -> _NoLossError:
        """Return the error for a model that returns no loss."""
        also = "" if self.model.training else ". A model without one in evaluation mode is evaluated by fit's metrics="
        return _NoLossError(f"{said}{also}")

    def _by_convention(self, batch: Any) -> Any:
        model = self.model
        inputs: list[Any] = [batch]
        entries: dict[str, Any] = {}
        if isinstance(batch, _PAIRS) and len(batch) == _PAIR:
            inputs = [batch[0]]
        elif isinstance(batch, Mapping):
            accepted = None if self.loss is None else self._accepted
            inputs, entries = [], {name: batch[name] for name in batch if accepted is None or name in accepted}
        try:
            return model(*inputs, **entries)
        except (AttributeError, TypeError) as error:
            calling_conventions.explain_model(error, model, batch, inputs, entries)
            raise


def _accepted_names(model: nn.Module) -> set[str] | None:
    """Return the keyword arguments that the model accepts; None if it accepts any."""
    if isinstance(model, torch.jit.ScriptModule):  # which has no signature
        return {argument.name for argument in model.forward.schema.arguments}  # type: ignore[attr-defined]
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}
