"""Answers what a loss does to logits that are not computed: by another recipe, or by computing them in chunks.

An answer takes a recipe and the further arguments of the function. It returns a recipe or several, a tensor, None for
the same logits, or NotImplemented where they have to be computed whole.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from autoaccum._engine.logits_recipe import unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from autoaccum._engine.logits_recipe import Recipe

_FLAT, _WITH_ROWS = 2, 3
# How arguments are called that may be passed by name or in this order.
_NAMES = {
    **dict.fromkeys(("transpose", "swapdims"), ("dim0", "dim1")),
    "swapaxes": ("axis0", "axis1"),
    "movedim": ("source", "destination"),
    "permute": ("dims",),
    "view": ("size",),
    "reshape": ("shape",),
    "mul": ("other",),
    "div": ("other",),
}


def answered(answer: Callable[..., Any], name: str, recipe: Recipe, arguments: Any, named: Mapping[str, Any]) -> Any:
    """Return what an answer says to a function called by name, with its arguments in place or by name."""
    if named:
        order = _NAMES.get(name, ())[len(arguments) :]
        if order and set(order) == set(named):
            arguments, named = (*arguments, *(named[each] for each in order)), {}
        try:
            _signature(answer).bind(recipe, *arguments, **named)
        except TypeError:
            return NotImplemented
    return answer(recipe, *arguments, **named)


@functools.lru_cache(maxsize=64)
def _signature(answer: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(answer)


def _scaled(function: Callable[[Tensor, Any], Tensor]) -> Callable[..., Any]:
    def answer(recipe: Recipe, other: Any, **named: Any) -> Any:
        is_scalar = isinstance(other, Tensor) and other.dim() == 0
        if not (is_scalar or isinstance(other, int | float)) or named:
            return NotImplemented
        return recipe.with_step(lambda values: function(values, other), other if is_scalar else None)

    return answer


def _bounded(recipe: Recipe, *rest: Any) -> Any:
    return NotImplemented if rest else recipe.with_step(torch.tanh)


def _cast(recipe: Recipe, *wanted: Any, dtype: torch.dtype | None = None, **named: Any) -> Any:
    wanted = wanted if dtype is None else (*wanted, dtype)
    if named or len(wanted) != 1:
        return NotImplemented
    (kind,) = wanted
    if _is_float(kind):
        return None if kind is recipe.dtype else recipe.cast(kind)
    is_here = isinstance(kind, str | torch.device) and torch.device(kind) == recipe.hidden.device
    return None if is_here else NotImplemented


def _is_float(kind: Any) -> bool:
    return isinstance(kind, torch.dtype) and kind.is_floating_point


def _reshaped(recipe: Recipe, *shape: Any) -> Any:
    wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
    if recipe.is_turned or len(wanted) < _FLAT or not all(isinstance(size, int) for size in wanted):
        return NotImplemented
    *leading, last = wanted
    tokens = math.prod(recipe.shape[:-1])
    # Where the last size is left open, the others have to leave it the number of classes.
    keeps_classes = last == recipe.head.classes or (last == -1 and -1 not in leading and math.prod(leading) == tokens)
    return (
        recipe.with_hidden(recipe.hidden.reshape(*leading, recipe.hidden.shape[-1]))
        if keeps_classes
        else NotImplemented
    )


def _flattened(recipe: Recipe, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = len(recipe.shape)
    if recipe.is_turned or end_dim % dims == dims - 1:
        return NotImplemented
    return recipe.with_hidden(recipe.hidden.flatten(start_dim % dims, end_dim % dims))


def _selected(recipe: Recipe, index: Any) -> Any:
    """Answer what takes whole tokens, such as [..., :-1, :], [:, 1:], [0] and [labels != -100]."""
    parts, dims = index if isinstance(index, tuple) else (index,), len(recipe.shape)
    if recipe.is_turned or not all(part is Ellipsis or isinstance(part, slice | int | list | Tensor) for part in parts):
        return NotImplemented
    taken = sum(part.dim() if _is_mask(part) else 1 for part in parts if part is not Ellipsis)
    if any(part is Ellipsis for part in parts):
        at = next(place for place, part in enumerate(parts) if part is Ellipsis)
        parts = (*parts[:at], *[slice(None)] * (dims - taken), *parts[at + 1 :])
        taken = dims
    if taken == dims and not (isinstance(parts[-1], slice) and parts[-1] == slice(None)):
        return NotImplemented
    hidden = recipe.hidden[parts[:-1] if taken == dims else parts]
    return recipe.with_hidden(hidden) if hidden.dim() >= _FLAT else NotImplemented


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype is torch.bool


def _rows(recipe: Recipe, dim: int = 0) -> Any:
    """Answer a loop over the first dimension."""
    if recipe.is_turned or len(recipe.shape) < _WITH_ROWS or dim not in (0, -len(recipe.shape)):
        return NotImplemented
    return tuple(map(recipe.with_hidden, recipe.hidden.unbind(0)))


def _each_row(recipe: Recipe) -> Any:
    rows = _rows(recipe)
    return rows if rows is NotImplemented else iter(rows)


def _turned(recipe: Recipe, *dims: Any) -> Any:
    """Answer an exchange of the last two of three dimensions: cross entropy takes classes second."""
    has_rows = len(recipe.shape) == _WITH_ROWS
    if (
        not has_rows
        or not all(isinstance(dim, int) for dim in dims)
        or sorted(dim % _WITH_ROWS for dim in dims) != [1, 2]
    ):
        return NotImplemented
    return recipe.turned()


def _permuted(recipe: Recipe, *dims: Any) -> Any:
    """Answer `permute(0, 2, 1)`, which is the same."""
    wanted = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
    is_known = all(isinstance(dim, int) for dim in wanted)
    is_exchange = is_known and tuple(dim % _WITH_ROWS for dim in wanted) == (0, 2, 1)
    return _turned(recipe, 1, 2) if is_exchange else NotImplemented


def _same(_recipe: Recipe, **_named: Any) -> None:
    return None


def _cross_entropy(
    recipe: Recipe,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Answer the cross entropy of logits (N, V) and classes (N,), or (N, V, T) and (N, T)."""
    smoothed = functools.partial(functional.cross_entropy, label_smoothing=label_smoothing)
    fuses = weight is None and not label_smoothing
    return _of_classes(smoothed, recipe, target, weight, size_average, ignore_index, reduce, reduction, fuses=fuses)


def _of_classes(
    function: Callable[..., Tensor],
    recipe: Recipe,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    *,
    fuses: bool = False,
) -> Any:
    """Answer a loss of logits and classes that is a sum over tokens, or their mean by the weights of their classes.

    With `fuses`, it is the cross entropy that libraries have kernels for.
    """
    is_flat = len(recipe.shape) == _FLAT and target.dim() == 1
    is_old = size_average is not None or reduce is not None
    is_usual = is_flat or (recipe.is_turned and target.dim() == _FLAT)
    if is_old or not is_usual or target.is_floating_point() or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    classes = target.reshape(-1)
    if math.prod(recipe.hidden.shape[:-1]) != len(classes):
        return NotImplemented  # torch says what is wrong
    loss: Callable[..., Tensor] = functools.partial(
        function,
        weight=weight,
        ignore_index=ignore_index,
        reduction="none" if reduction == "none" else "sum",
    )
    if weight is not None:
        loss = unchanged(loss, weight)
    total = recipe.fused(classes, ignore_index) if fuses and reduction != "none" else None
    if total is None:
        losses = recipe.by_tokens(loss, classes)
        if reduction == "none":
            return torch.cat(losses).view(target.shape)
        total = torch.stack(losses).sum()
    if reduction == "sum":
        return total
    counted = classes != ignore_index
    return total / (counted.sum() if weight is None else weight[classes[counted]].sum()).to(total.dtype)


def _of_row(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return the answer of a function over all classes that keeps them, such as a softmax."""

    def answer(recipe: Recipe, dim: int | None = None, third: Any = None, dtype: torch.dtype | None = None) -> Any:
        if dim is None or dim % len(recipe.shape) != recipe.class_dim:
            return NotImplemented
        # torch.nn.functional passes a level of the stack there, and other spellings a type.
        dtype = third if isinstance(third, torch.dtype) else dtype
        in_autocast = torch.is_autocast_enabled(recipe.hidden.device.type)
        made = dtype or (torch.promote_types(recipe.dtype, torch.float32) if in_autocast else recipe.dtype)
        return recipe.with_step(lambda values: function(values, -1, dtype=dtype), dtype=made)

    return answer


def _log_of_sum(recipe: Recipe, dim: Any = None, keepdim: bool = False) -> Any:
    (dim,) = dim if isinstance(dim, list | tuple) and len(dim) == 1 else (dim,)
    if not isinstance(dim, int) or dim % len(recipe.shape) != recipe.class_dim or recipe.is_turned:
        return NotImplemented
    found = torch.cat(recipe.by_tokens(lambda values: torch.logsumexp(values, -1, keepdim=keepdim)))
    return found.view(*recipe.hidden.shape[:-1], *found.shape[1:])


def _gathered(recipe: Recipe, dim: int, index: Tensor, **named: Any) -> Any:
    """Answer the logits of some classes of each token, shape (..., K)."""
    leading = recipe.hidden.shape[:-1]
    if named or recipe.is_turned or dim % len(recipe.shape) != recipe.class_dim or index.shape[:-1] != leading:
        return NotImplemented
    found = recipe.by_tokens(lambda values, classes: values.gather(-1, classes), index.reshape(-1, index.shape[-1]))
    return torch.cat(found).view(index.shape)


def _likeliest(recipe: Recipe, dim: int | None = None, keepdim: bool = False) -> Any:
    if recipe.is_turned or dim is None or keepdim or dim % len(recipe.shape) != len(recipe.shape) - 1:
        return NotImplemented
    with torch.no_grad():
        return torch.cat(recipe.by_tokens(lambda values: values.argmax(-1))).view(recipe.shape[:-1])


def getter(name: str) -> Any:
    """Return what torch says is called where a property of a tensor is read."""
    return getattr(Tensor, name).__get__


ANSWERS: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: _cross_entropy,
    functional.nll_loss: functools.partial(_of_classes, functional.nll_loss),
    **dict.fromkeys((functional.log_softmax, Tensor.log_softmax, torch.log_softmax), _of_row(functional.log_softmax)),
    **dict.fromkeys((functional.softmax, Tensor.softmax, torch.softmax), _of_row(functional.softmax)),
    **dict.fromkeys((Tensor.logsumexp, torch.logsumexp), _log_of_sum),
    **dict.fromkeys((Tensor.gather, torch.gather), _gathered),
    **dict.fromkeys((Tensor.unbind, torch.unbind), _rows),
    Tensor.__iter__: _each_row,
    Tensor.float: lambda recipe: _cast(recipe, torch.float32),
    Tensor.double: lambda recipe: _cast(recipe, torch.float64),
    Tensor.half: lambda recipe: _cast(recipe, torch.float16),
    Tensor.bfloat16: lambda recipe: _cast(recipe, torch.bfloat16),
    Tensor.to: _cast,
    Tensor.type: lambda recipe, kind=None, **_: _cast(recipe, dtype=kind) if _is_float(kind) else NotImplemented,
    Tensor.view: _reshaped,
    Tensor.reshape: _reshaped,
    torch.reshape: _reshaped,
    Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    Tensor.__getitem__: _selected,
    getter("mT"): lambda recipe: _turned(recipe, -2, -1),
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.swapaxes, Tensor.swapdims), _turned),
    **dict.fromkeys((Tensor.movedim, torch.movedim), _turned),
    **dict.fromkeys((Tensor.permute, torch.permute), _permuted),
    Tensor.contiguous: _same,
    Tensor.argmax: _likeliest,
    torch.argmax: _likeliest,
    Tensor.tanh: _bounded,
    torch.tanh: _bounded,
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), _scaled(torch.mul)),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), _scaled(torch.div)),
}
IN_PLACE: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((Tensor.mul_, Tensor.__imul__), _scaled(torch.mul)),
    **dict.fromkeys((Tensor.div_, Tensor.__itruediv__), _scaled(torch.div)),
    Tensor.tanh_: _bounded,
}
