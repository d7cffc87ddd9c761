"""Explains a call of a model or a loss that failed because the other calling convention was meant.

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

# What functions of (outputs, targets) call their parameters, as torch.nn.functional and common tutorials do.
_OUTPUTS = re.compile(r"inputs?|(y_?)?(outputs?|outs?|preds?|predictions?|predicted|logits|scores|hat)")
_TARGETS = re.compile(r"targets?|labels?|y|y_?true|truth|expected|gold")
_OF_TORCH = ("torch.nn.modules.loss", "torch.nn.functional")
_MOST_SAID = 100
_MOST_ENTRIES = 4


def check_list(losses: Sequence[Callable[..., Any]]) -> None:
    """Reject a list with a loss that by its kind, or by the names of its parameters, is one of (outputs, targets).

    Raises:
        InvalidInputError: There is one.
    """
    for loss in losses:
        if _is_of_torch(loss) or _is_of_outputs(_parameters_of(loss)):
            raise _wrong_in_list(loss, f"takes ({', '.join(_parameters_of(loss)[:2])})")


def check_single(loss: Callable[..., Any]) -> None:
    """Reject a single loss whose first parameter is the model.

    Raises:
        InvalidInputError: It is.
    """
    if _parameters_of(loss)[:1] == ["model"]:
        raise _wrong_alone(loss, f"takes ({', '.join(_parameters_of(loss))})")


def explain_list(error: Exception, loss: Callable[..., Any], model: nn.Module, batch: Any) -> InvalidInputError | None:
    """Return the error for a loss of a list that took the model or the batch for tensors; None if it did not."""
    kinds = {type(value).__name__ for value in (model, batch) if not isinstance(value, Tensor)}
    said = first_line(error)
    if not any(re.search(rf"\b{re.escape(kind)}\b", said) for kind in kinds) or _is_within(error, model):
        return None
    return _wrong_in_list(loss, f"failed with them ({said[:_MOST_SAID]})")


def explain_single(error: Exception, loss: Callable[..., Any], outputs: Any) -> InvalidInputError | None:
    """Return the error for a single loss that called the outputs, as it would a model; None if it did not."""
    if f"'{type(outputs).__name__}' object is not callable" not in str(error):
        return None
    return _wrong_alone(loss, f"calls the first of them ({first_line(error)[:_MOST_SAID]})")


def explain_model(
    error: Exception, model: nn.Module, batch: Any, inputs: Sequence[Any], entries: Mapping[str, Any]
) -> InvalidInputError | None:
    """Return the error for a model that does not take a pair's inputs, or a mapping's entries, as it was given them.

    None if it does, so that the error is the model's own.
    """
    try:
        inspect.signature(model.forward).bind(*inputs, **entries)
    except TypeError:
        pass
    else:
        return None
    takes = f"{type(model).__name__}.forward takes ({', '.join(_parameters_of(model))})"
    if isinstance(batch, Mapping):
        names = [repr(name) for name in batch]
        shown = ", ".join(names[:_MOST_ENTRIES]) + (", …" if len(names) > _MOST_ENTRIES else "")
        return InvalidInputError(
            f"a batch is a mapping of {shown}, whose entries go to the model by name, and {takes}; pass "
            f"forward=lambda model, batch: model(batch[{names[0]}]) and loss=lambda outputs, batch: "
            f"criterion(outputs, batch[{names[-1]}])"
        )
    call = "model(*batch[0])" if isinstance(batch[0], list | tuple) else "model(*batch)"
    return InvalidInputError(
        f"of a pair (inputs, targets) the model is called with the inputs alone, and {takes} "
        f"({first_line(error)[:_MOST_SAID]}); pass forward=lambda model, batch: {call}"
    )


def _is_within(error: Exception, model: nn.Module) -> bool:
    """Whether an error comes from code of the model."""
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_locals.get("self") is model:
            return True
        frame = frame.tb_next
    return False


def _is_of_torch(loss: Callable[..., Any]) -> bool:
    return getattr(type(loss) if isinstance(loss, nn.Module) else loss, "__module__", None) in _OF_TORCH


def _is_of_outputs(parameters: Sequence[str]) -> bool:
    return len(parameters) > 1 and bool(_OUTPUTS.fullmatch(parameters[0]) and _TARGETS.fullmatch(parameters[1]))


def _parameters_of(called: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(called.forward if isinstance(called, nn.Module) else called).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return []


def _name_of(loss: Callable[..., Any]) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__))


def _call_of(loss: Callable[..., Any]) -> str:
    """Return what a function is called by in code; "f" if it has no name of its own."""
    name = getattr(loss, "__name__", "")
    return name if name.isidentifier() else "f"


def _wrong_in_list(loss: Callable[..., Any], found: str) -> InvalidInputError:
    call = _call_of(loss)
    return InvalidInputError(
        f"losses of a list are called with (model, batch), and {_name_of(loss)} {found}; pass one loss that returns "
        f"them by name, loss=lambda outputs, targets: {{{call!r}: {call}(outputs, targets), …}}, or in the list "
        f"lambda model, batch: {call}(model(batch[0]), batch[1])"
    )


def _wrong_alone(loss: Callable[..., Any], found: str) -> InvalidInputError:
    return InvalidInputError(
        f"a loss is called with (outputs, targets), and {_name_of(loss)} {found}; pass a loss of (model, batch) in a "
        f"list: loss=[{_call_of(loss)}]"
    )
