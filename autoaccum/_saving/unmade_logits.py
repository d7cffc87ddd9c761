"""Stands for logits that are never whole: notes what is done to them, and computes what is asked of each row in chunks.

What models and losses do to every logit by itself, or to all of a token's (a soft cap, a temperature, a cast,
`log_softmax`), and which tokens they take is noted. What leaves no classes (a cross entropy, gathered
log-probabilities, an entropy, an argmax) is computed chunk by chunk. Everything else is refused: nobody can take a
stand-in for logits.
"""

from __future__ import annotations

import inspect
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum._saving.chunked_loss import REDUCTIONS, chunked_cross_entropy, in_chunks, range_check
from autoaccum.errors import SavingRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autoaccum._saving.chunked_loss import Held

ASKED = "save_memory='chunked_loss'"
_ROWS = 2  # dimensions of logits that cross entropy takes


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


def _named(*names: str) -> set[Any]:
    """Return the functions of these names, also as methods."""
    return {getattr(home, name) for home in (Tensor, torch, functional) for name in names if hasattr(home, name)}


_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda")
_OF_FORM = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex),
    *(Tensor.stride, *map(_getter, _PROPERTIES)),
}
_CASTS = {Tensor.float, Tensor.double, Tensor.to}
_NORMALIZED = _named("log_softmax", "softmax")
_TOTALS = _named("sum", "mean", "nansum")
_INDICES = (torch.int64, torch.int32)


class _Step(NamedTuple):
    function: Any
    arguments: Sequence[Any]
    named: dict[str, Any]
    autocast: tuple[str, torch.dtype, bool]

    def of(self, logits: Tensor) -> Any:
        device, dtype, enabled = self.autocast
        with torch.autocast(device, dtype, enabled):
            return self.function(logits, *self.arguments, **self.named)

    def over_classes(self, dims: int) -> _Step | None:
        """Return the same over the last dimension; None if it is over another of `dims`."""
        rest, named = list(self.arguments), dict(self.named)
        dim = rest.pop(0) if rest else named.pop("dim", None)
        is_last = dim in (-1, dims - 1, [-1], (-1,), [dims - 1], (dims - 1,))
        return self._replace(arguments=(-1, *rest), named=named) if is_last else None


def autocast_of(device: torch.device) -> tuple[str, torch.dtype, bool]:
    """Return the arguments of the autocast that is in force on a device."""
    kind = device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


class Recipe(NamedTuple):
    """How logits would be made: of hidden states, shape (..., features), by a head's forward, and steps after it."""

    head: nn.Module
    held: Held  # its parameters, and the hidden states that it was called with
    forward: Callable[[Tensor], Tensor]
    hidden: Tensor
    has_gradient: bool
    steps: tuple[_Step, ...] = ()
    has_classes_second: bool = False
    sums: Tensor | None = None  # their logsumexp, shape (..., 1), if it is known
    modes_of_sums: Any = None

    def made(self, hidden: Tensor) -> Tensor:
        """Return the logits of some hidden states."""
        self.held.check(self.head, ASKED)
        return _after(self.steps, self.forward(hidden))

    def without_steps(self) -> Recipe:
        """Return the recipe of the head's own logits."""
        return self._replace(steps=(), sums=None, modes_of_sums=None)

    def modes(self) -> Any:
        """Return what a computation depends on beside the logits."""
        return self.has_gradient and torch.is_grad_enabled(), autocast_of(self.hidden.device)


def _after(steps: Sequence[_Step], logits: Tensor) -> Tensor:
    for step in steps:
        logits = step.of(logits)
    return logits


class UnmadeLogits(Tensor):
    """Stands for logits that are never made."""

    _recipe: Recipe

    @staticmethod
    def of(recipe: Recipe, shape: Sequence[int], dtype: torch.dtype) -> UnmadeLogits:
        """Return what stands for logits; its strides are 0, since it has no memory that a kernel could read."""
        device, has_gradient = recipe.hidden.device, recipe.has_gradient and torch.is_grad_enabled()
        form: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": has_gradient}
        made: Any = Tensor._make_wrapper_subclass(UnmadeLogits, shape, strides=[0] * len(shape), **form)
        made._recipe = recipe._replace(has_gradient=has_gradient)
        if has_gradient:
            with torch._C.DisableTorchFunctionSubclass():  # a function with a backward pass of its own ends here
                made.register_hook(lambda _: _refuse("a gradient"))
        return made  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"UnmadeLogits(shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Note or compute what can be; refuse the rest."""
        if torch.compiler.is_compiling():
            _refuse("a compiled function")
        named = dict(named or {})
        if not arguments and "input" in named:
            arguments = (named.pop("input"),)
        logits, rest = arguments[0] if arguments else None, arguments[1:]
        if function in _OF_FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **named)
        found = logits._asked(function, rest, named) if isinstance(logits, UnmadeLogits) else None
        if found is None:
            _refuse(function)
        return found

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Refuse what was not seen above."""
        _refuse(function)

    def _asked(self, function: Any, rest: Sequence[Any], named: dict[str, Any]) -> Any:
        """Return what a function returns of these logits; None if it needs them."""
        compute, takes_tensors, is_of_each = _HANDLED.get(function, (None, False, False))
        tensors = [value for value in (*rest, *named.values()) if isinstance(value, Tensor)]
        has_others = not all(isinstance(one, UnmadeLogits) for one in tensors)
        is_exchanged = self._recipe.has_classes_second
        if compute is None or (has_others and not takes_tensors) or (is_exchanged and not is_of_each):
            return None
        return compute(self, _Step(function, rest, named, autocast_of(self.device)))

    def _form(self, classes: int | None = None) -> Tensor:
        """Return an empty tensor of the form of these logits, with other classes if told so."""
        shape = tuple(self.shape) if classes is None else (*self.shape[:-1], classes)
        return torch.empty(shape, dtype=self.dtype, device="meta")

    # --- what leaves the classes --------------------------------------------------------------------------------------

    def _then(self, step: _Step) -> UnmadeLogits | None:
        """Return what stands for these logits after a step that leaves their shape."""
        before = torch.empty((0, self.shape[-1]), dtype=self.dtype, device=self._recipe.hidden.device)
        after = step.of(before)
        if after.device != before.device or after.shape != before.shape or not after.is_floating_point():
            return None
        recipe = self._recipe._replace(steps=(*self._recipe.steps, step), sums=None)
        return UnmadeLogits.of(recipe, self.shape, after.dtype)

    def _normalized(self, step: _Step) -> UnmadeLogits | None:
        over = step.over_classes(self.dim())
        return over and self._then(over)

    def _detached(self, _: _Step) -> UnmadeLogits:
        recipe = self._recipe._replace(hidden=self._recipe.hidden.detach(), has_gradient=False)
        return UnmadeLogits.of(recipe, self.shape, self.dtype)

    def _times(self, step: _Step) -> UnmadeLogits | None:
        """Return what stands for a product with a number, or as in an entropy with other logits of the same tokens."""
        mine, product = self._recipe, step.function
        other = step.arguments[0] if step.arguments else None
        if not isinstance(other, UnmadeLogits):
            return self._then(step)
        theirs = other._recipe
        if not all(map(is_, mine.without_steps(), theirs.without_steps())):
            return None

        def multiplied(logits: Tensor) -> Any:
            return product(_after(mine.steps, logits), _after(theirs.steps, logits))

        recipe = mine.without_steps()._replace(steps=(step._replace(function=multiplied, arguments=()),))
        return UnmadeLogits.of(recipe, self.shape, torch.promote_types(self.dtype, other.dtype))

    def _exchanged(self, step: _Step) -> UnmadeLogits | None:
        before = self._form()
        form = step.of(before)
        is_of_last = before.dim() == _ROWS + 1 and (form.shape, form.stride()) == (before.mT.shape, before.mT.stride())
        recipe = self._recipe._replace(has_classes_second=True)
        return UnmadeLogits.of(recipe, form.shape, self.dtype) if is_of_last else None

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _viewed(self, step: _Step) -> UnmadeLogits | None:
        form = step.of(self._form())
        shape, is_whole = form.shape, form.shape[-1:] == self.shape[-1:] and form.dtype is self.dtype
        return self._of_rows(lambda rows: rows.reshape(*shape[:-1], rows.shape[-1])) if is_whole else None

    def _of_tokens(self, step: _Step) -> Any:
        """Return what stands for the logits of some tokens, or for several parts; None if classes do not stay whole."""
        if step.function is Tensor.__getitem__:
            (key,) = step.arguments
            first, *others = key if isinstance(key, tuple) and key else (key,)
            if _takes_rows(first, self.shape[:-1]) and all(one is Ellipsis for one in others):
                return self._of_rows(step.of)
            if not all(one is Ellipsis or type(one) is int or isinstance(one, slice) for one in (first, *others)):
                return None
        # A number of classes that is no other dimension, and that no slice ends at: it shows whether they stay whole.
        classes = max(self.shape) + 1
        forms = step.of(self._form(classes))
        are_whole = [form.shape[-1:] == (classes,) for form in ([forms] if isinstance(forms, Tensor) else forms)]
        return self._of_rows(step.of) if all(are_whole) else None

    def _of_rows(self, take: Callable[[Tensor], Any]) -> Any:
        """Return what stands for the tokens' logits that `take` leaves of tensors of the shape (..., any)."""
        recipe = self._recipe
        taken, sums = take(recipe.hidden), None if recipe.sums is None else take(recipe.sums)

        def of_part(hidden: Tensor, sums: Tensor | None) -> UnmadeLogits:
            part = recipe._replace(hidden=hidden, sums=sums)
            return UnmadeLogits.of(part, (*hidden.shape[:-1], self.shape[-1]), self.dtype)

        return of_part(taken, sums) if isinstance(taken, Tensor) else tuple(map(of_part, taken, sums or repeat(None)))

    # --- what leaves no classes ---------------------------------------------------------------------------------------

    def _computed(self, compute: Callable[..., tuple[Tensor, ...]], *by_token: Tensor) -> tuple[Tensor, ...]:
        """Return what `compute` makes of logits (tokens, classes) and tensors (tokens, ...), as (..., ...)."""
        recipe, hidden = self._recipe, self._recipe.hidden

        def of_some(rows: Tensor, *theirs: Tensor) -> tuple[Tensor, ...]:
            return compute(recipe.made(rows), *theirs)

        with torch.set_grad_enabled(recipe.modes()[0]):
            values = in_chunks(of_some, hidden.reshape(-1, hidden.shape[-1]), *by_token)
            return tuple(value.view((*hidden.shape[:-1], *value.shape[1:])) for value in values)

    def _reduced(self, step: _Step) -> Any:
        recipe, over = self._recipe, step.over_classes(self.dim())
        if over is None and step.function in _TOTALS and not step.arguments and step.named.keys() <= {"dtype"}:
            return step.of(self._reduced(step._replace(arguments=(-1,))))  # of everything: of the tokens' own
        if over is None:
            return None
        if step.function in _named("logsumexp") and recipe.sums is not None and recipe.modes_of_sums == recipe.modes():
            with torch.set_grad_enabled(recipe.modes()[0]):
                return over.of(recipe.sums)  # of one number: the number
        return self._computed(lambda logits: (over.of(logits),))[0]

    def _picked(self, step: _Step) -> Tensor | None:
        """Return the logits of some classes of each token; keep their logsumexp, which is asked for next."""
        given: dict[str, Any] = dict(zip(("dim", "index"), step.arguments, strict=False)) | step.named
        if given.keys() != {"dim", "index"} or given["dim"] not in (-1, self.dim() - 1):
            return None
        index = given["index"]
        if index.shape[:-1] != self.shape[:-1]:
            return None
        checked = range_check(index)
        is_sum_known = any(step.function in _NORMALIZED for step in self._recipe.steps)

        def picked(logits: Tensor, classes: Tensor) -> tuple[Tensor, ...]:
            found = checked(logits).gather(-1, classes)
            return (found,) if is_sum_known else (found, logits.logsumexp(-1, keepdim=True))

        found, *sums = self._computed(picked, index.reshape(self.shape[:-1].numel(), index.shape[-1]))
        if sums:
            self._recipe = self._recipe._replace(sums=sums[0], modes_of_sums=self._recipe.modes())
        return found

    def _loss(self, step: _Step) -> Tensor | None:
        """Return the cross entropy, for the arguments of `functional.cross_entropy`; None if it needs the logits."""
        recipe, signature = self._recipe, inspect.signature(functional.cross_entropy)
        given: dict[str, Any] = dict(signature.bind(self, *step.arguments, **step.named).arguments)
        labels = given.pop("target")
        is_of_rows = self.dim() == _ROWS + recipe.has_classes_second and labels.shape == recipe.hidden.shape[:-1]
        is_known = given.pop("size_average", None) is given.pop("reduce", None) is None
        is_known = is_known and given.get("reduction", "mean") in REDUCTIONS and given.pop("input") is self
        if not is_of_rows or not is_known or labels.is_floating_point():
            return None
        how = {"held": recipe.held, "asked": ASKED, **given}
        with torch.set_grad_enabled(recipe.modes()[0]):
            return chunked_cross_entropy(recipe.made, recipe.head, recipe.hidden, labels, **how)


# How functions are handled, whether they may take tensors, and whether they may follow an exchange with the classes.
_HANDLED: dict[Any, tuple[Callable[[UnmadeLogits, _Step], Any], bool, bool]] = {
    **dict.fromkeys(_CASTS | _named("div", "__truediv__", "tanh", "exp", "neg"), (UnmadeLogits._then, False, True)),
    **dict.fromkeys(_named("mul", "__mul__", "__rmul__"), (UnmadeLogits._times, False, True)),
    **dict.fromkeys(_NORMALIZED, (UnmadeLogits._normalized, False, False)),
    **dict.fromkeys(_named("detach"), (UnmadeLogits._detached, False, False)),
    **dict.fromkeys(_named("transpose", "permute") | {_getter("mT")}, (UnmadeLogits._exchanged, False, False)),
    **dict.fromkeys(_named("reshape", "flatten", "view", "contiguous"), (UnmadeLogits._viewed, False, False)),
    **dict.fromkeys(_named("__getitem__", "split", "chunk", "unbind"), (UnmadeLogits._of_tokens, True, False)),
    **dict.fromkeys(_TOTALS | _named("logsumexp", "argmax"), (UnmadeLogits._reduced, False, False)),
    **dict.fromkeys(_named("gather"), (UnmadeLogits._picked, True, False)),
    functional.cross_entropy: (UnmadeLogits._loss, True, True),
}


def _takes_rows(key: object, shape: Sequence[int]) -> bool:
    """Whether a mask, or indices of the first dimension, take rows of a tensor (*shape, any)."""
    if isinstance(key, list):
        return bool(shape) and all(type(one) is int for one in key)
    if not isinstance(key, Tensor) or not shape:
        return False
    return key.shape == shape[: key.dim()] and key.dim() > 0 if key.dtype is torch.bool else key.dtype in _INDICES


def _refuse(function: Any) -> NoReturn:
    name = getattr(function, "__name__", function)
    name = getattr(getattr(function, "__self__", None), "__name__", name) if name == "__get__" else name  # a property
    raise SavingRefusedError(
        f"{ASKED}: {name} is computed of logits that are never made; cross_entropy of them, by rows of tokens, "
        "log-probabilities (log_softmax and logsumexp over the classes, gather), entropies and argmax are possible, "
        "after numbers (logits = logits / temperature), tanh, casts and slices of tokens. Leave 'chunked_loss' out, or "
        "compute the loss of hidden states by autoaccum.ChunkedLoss(head)"
    )
