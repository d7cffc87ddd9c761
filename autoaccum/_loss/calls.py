"""Calls the model and the loss on a micro-batch, by the conventions for what a batch and a loss are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autoaccum._arguments import check_function
from autoaccum._data.splits import ByDefault, check_split
from autoaccum._loss import calling_conventions
from autoaccum._loss.closures import Closure
from autoaccum._loss.loss_sources import Loss, Source, check_loss, sources_of
from autoaccum._loss.loss_values import TOTAL, describe, is_pair
from autoaccum._loss.torch_losses import ELEMENTWISE, by_default, check_same_shape, has_classes_last, kind_of, own_loss
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._data.pieces import Split
    from autoaccum._system.notices import Notices

CALLS_USER_CODE = True  # for own_code.raised_here

# For recognising (inputs, targets) as `is_pair` does, inlined because it is done for every micro-batch.
_PAIRS, _PAIR = (tuple, list), 2


class _NoLossError(InvalidInputError):
    """A model returned no loss, and none can be chosen."""


class Calls:
    """A model and its loss, called on one micro-batch after another.

    Args:
        model: Called with a pair's first half, a mapping's items, or the batch itself.
        loss: A callable of (outputs, targets) or (outputs, batch); a list of callables of (model, batch), each with a
            forward pass of its own; None for the model's own loss or one chosen by the targets' type.
        forward: A callable of (model, batch) that returns the outputs, replacing the conventions.
        notices: Reports choices.
        split: Counts, cuts and joins batches; None where samples run along the first dimension.
        further: Modules beside the model that the loss uses, whose buffers and parameters belong to the step too.

    Attributes:
        model: As the argument.
        loss: As the argument.
        split: As the argument.
        sources: The forward passes, each with its losses.
        kind: A loss of torch, as `kind_of` gives it.
        chosen: The function that was chosen as the loss, by the last pass; None for none.
        takes_outputs: Whether the loss is a function of outputs, so that it can be called on some of their rows alone.
        takes_pairs: Whether a pair (inputs, targets) simply becomes loss(model(inputs), targets).
        may_lack_loss: Whether a pass may give no loss, as in an evaluation by metrics alone.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Sequence[Loss] | None,
        *,
        forward: Callable[[nn.Module, Any], Any] | None,
        notices: Notices,
        split: Split | None = None,
        further: Sequence[nn.Module] = (),
    ) -> None:
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
        self._losses: Sequence[Any] = loss if isinstance(loss, list | tuple) else [loss]
        is_list = self._losses is loss
        self.sources = sources_of(self._losses) if is_list else [Source(Calls._forward_and_loss)]
        self.kind = kind_of(loss)
        self.takes_outputs = loss is not None and not is_list
        self.takes_pairs = forward is None and self.takes_outputs
        self.may_lack_loss = False
        self.chosen: Callable[..., Any] | None = None
        self._chosen_in: bool | None = None  # the mode of the model when a loss was chosen by its outputs

    @property
    def modules(self) -> list[nn.Module]:
        """The model, losses that are modules, and further ones: all whose buffers and parameters belong to the step."""
        return [self.model, *(loss for loss in self._losses if isinstance(loss, nn.Module)), *self._further]

    @property
    def functions(self) -> list[Any]:
        """The functions of the user's that run in a pass, or join a micro-batch."""
        losses = [loss.function if isinstance(loss, Closure) else loss for loss in self._losses]
        return [one for one in (*losses, self._forward, self.split) if one is not None]

    @property
    def is_closure(self) -> bool:
        """Whether the loss is a function of a micro-batch alone."""
        return isinstance(self._losses[0], Closure)

    @property
    def gives_outputs(self) -> bool:
        """Whether a pass gives outputs beside the loss: the model's, or those that a closure returns."""
        return self._losses is not self.loss or self.is_closure

    def outputs(self, batch: Any) -> Any:
        """Return the model's outputs for a batch, without its loss."""
        return self._by_convention(batch) if self._forward is None else self._forward(self.model, batch)

    def _forward_and_loss(self, batch: Any) -> tuple[dict[str, Any], Any]:
        outputs = self.outputs(batch)
        return self.losses_of(outputs, batch), outputs

    def of_pair(self, batch: Any, _samples: int) -> Any:
        """Return loss(model(inputs), targets) as it is, for a pair."""
        return self.loss(self.model(batch[0]), batch[1])  # type: ignore[operator,misc]

    def losses_of(self, outputs: Any, batch: Any) -> dict[str, Any]:
        """Return the losses of existing outputs, raw, by name; not for a list of losses, which compute their own."""
        if self.loss is None:
            try:
                raw = self._own_or_default(outputs, batch)
            except _NoLossError:
                if not self.may_lack_loss:
                    raise
                return {}
        else:
            is_of_two = isinstance(batch, _PAIRS) and len(batch) == _PAIR
            if self.kind is not None:
                self._check_torch(outputs, batch, is_pair=is_of_two)
            try:
                raw = self.loss(outputs, batch[1] if is_of_two else batch)  # type: ignore[operator]
            except TypeError as error:
                calling_conventions.explain_single(error, self._losses[0], outputs)
                raise
            except (ValueError, RuntimeError) as error:
                if self.kind is nn.CrossEntropyLoss and has_classes_last(outputs, batch[1]):
                    raise InvalidInputError(
                        f"CrossEntropyLoss takes outputs of shape (N, C, ...), and got {tuple(outputs.shape)} for "
                        f"targets of shape {tuple(batch[1].shape)}: the classes seem to be last. Move them, "
                        "forward=lambda model, batch: model(batch[0]).movedim(-1, 1), or pass no loss=, which takes "
                        "both"
                    ) from error
                raise
        # Asking whether a tensor is a Mapping is slow.
        return {TOTAL: raw} if isinstance(raw, Tensor) or not isinstance(raw, Mapping) else dict(raw)

    def _check_torch(self, outputs: Any, batch: Any, *, is_pair: bool) -> None:
        """Check what a loss of torch is to be called with."""
        if not is_pair:
            raise InvalidInputError(
                f"{self.kind.__name__} needs targets, but a batch of type {type(batch).__name__} is not an "
                "(inputs, targets) pair; pass loss=lambda outputs, batch: ... to select them"
            )
        if self.kind in ELEMENTWISE:
            check_same_shape(outputs, batch[1], self.kind.__name__)

    def _own_or_default(self, outputs: Any, batch: Any) -> Any:
        own = own_loss(outputs)
        if own is not None:
            self._notices.choose("the model's own loss", "loss=")
            if self.chosen is not None:
                is_one = isinstance(own, Tensor) and is_pair(batch) and getattr(batch[1], "shape", ())[:1] == (1,)
                if is_one and self._chosen_in is self.model.training:
                    raise InvalidInputError(
                        "the model returned outputs for several samples, and a single number for a micro-batch of 1, "
                        "which would be its own loss; use squeeze(-1) for squeeze(), or pass loss= or micro_batch=2"
                    )
                self.chosen = None
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
        if self.chosen is None:
            self._chosen_in = self.model.training
        self.chosen = loss
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
