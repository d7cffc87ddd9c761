"""Computes a language model's logits and their cross entropy in chunks of tokens, so that they are never whole.

The head returns `Logits`, which stand for its results and remember how they come about: the hidden states, the weight,
and what is done to each element since (a soft cap, a cast). A cross entropy of them is computed chunk by chunk, and
again in the backward pass. Whatever else is asked of them, they become the tensor that they stand for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoaccum._engine.fused_loss import sum_of_losses
from autoaccum._engine.replaced_forward import is_replaced
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

# The most tokens computed at once: more take more memory, and are no faster.
CHUNK = 1024
# A micro-batch of fewer tokens than four chunks is computed in four parts, but of no fewer tokens than these: fewer
# cost more time, since kernels become small, and the head's weight is read for each.
_LEAST, _PARTS = 256, 4
_FLAT, _WITH_ROWS = 2, 3
# A layer of as many outputs, and of so many times its inputs, probably makes logits over a vocabulary.
_MANY_CLASSES, _WIDER = 2048, 2
# Operators that change what is left of them.
_WRITING = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or"))

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How logits come about.

    Attributes:
        hidden: The inputs of the layer that makes them, shape (..., D).
        layer: That layer.
        head: Its own forward: makes logits, shape (..., V), of such inputs, each token by itself.
        classes: V.
        has_parameters: Whether gradients may flow into the head.
        draws: Whether the head draws random numbers.
        steps: What is done to the logits of each token, in order.
        is_plain: Whether those only cast them to a type of as many digits or more.
        computed_in: The type in which the layer computes.
        dtype: The type of the elements after that.
        is_turned: Whether classes are the second dimension, of (N, V, T), and not the last.
        size: Tokens computed at once.
        is_single: Whether all tokens are computed at once, so that computing them again would save nothing.
        say: Reports what is computed whole after all.
    """

    hidden: Tensor
    layer: nn.Module
    head: Callable[[Tensor], Tensor]
    classes: int
    has_parameters: bool
    draws: bool
    steps: tuple[Step, ...]
    is_plain: bool
    computed_in: torch.dtype
    dtype: torch.dtype
    is_turned: bool
    size: int
    is_single: bool
    say: Callable[[str], None]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits."""
        *leading, _ = self.hidden.shape
        return (leading[0], self.classes, leading[1]) if self.is_turned else (*leading, self.classes)

    @property
    def class_dim(self) -> int:
        """The dimension of the classes."""
        return 1 if self.is_turned else len(self.shape) - 1

    def computed(self, hidden: Tensor) -> Tensor:
        """Return the logits of some hidden states, with classes last."""
        found = self.head(hidden)
        for step in self.steps:
            found = step(found)
        return found

    def with_step(self, step: Step, dtype: torch.dtype | None = None) -> Logits:
        """Return the logits after a further step."""
        return Logits.of(replace(self, steps=(*self.steps, step), is_plain=False, dtype=dtype or self.dtype))

    def cast(self, dtype: torch.dtype) -> Logits:
        """Return the logits in another type."""
        is_plain = self.is_plain and torch.finfo(dtype).eps <= torch.finfo(self.dtype).eps
        steps = (*self.steps, lambda values: values.to(dtype))
        return Logits.of(replace(self, steps=steps, is_plain=is_plain, dtype=dtype))

    def fused(self, hidden: Tensor, classes: Tensor, ignore_index: int) -> Tensor | None:
        """Return the sum of the cross entropies by a kernel; None where none computes what this recipe does."""
        layer, is_its_own = self.layer, getattr(self.head, "__func__", None) is nn.Linear.forward
        if not isinstance(layer, nn.Linear) or not is_its_own or not self.is_plain or self.is_single:
            return None
        # Fake tensors are for the prediction, which knows chunks.
        if type(hidden) is not Tensor or not torch.is_grad_enabled():
            return None
        found = sum_of_losses(layer, hidden, classes, ignore_index, self.computed_in)
        return None if found is None else found.to(torch.promote_types(self.dtype, torch.float32))

    def with_hidden(self, hidden: Tensor) -> Logits:
        """Return the logits of other hidden states."""
        return Logits.of(replace(self, hidden=hidden))


class Logits(Tensor):
    """The results of a linear layer that have not been computed.

    Attributes:
        recipe: How they come about.
    """

    recipe: _Recipe

    @staticmethod
    def of(recipe: _Recipe) -> Logits:
        """Return the logits of a recipe."""
        requires_grad = torch.is_grad_enabled() and (recipe.hidden.requires_grad or recipe.has_parameters)
        made = Tensor._make_wrapper_subclass(
            Logits, recipe.shape, dtype=recipe.dtype, device=recipe.hidden.device, requires_grad=requires_grad
        )
        made.recipe = recipe
        assert isinstance(made, Logits)
        return made

    def computed(self) -> Tensor:
        """Return the tensor that they stand for."""
        found = self.recipe.computed(self.recipe.hidden)
        return found.transpose(1, 2) if self.recipe.is_turned else found

    def written(self, function: Any, *arguments: Any, **named: Any) -> Logits:
        """Change them in place as a function does, where it is answered without computing them.

        Raises:
            InvalidInputError: It is not.
        """
        answer = _IN_PLACE.get(function)
        found = NotImplemented if answer is None else answer(self.recipe, *arguments, **named)
        if not isinstance(found, Logits):
            raise InvalidInputError(
                f"memory='chunked_loss': the loss changes logits in place ({function.__name__}), and they are not "
                "computed yet; write it without changing them, as in logits = logits.masked_fill(...)"
            )
        self.recipe = found.recipe
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
            raise InvalidInputError(
                f"memory='chunked_loss': {function.__name__} asks for the gradient of logits that are never whole; put "
                "it on the head's inputs, or leave 'chunked_loss' out"
            )
        answer = _ANSWERS.get(function)
        if answer is not None and arguments and isinstance(arguments[0], Logits):
            found = answer(arguments[0].recipe, *arguments[1:], **named)
            if found is not NotImplemented:
                return arguments[0] if found is None else found
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


def _writes(function: Any) -> bool:
    """Whether a function changes its first argument in place, by its name."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or name in _WRITING
    return name.endswith("_") and name != "requires_grad_"


def _all_computed(values: Any, function: Any) -> Any:
    if isinstance(values, Logits):
        if torch.is_grad_enabled():
            values.recipe.say(getattr(function, "__name__", str(function)))
        return values.computed()
    if isinstance(values, list | tuple) and not hasattr(values, "_fields"):
        return type(values)(_all_computed(one, function) for one in values)
    if isinstance(values, Mapping):
        return {name: _all_computed(one, function) for name, one in values.items()}
    return values


# --- what is answered without computing them; None stands for the same logits -----------------------------------------


def _scaled(function: Callable[[Tensor, Any], Tensor]) -> Callable[..., Any]:
    def answer(recipe: _Recipe, other: Any, **named: Any) -> Any:
        is_number = isinstance(other, int | float) or (isinstance(other, Tensor) and other.dim() == 0)
        if not is_number or isinstance(other, Logits) or named:
            return NotImplemented
        return recipe.with_step(lambda values: function(values, other))

    return answer


def _bounded(recipe: _Recipe, *rest: Any) -> Any:
    return NotImplemented if rest else recipe.with_step(torch.tanh)


def _cast(recipe: _Recipe, *wanted: Any, dtype: torch.dtype | None = None, **named: Any) -> Any:
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


def _reshaped(recipe: _Recipe, *shape: Any) -> Any:
    wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
    if recipe.is_turned or len(wanted) < _FLAT or not all(isinstance(size, int) for size in wanted):
        return NotImplemented
    *leading, last = wanted
    tokens = math.prod(recipe.shape[:-1])
    # Where the last size is left open, the others have to leave it the number of classes.
    keeps_classes = last == recipe.classes or (last == -1 and -1 not in leading and math.prod(leading) == tokens)
    return (
        recipe.with_hidden(recipe.hidden.reshape(*leading, recipe.hidden.shape[-1]))
        if keeps_classes
        else NotImplemented
    )


def _flattened(recipe: _Recipe, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = len(recipe.shape)
    if recipe.is_turned or end_dim % dims == dims - 1:
        return NotImplemented
    return recipe.with_hidden(recipe.hidden.flatten(start_dim % dims, end_dim % dims))


def _selected(recipe: _Recipe, index: Any) -> Any:
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


def _rows(recipe: _Recipe, dim: int = 0) -> Any:
    """Answer a loop over the first dimension."""
    if recipe.is_turned or len(recipe.shape) < _WITH_ROWS or dim not in (0, -len(recipe.shape)):
        return NotImplemented
    return tuple(map(recipe.with_hidden, recipe.hidden.unbind(0)))


def _each_row(recipe: _Recipe) -> Any:
    rows = _rows(recipe)
    return rows if rows is NotImplemented else iter(rows)


def _turned(recipe: _Recipe, *dims: Any) -> Any:
    """Answer an exchange of the last two of three dimensions: cross entropy takes classes second."""
    has_rows = len(recipe.shape) == _WITH_ROWS
    if (
        not has_rows
        or not all(isinstance(dim, int) for dim in dims)
        or sorted(dim % _WITH_ROWS for dim in dims) != [1, 2]
    ):
        return NotImplemented
    return Logits.of(replace(recipe, is_turned=not recipe.is_turned))


def _permuted(recipe: _Recipe, *dims: Any) -> Any:
    """Answer `permute(0, 2, 1)`, which is the same."""
    wanted = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
    is_known = all(isinstance(dim, int) for dim in wanted)
    is_exchange = is_known and tuple(dim % _WITH_ROWS for dim in wanted) == (0, 2, 1)
    return _turned(recipe, 1, 2) if is_exchange else NotImplemented


def _same(_recipe: _Recipe, **_named: Any) -> None:
    return None


def _cross_entropy(
    recipe: _Recipe,
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
    recipe: _Recipe,
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
    hidden, classes = recipe.hidden.reshape(-1, recipe.hidden.shape[-1]), target.reshape(-1)
    if len(hidden) != len(classes):
        return NotImplemented  # torch says what is wrong
    loss = functools.partial(
        function,
        weight=weight,
        ignore_index=ignore_index,
        reduction="none" if reduction == "none" else "sum",
    )
    fused = recipe.fused(hidden, classes, ignore_index) if fuses and reduction != "none" else None
    if fused is None:
        parts = zip(torch.split(hidden, recipe.size), torch.split(classes, recipe.size), strict=True)
        losses = [_of_chunk(recipe, part, functools.partial(_with_targets, loss, targets)) for part, targets in parts]
        if reduction == "none":
            return torch.cat(losses).view(target.shape)
    total = torch.stack(losses).sum() if fused is None else fused
    if reduction == "sum":
        return total
    counted = classes != ignore_index
    return total / (counted.sum() if weight is None else weight[classes[counted]].sum()).to(total.dtype)


def _with_targets(loss: Callable[[Tensor, Tensor], Tensor], targets: Tensor, logits: Tensor) -> Tensor:
    return loss(logits, targets)


def _of_chunk(recipe: _Recipe, hidden: Tensor, answer: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what is asked of a few tokens, whose logits are computed again in the backward pass."""

    def run(hidden: Tensor) -> Tensor:
        return answer(recipe.computed(hidden))

    if recipe.is_single or not torch.is_grad_enabled():
        return run(hidden)
    found: Tensor = checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=recipe.draws)
    return found


def _by_token(recipe: _Recipe, answer: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what is asked of each token, shape (...) or (..., K)."""
    parts = torch.split(recipe.hidden.reshape(-1, recipe.hidden.shape[-1]), recipe.size)
    found = torch.cat([_of_chunk(recipe, part, answer) for part in parts])
    return found.view(*recipe.hidden.shape[:-1], *found.shape[1:])


def _of_row(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return the answer of a function over all classes that keeps them, such as a softmax."""

    def answer(recipe: _Recipe, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
        if dim is None or dim % len(recipe.shape) != recipe.class_dim:
            return NotImplemented
        return recipe.with_step(lambda values: function(values, -1, dtype=dtype), dtype)

    return answer


def _log_of_sum(recipe: _Recipe, dim: Any = None, keepdim: bool = False) -> Any:
    (dim,) = dim if isinstance(dim, list | tuple) and len(dim) == 1 else (dim,)
    if not isinstance(dim, int) or dim % len(recipe.shape) != recipe.class_dim or recipe.is_turned:
        return NotImplemented
    return _by_token(recipe, lambda values: torch.logsumexp(values, -1, keepdim=keepdim))


def _gathered(recipe: _Recipe, dim: int, index: Tensor, **named: Any) -> Any:
    """Answer the logits of some classes of each token, shape (..., K)."""
    leading = recipe.hidden.shape[:-1]
    if named or recipe.is_turned or dim % len(recipe.shape) != recipe.class_dim or index.shape[:-1] != leading:
        return NotImplemented
    rows = torch.split(index.reshape(-1, index.shape[-1]), recipe.size)
    parts = torch.split(recipe.hidden.reshape(-1, recipe.hidden.shape[-1]), recipe.size)
    found = [
        _of_chunk(recipe, part, functools.partial(_at, classes)) for part, classes in zip(parts, rows, strict=True)
    ]
    return torch.cat(found).view(index.shape)


def _at(classes: Tensor, logits: Tensor) -> Tensor:
    return logits.gather(-1, classes)


def _likeliest(recipe: _Recipe, dim: int | None = None, keepdim: bool = False) -> Any:
    if recipe.is_turned or dim is None or keepdim or dim % len(recipe.shape) != len(recipe.shape) - 1:
        return NotImplemented
    with torch.no_grad():
        parts = torch.split(recipe.hidden.flatten(0, -2), recipe.size)
        return torch.cat([recipe.computed(part).argmax(-1) for part in parts]).view(recipe.shape[:-1])


def _getter(name: str) -> Any:
    """Return what torch says is called where a property of a tensor is read."""
    return getattr(Tensor, name).__get__


_ANSWERS: dict[Any, Callable[..., Any]] = {
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
    _getter("mT"): lambda recipe: _turned(recipe, -2, -1),
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
_IN_PLACE: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((Tensor.mul_, Tensor.__imul__), _scaled(torch.mul)),
    **dict.fromkeys((Tensor.div_, Tensor.__itruediv__), _scaled(torch.div)),
    Tensor.tanh_: _bounded,
}
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
    *map(_getter, _PROPERTIES),
}


# --- heads ------------------------------------------------------------------------------------------------------------


def find_heads(modules: Iterable[nn.Module], name: str | None) -> list[nn.Module]:
    """Return the layers that make logits: the output embeddings of Transformers' models, or the layer of a name.

    Raises:
        InvalidInputError: No module has a layer of that name.
    """
    if name is None:
        found = [part for module in modules for part in _output_embeddings(module)]
        return list(dict.fromkeys(found))
    named = [part for module in modules for path, part in module.named_modules() if path == name]
    if not named or isinstance(named[0], nn.Embedding) or not any(True for _ in named[0].parameters()):
        what = f"is a {type(named[0]).__name__}" if named else "is not there"
        raise InvalidInputError(
            f"memory='chunked_loss:{name}' names the layer that makes the logits, and {name!r} {what}; name an "
            "nn.Linear, or what makes logits of each token by itself, as model.named_modules() does"
        )
    return [named[0]]


def likely_head(modules: Iterable[nn.Module]) -> str | None:
    """Return the name of the layer that probably makes logits over a vocabulary; None if there is none."""
    wide = [
        (part.out_features, path)
        for module in modules
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear) and path and not is_replaced(part) and _is_wide(part)
    ]
    return max(wide)[1] if wide else None


def _is_wide(layer: nn.Linear) -> bool:
    return layer.out_features >= max(_MANY_CLASSES, _WIDER * layer.in_features)


def _output_embeddings(module: nn.Module) -> list[nn.Module]:
    """Return the layer that makes the logits of a Transformers model, also where PEFT has put another around it."""
    for part in module.modules():
        asked = getattr(part, "get_output_embeddings", None)
        found = asked() if callable(asked) else None
        if isinstance(found, nn.Module) and isinstance(getattr(found, "out_features", None), int):
            return [found]
    return []


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
    if hidden.dim() < _FLAT:
        found: Tensor = forward(hidden)
        return found
    tokens = hidden.numel() // hidden.shape[-1] if hidden.shape[-1] else 0
    size = min(most, max(-(-tokens // _PARTS), _LEAST))
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return Logits.of(
        _Recipe(
            hidden,
            head,
            forward,
            _classes_of(head, forward, hidden),
            has_parameters=any(parameter.requires_grad for parameter in head.parameters()),
            draws=any(_draws(part) for part in head.modules()),
            steps=(),
            is_plain=True,
            computed_in=dtype,
            dtype=dtype,
            is_turned=False,
            size=size,
            is_single=tokens <= size,
            say=say,
        )
    )


def _classes_of(head: nn.Module, forward: Callable[..., Any], hidden: Tensor) -> int:
    """Return the number of classes that a head makes; where it has none to say, of one token."""
    classes = getattr(head, "out_features", None)
    if isinstance(classes, int):
        return classes
    with torch.no_grad(), torch.random.fork_rng(devices=[hidden.device] if hidden.is_cuda else []):
        return int(forward(hidden.reshape(-1, hidden.shape[-1])[:1]).shape[-1])


def _draws(module: nn.Module) -> bool:
    return module.training and "Dropout" in type(module).__name__ and getattr(module, "p", 1.0) != 0.0
