"""Computes a language model's logits and their cross entropy in chunks of tokens, so that they are never whole.

The head returns `Logits`, which stand for its results and remember how they come about (`logits_recipe`). A cross
entropy of them is computed chunk by chunk, and again in the backward pass (`logits_answers`). Whatever else is asked of
them, they become the tensor that they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum._engine.logits_answers import ANSWERS, IN_PLACE, answered, getter
from autoaccum._engine.logits_recipe import HeadCall, Recipe
from autoaccum.errors import SavingRefusedError

# The most tokens computed at once: more take more memory, and are no faster.
CHUNK = 1024
# A micro-batch of fewer tokens than four chunks is computed in four parts, but of no fewer tokens than these: fewer
# cost more time, since kernels become small, and the head's weight is read for each.
_LEAST, _PARTS = 256, 4
_BATCHED = 2
# Operators that change what is left of them.
_WRITING = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or"))
# What would wait for the gradient of a tensor that nothing else is computed from.
_ON_GRADIENTS = frozenset({Tensor.register_hook, Tensor.retain_grad})
# What asks for their form alone.
_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "requires_grad",
    "ndim",
    "layout",
    "is_sparse",
    "is_cuda",
    "grad_fn",
    "is_leaf",
)
_OF_FORM = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex),
    *map(getter, _PROPERTIES),
}


class Logits(Tensor):
    """The results of a head that have not been computed."""

    _recipe: Recipe

    @staticmethod
    def of(recipe: Recipe) -> Logits:
        """Return the logits of a recipe."""
        if not torch.is_grad_enabled():
            recipe = recipe.without_grad()
        made = Tensor._make_wrapper_subclass(
            Logits, recipe.shape, dtype=recipe.dtype, device=recipe.hidden.device, requires_grad=recipe.requires_grad
        )
        made._recipe = recipe
        if recipe.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        assert isinstance(made, Logits)
        return made

    @property
    def recipe(self) -> Recipe:
        """How they come about; raises `SavingRefusedError` where that has changed since."""
        self._recipe.check()
        return self._recipe

    def written(self, function: Any, *arguments: Any, **named: Any) -> Logits:
        """Change them in place as a function does, where it is answered without computing them.

        Raises:
            SavingRefusedError: It is not.
        """
        answer, before = IN_PLACE.get(function), self.recipe
        is_apart = before.requires_grad and not torch.is_grad_enabled()
        found = NotImplemented
        if answer is not None and not is_apart:
            found = answered(answer, function.__name__, before, arguments, named)
        if not isinstance(found, Recipe):
            raise SavingRefusedError(
                f"memory='chunked_loss': the loss changes logits in place ({function.__name__}), and they are not "
                "computed yet; write it without changing them, as in logits = logits.masked_fill(...)"
            )
        self._recipe = found.in_place_of(before)
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Logits(shape={tuple(self.shape)}, not computed)"

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what can be answered without computing them, and compute them for the rest."""
        named = named or {}
        if arguments and isinstance(arguments[0], Logits) and _writes(function):
            return arguments[0].written(function, *arguments[1:], **named)
        if function in _ON_GRADIENTS:
            raise SavingRefusedError(
                f"memory='chunked_loss': {function.__name__} asks for the gradient of logits that are never whole; put "
                "it on the head's inputs, or leave 'chunked_loss' out"
            )
        answer = ANSWERS.get(function)
        if answer is not None and arguments and isinstance(arguments[0], Logits):
            found = answered(answer, function.__name__, arguments[0].recipe, arguments[1:], named)
            if found is not NotImplemented:
                return arguments[0] if found is None else _as_logits(found)
        if function in _OF_FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **named)
        return function(*_all_computed(arguments, function), **_all_computed(named, function))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Any,
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute them for what was not seen above."""
        return function(*_all_computed(arguments, function), **_all_computed(named or {}, function))


def _refuse_gradient(gradient: Tensor) -> None:  # noqa: ARG001 - as hooks have it
    """Refuse the gradient of what was computed of their numbers alone, which leads nowhere.

    Raises:
        SavingRefusedError: Always.
    """
    raise SavingRefusedError(
        "memory='chunked_loss': the loss takes logits, which are not computed yet, by a way that does not ask them "
        "(torch.autograd.Function, torch.func, torch.jit, reentrant checkpoints); compute them before, as in "
        "logits = logits + 0, or leave 'chunked_loss' out"
    )


def _as_logits(found: Any) -> Any:
    if isinstance(found, Recipe):
        return Logits.of(found)
    if isinstance(found, tuple):
        return tuple(map(Logits.of, found))
    return map(Logits.of, found) if isinstance(found, Iterator) else found


def _writes(function: Any) -> bool:
    """Whether a function changes its first argument in place, by its name."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or name in _WRITING
    return name.endswith("_") and name != "requires_grad_"


def _all_computed(values: Any, function: Any) -> Any:
    if isinstance(values, Logits):
        if torch.is_grad_enabled():
            values.recipe.head.say(getattr(function, "__name__", str(function)))
        return values.recipe.whole()
    if isinstance(values, list | tuple) and not hasattr(values, "_fields"):
        return type(values)(_all_computed(one, function) for one in values)
    if isinstance(values, Mapping):
        return {name: _all_computed(one, function) for name, one in values.items()}
    return values


def logits_of(
    say: Callable[[str], None], most: int, head: nn.Module, forward: Callable[..., Any], hidden: Tensor
) -> Tensor:
    """Return the logits of a head without computing them; takes the place of its forward, which makes them later.

    Args:
        say: Reports to the user what has to be computed whole.
        most: The most tokens to compute at once.
        head: The layer.
        forward: Its own forward.
        hidden: Its inputs, shape (..., features).
    """
    if hidden.dim() < _BATCHED:
        found: Tensor = forward(hidden)
        return found
    tokens = hidden.numel() // hidden.shape[-1] if hidden.shape[-1] else 0
    size = min(most, max(-(-tokens // _PARTS), _LEAST))
    call = HeadCall(head, forward, hidden, classes=_classes_of(head, forward, hidden), size=size, say=say)
    return Logits.of(Recipe.of(call, hidden))


def _classes_of(head: nn.Module, forward: Callable[..., Any], hidden: Tensor) -> int:
    """Return the number of classes that a head makes; where it has none to say, of one token."""
    classes = getattr(head, "out_features", None)
    if isinstance(classes, int):
        return classes
    with torch.no_grad(), torch.random.fork_rng(devices=[hidden.device] if hidden.is_cuda else []):
        return int(forward(hidden.reshape(-1, hidden.shape[-1])[:1]).shape[-1])
