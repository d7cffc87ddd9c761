"""Calls a model with a whole batch, and explains it if the model expected the batch to be taken apart.

Only a pair (inputs, targets) and a mapping are taken apart by convention. A tuple of one, three or more tensors is one
argument, which few models take.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from autoaccum._oom import first_line
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import nn

# In what Python and torch say where a list or tuple is not what was expected, or an argument is missing.
_SIGNS = ("list", "tuple", "positional argument")
_MOST_SAID = 100


def call_with(model: nn.Module, batch: Any) -> Any:
    """Return `model(batch)`.

    Raises:
        InvalidInputError: The batch is a tuple or list, and the model does not take one.
    """
    if not isinstance(batch, list | tuple):
        return model(batch)
    try:
        return model(batch)
    except (TypeError, AttributeError) as error:
        said = first_line(error)
        if not any(sign in said for sign in _SIGNS):
            raise
        raise InvalidInputError(_explanation(model, batch, said[:_MOST_SAID])) from error


def _explanation(model: nn.Module, batch: list[Any] | tuple[Any, ...], said: str) -> str:
    taken = min(max(1, _arguments_of(model)), max(1, len(batch) - 1))
    inputs = ", ".join(f"batch[{place}]" for place in range(taken))
    left = len(batch) - taken
    targets = "batch[0]" if left < 1 else f"batch[{taken}]" if left == 1 else f"batch[{taken}:]"
    return (
        f"a batch is a {type(batch).__name__} of {len(batch)}, which is passed to the model as one argument, since "
        f"only a pair (inputs, targets) is taken apart, and {type(model).__name__} does not take it ({said}); pass "
        f"forward=lambda model, batch: model({inputs}) and loss=lambda outputs, batch: criterion(outputs, {targets})"
    )


def _arguments_of(model: nn.Module) -> int:
    """Return how many positional arguments `forward` requires; 1 if that is not known."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds and one.default is inspect.Parameter.empty for one in parameters)
