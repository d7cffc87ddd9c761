"""A call of `fit` that is not made yet: its arguments, under the names that `fit` gives them.

`fit`'s signature and docstring are the one definition of what a training can be asked. A job's fields, their order,
defaults and texts are read from there when this module is imported, and so are the options of the command line
(`_cli/options.py`). Two things differ: `model` may be a function that makes the model, and `progress`, which says how a
training is watched, is no part of a job.

A type checker cannot follow that. A ParamSpec gives it the types of `fit`'s arguments instead: it checks calls of
`Job(...)`, with `model` by position and the rest as for `fit`, and takes every attribute for `Any`. It also accepts
`progress`, which is refused at run time. There a job is an ordinary frozen dataclass: it can be pickled, shown and
copied by `dataclasses.replace`, and all fields may be given by position.

A job is not checked when it is made; `fit` checks its arguments.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from torch import nn

from autoaccum._arguments import check_call
from autoaccum._training.api import fit
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from dataclasses import Field
    from typing import ClassVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
NOT_OF_A_JOB = ("progress",)


def texts_of_arguments(function: Callable[..., Any]) -> dict[str, str]:
    """Return what a docstring in Google's style says of each argument; nothing where Python has stripped it (-OO)."""
    section = (inspect.getdoc(function) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def shared_arguments(job: Job, function: Callable[..., Any]) -> dict[str, Any]:
    """Return those of a job's arguments that another function takes under the same names."""
    names = inspect.signature(function).parameters
    return {field.name: getattr(job, field.name) for field in fields(job) if field.name in names}


def _with_the_arguments_of(function: Callable[..., Any]) -> Callable[[type[_T]], type[_T]]:
    """Make a class a frozen dataclass whose fields are a function's parameters."""
    parameters = {one.name: one for one in inspect.signature(function).parameters.values()}
    for name in NOT_OF_A_JOB:
        del parameters[name]
    texts = texts_of_arguments(function)

    def make(kind: type[_T]) -> type[_T]:
        kind.__annotations__ = {name: one.annotation for name, one in parameters.items()}
        kind.__annotations__["model"] = "nn.Module | Callable[[], nn.Module]"
        for name, one in parameters.items():
            if one.default is not one.empty:
                setattr(kind, name, one.default)
        listed = "\n".join(f"    {name}: {texts.get(name, '')}" for name in parameters)
        kind.__doc__ = f"{inspect.getdoc(kind)}\n\nArgs:\n{listed}\n"
        made = dataclass(frozen=True, eq=False)(kind)
        fill = made.__init__

        @functools.wraps(fill)
        def init(self: _T, *arguments: Any, **named: Any) -> None:
            for name in named.keys() - parameters.keys():
                raise TypeError(f"{kind.__name__}() has no argument {name!r}; {_hint(name, parameters)}")
            fill(self, *arguments, **named)

        made.__init__ = init  # type: ignore[assignment, method-assign]
        return made

    return make


def _hint(name: str, known: Iterable[str]) -> str:
    if name in NOT_OF_A_JOB:
        return f"pass {name} to fit itself"
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else "it has those of autoaccum.fit"


def _typed_like(
    _: Callable[Concatenate[nn.Module, _P], Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, nn.Module | Callable[[], nn.Module], _P], None]]:
    raise NotImplementedError  # for type checkers alone


@_with_the_arguments_of(fit)
class Job:
    """The arguments of `autoaccum.fit`, as a recipe's function returns them.

    All are given as to `fit`, but for `progress`, which a job does not have. `model` may also be a function without
    arguments that makes the model; it is called when the model is needed, and where (such as on the meta device). With
    such a function, `optimizer` is a function too.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

        @_typed_like(fit)
        def __init__(self, *arguments: Any, **named: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def fit_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for `fit`, the model made.

        Raises:
            InvalidInputError: `model` is neither a module nor a function that returns one.
        """
        return shared_arguments(self, fit) | {"model": self._made_model()}

    def _made_model(self) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return self.model
        if callable(self.model):
            check_call("model", self.model, "")
        made = self.model() if callable(self.model) else self.model
        if not isinstance(made, nn.Module):
            how = "a function that returned" if made is not self.model else "a value of type"
            raise InvalidInputError(
                f"a job's model must be a torch.nn.Module or a function without arguments that makes one; "
                f"this one is {how} {type(made).__name__}"
            )
        return made
