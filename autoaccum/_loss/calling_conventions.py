"""Explains a call of a model or a loss that failed because another calling convention was meant.

Takes what was called and what it raised. Errors that a model or a loss raises for reasons of its own are left alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from autoaccum._oom import first_line
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# In what Python and torch say where a list or tuple is not what was expected, or an argument is missing.
_SIGNS = ("list", "tuple", "positional argument")
_MOST_SAID, _MOST_ENTRIES = 100, 4


def explain_list(error: Exception, loss: Callable[..., Any], model: nn.Module, batch: Any) -> None:
    """Explain a loss of a list that took the model or the batch for tensors."""
    kinds = {type(value).__name__ for value in (model, batch) if not isinstance(value, Tensor)}
    said, frame = first_line(error), error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_locals.get("self") is model:
            return  # it comes from code of the model
        frame = frame.tb_next
    if any(re.search(rf"\b{re.escape(kind)}\b", said) for kind in kinds):
        raise _wrong_in_list(loss, f"failed with them ({said[:_MOST_SAID]})") from error


def explain_single(error: Exception, loss: Callable[..., Any], outputs: Any) -> None:
    """Explain a single loss that called the outputs, as it would a model."""
    if f"'{type(outputs).__name__}' object is not callable" in str(error):
        raise _wrong_alone(loss, f"calls the first of them ({first_line(error)[:_MOST_SAID]})") from error


def explain_model(
    error: Exception, model: nn.Module, batch: Any, inputs: Sequence[Any], entries: Mapping[str, Any]
) -> None:
    """Explain a model that does not take what it was called with.

    Only a pair (inputs, targets) and a mapping are taken apart by convention. A tuple of one, three or more tensors is
    one argument, which few models take.
    """
    said, name = first_line(error)[:_MOST_SAID], type(model).__name__
    if inputs and inputs[0] is batch:
        if isinstance(batch, list | tuple) and any(sign in first_line(error) for sign in _SIGNS):
            raise _of_whole_batch(model, batch, said) from error
        return
    try:
        inspect.signature(model.forward).bind(*inputs, **entries)
    except TypeError:
        pass
    else:
        return
    takes = f"{name}.forward takes ({', '.join(_parameters_of(model))})"
    if isinstance(batch, Mapping):
        names = [repr(name) for name in batch]
        if len(names) == 1:
            raise InvalidInputError(
                f"a batch is a mapping of {names[0]} alone, whose entries go to the model by name, and {takes}; add "
                f"the targets to the batch, or pass forward=lambda model, batch: model(batch[{names[0]}]) and a loss "
                "that needs none"
            ) from error
        shown = ", ".join(names[:_MOST_ENTRIES]) + (", …" if len(names) > _MOST_ENTRIES else "")
        raise InvalidInputError(
            f"a batch is a mapping of {shown}, whose entries go to the model by name, and {takes}; pass "
            f"forward=lambda model, batch: model(batch[{names[0]}]) and loss=lambda outputs, batch: "
            f"criterion(outputs, batch[{names[-1]}])"
        ) from error
    call = "model(*batch[0])" if isinstance(batch[0], list | tuple) else "model(*batch)"
    raise InvalidInputError(
        f"of a pair (inputs, targets) the model is called with the inputs alone, and {takes} "
        f"({said}); pass forward=lambda model, batch: {call}"
    ) from error


def _of_whole_batch(model: nn.Module, batch: Sequence[Any], said: str) -> InvalidInputError:
    kinds, required = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD), 0
    for one in _parameters_of(model).values():
        required += one.kind in kinds and one.default is inspect.Parameter.empty
    taken = min(max(1, required), max(1, len(batch) - 1))
    inputs, left = ", ".join(f"batch[{place}]" for place in range(taken)), len(batch) - taken
    targets = "batch[0]" if left < 1 else f"batch[{taken}]" if left == 1 else f"batch[{taken}:]"
    return InvalidInputError(
        f"a batch is a {type(batch).__name__} of {len(batch)}, which is passed to the model as one argument, since "
        f"only a pair (inputs, targets) is taken apart, and {type(model).__name__} does not take it ({said}); pass "
        f"forward=lambda model, batch: model({inputs}) and loss=lambda outputs, batch: criterion(outputs, {targets})"
    )


def _parameters_of(called: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(called.forward if isinstance(called, nn.Module) else called).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}


def _names_of(loss: Callable[..., Any]) -> tuple[str, str]:
    """Return the name of a loss, and what it is called by in code: "f" if it has no name of its own."""
    name = str(getattr(loss, "__name__", ""))
    return name or type(loss).__name__, name if name.isidentifier() else "f"


def _wrong_in_list(loss: Callable[..., Any], found: str) -> InvalidInputError:
    name, call = _names_of(loss)
    return InvalidInputError(
        f"losses of a list are called with (model, batch), and {name} {found}; pass one loss that returns "
        f"them by name, loss=lambda outputs, targets: {{{call!r}: {call}(outputs, targets), …}}, or in the list "
        f"lambda model, batch: {call}(model(batch[0]), batch[1])"
    )


def _wrong_alone(loss: Callable[..., Any], found: str) -> InvalidInputError:
    name, call = _names_of(loss)
    return InvalidInputError(
        f"a loss is called with (outputs, targets), and {name} {found}; pass a loss of (model, batch) in a "
        f"list: loss=[{call}]"
    )
