"""Lets the cross entropy that a Transformers model computes of its logits be computed in chunks of tokens.

While a gradient is computed, the layer that makes the logits returns `UnmadeLogits`. What models do between that layer
and their loss (a soft cap, a scale, a cast, a shift by one token, a view) is noted and done chunk by chunk, and
`cross_entropy` computes the loss. Everything else is refused: nobody can take them for logits.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum._saving.chunked_loss import CHUNK, chunked_cross_entropy
from autoaccum._saving.replaced_forward import are_compiled, forward_replaced
from autoaccum.errors import SavingRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_ROWS = 2  # dimensions of logits that cross entropy takes


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "grad_fn", "is_leaf")
_OF_FORM = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex),
    *map(_getter, _PROPERTIES),
}
_CASTS = {Tensor.float, Tensor.double, Tensor.to}
# Of every logit by itself, with numbers.
_OF_EACH = {
    *(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, Tensor.div, Tensor.__truediv__, torch.div),
    *(Tensor.tanh, torch.tanh, *_CASTS),
}
# These exchange tokens and classes, as cross entropy takes them of sequences.
_EXCHANGES = {Tensor.transpose, Tensor.permute, torch.transpose, torch.permute, _getter("mT")}
_OF_ROWS = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.contiguous}


_NOTED = {*_OF_EACH, *_EXCHANGES, *_OF_ROWS, Tensor.__getitem__}


class _Step(NamedTuple):
    function: Any
    arguments: Sequence[Any]
    named: dict[str, Any]

    def of(self, logits: Tensor) -> Tensor:
        found: Tensor = self.function(logits, *self.arguments, **self.named)
        return found


class _Recipe(NamedTuple):
    """How logits would be made: of hidden states, shape (..., features), by a head's forward, and steps after it."""

    head: nn.Module
    held: Sequence[Tensor]  # its parameters
    forward: Callable[[Tensor], Tensor]
    hidden: Tensor
    steps: tuple[_Step, ...] = ()
    has_classes_second: bool = False

    def made(self, hidden: Tensor) -> Tensor:
        """Return the logits of some hidden states."""
        logits = self.forward(hidden)
        for step in self.steps:
            logits = step.of(logits)
        return logits


class UnmadeLogits(Tensor):
    """Stands for logits that are never made."""

    _recipe: _Recipe

    @staticmethod
    def of(recipe: _Recipe, form: Tensor) -> UnmadeLogits:
        """Return what stands for logits; `form` has their shape and type, and is on the meta device."""
        device = recipe.hidden.device
        made: Any = Tensor._make_wrapper_subclass(UnmadeLogits, form.shape, dtype=form.dtype, device=device)
        made._recipe = recipe
        return made  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"UnmadeLogits(shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Note or compute what can be; refuse the rest."""
        logits, rest, named = arguments[0] if arguments else None, arguments[1:], named or {}
        if function in _OF_FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **named)
        found = None
        if isinstance(logits, UnmadeLogits):
            if function is functional.cross_entropy:
                found = logits._loss(*rest, **named)
            elif function in _NOTED and not any(isinstance(value, Tensor) for value in (*rest, *named.values())):
                found = logits._noted(_Step(function, rest, named))
        if found is None:
            raise _refusal(function)
        return found

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Refuse what was not seen above."""
        raise _refusal(function)

    def _noted(self, step: _Step) -> UnmadeLogits | None:
        """Return what stands for these logits after a step; None if the step needs them."""
        with torch._C.DisableTorchFunctionSubclass():
            before = torch.empty(self.shape, dtype=self.dtype, device="meta")
        form, recipe = step.of(before), self._recipe
        if form.device != before.device:
            return None
        if step.function in _OF_EACH:
            return UnmadeLogits.of(recipe._replace(steps=(*recipe.steps, step)), form)
        if recipe.has_classes_second:
            return None
        if step.function in _EXCHANGES:
            is_of_last = before.dim() == _ROWS + 1 and (form.shape, form.stride()) == (
                before.mT.shape,
                before.mT.stride(),
            )
            return UnmadeLogits.of(recipe._replace(has_classes_second=True), form) if is_of_last else None
        hidden = _rows(step, recipe.hidden, form) if form.dim() and form.shape[-1] == before.shape[-1] else None
        return None if hidden is None else UnmadeLogits.of(recipe._replace(hidden=hidden), form)

    def _loss(
        self,
        labels: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        """Return the cross entropy, for the arguments of `functional.cross_entropy`; None if it needs the logits."""
        recipe = self._recipe
        is_of_rows = self.dim() == _ROWS + recipe.has_classes_second and labels.shape == recipe.hidden.shape[:-1]
        if not is_of_rows or labels.is_floating_point() or size_average is not None or reduce is not None:
            return None
        is_cast = all(step.function in _CASTS for step in recipe.steps) and self.dtype is not torch.float64
        return chunked_cross_entropy(
            recipe.made,
            recipe.head,
            recipe.hidden,
            labels,
            held=recipe.held,
            is_alone=is_cast,
            asked="save_memory='chunked_loss'",
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )


def _rows(step: _Step, hidden: Tensor, form: Tensor) -> Tensor | None:
    """Return the hidden states of the tokens that a view or slices leave; None if it is not of whole tokens."""
    shape = (*form.shape[:-1], hidden.shape[-1])
    if step.function is not Tensor.__getitem__:
        return hidden.reshape(shape)
    (key,) = step.arguments
    if not all(one is Ellipsis or isinstance(one, slice) for one in (key if isinstance(key, tuple) else [key])):
        return None
    taken = hidden[key]
    return taken if taken.shape == shape else None


def _refusal(function: Any) -> SavingRefusedError:
    return SavingRefusedError(
        f"save_memory='chunked_loss': {getattr(function, '__name__', function)} is computed of logits that are never "
        "made; cross_entropy of them, by rows of tokens, is possible, after numbers, tanh, casts and slices of "
        "tokens. Leave 'chunked_loss' out, or compute the loss of hidden states by autoaccum.ChunkedLoss(head)"
    )


@contextmanager
def chunked(modules: Sequence[nn.Module]) -> Iterator[str]:
    """Compute the loss of Transformers' models in chunks of tokens, wherever a gradient is computed.

    Yields:
        What is computed in chunks; empty if no module tells which layer makes its logits, or the model is compiled.
    """
    with ExitStack() as changed:
        heads = [] if are_compiled(modules) else find_heads(modules)
        for head in heads:
            changed.enter_context(forward_replaced(head, functools.partial(_unmade, head)))
        sizes = ", ".join(f"{head.out_features:,}" for head in heads)
        yield f"the loss over {sizes} classes is computed at most {CHUNK:,} tokens at a time" if heads else ""


def find_heads(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the layers that make logits of Transformers' models, also where PEFT has put others around them."""
    found: list[Any] = []
    for part in (part for module in modules for part in module.modules()):
        asked = getattr(part, "get_output_embeddings", None)
        head = asked() if callable(asked) else None
        if isinstance(head, nn.Module) and isinstance(getattr(head, "out_features", None), int):
            found.append(head)
    return list(dict.fromkeys(found))


def _unmade(head: Any, forward: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    """Return what stands for a head's logits; the logits where no gradient is computed."""
    if not torch.is_grad_enabled() or hidden.dim() < _ROWS:
        return forward(hidden)
    kind = hidden.device.type
    is_cast, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def make(rows: Tensor) -> Tensor:  # as here, wherever the loss is computed
        with torch.autocast(kind, dtype=dtype, enabled=is_cast):
            return forward(rows)

    form = torch.empty(*hidden.shape[:-1], head.out_features, dtype=dtype if is_cast else hidden.dtype, device="meta")
    return UnmadeLogits.of(_Recipe(head, list(head.parameters()), make, hidden), form)
