"""A deferred call of `fit`: its arguments, under `fit`'s names.

`fit`'s signature and docstring are the only definition of its arguments. A job's fields, their order, defaults and
texts are read from there when this module is imported, and so are the options of the command line (`_cli/options.py`).
There are two differences: `model` may be a function that makes the model, and a job has no `progress`, which only
concerns display.

Type checkers cannot follow that, so a ParamSpec gives them the types of `fit`'s arguments: they check calls of
`Job(...)`, with `model` by position and the rest as for `fit`, and treat every attribute as `Any`. They also accept
`progress`, which raises at run time. At run time a job is an ordinary frozen dataclass: it can be pickled, printed and
copied with `dataclasses.replace`, and all fields may be passed by position.

A job is not checked when it is made; `fit` checks its arguments.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from torch import nn

from autoaccum._arguments import check_call
from autoaccum._data.regrouping import check_target, tokens_of
from autoaccum._data.splits import piece_of
from autoaccum._training.api import fit
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from dataclasses import Field
    from typing import ClassVar, Self

_P = ParamSpec("_P")
_T = TypeVar("_T")
NOT_OF_A_JOB = ("progress",)
_TARGETS = ("target_batch", "target_tokens")


def texts_of_arguments(function: Callable[..., Any]) -> dict[str, str]:
    """Return the text of each argument in a Google-style docstring; empty if Python has stripped it (-OO)."""
    section = (inspect.getdoc(function) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def shared_arguments(job: Job, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a job that another function takes under the same names."""
    names = inspect.signature(function).parameters
    return {field.name: getattr(job, field.name) for field in fields(job) if field.name in names}


def _with_the_arguments_of(function: Callable[..., Any]) -> Callable[[type[_T]], type[_T]]:
    """Make a class a frozen dataclass with a function's parameters as fields."""
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
    return f"did you mean {near[0]!r}?" if near else "its arguments are those of autoaccum.fit"


def _typed_like(
    _: Callable[Concatenate[nn.Module, _P], Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, nn.Module | Callable[[], nn.Module], _P], None]]:
    raise NotImplementedError  # for type checkers alone


@_with_the_arguments_of(fit)
class Job:
    """The arguments of `autoaccum.fit`, returned by a recipe's function.

    All are as for `fit`, except that a job has no `progress`. `model` may also be a function without arguments that
    makes the model; it is called when and where the model is needed (such as on the meta device). With such a function,
    `optimizer` must be a function too.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

        @_typed_like(fit)
        def __init__(self, *arguments: Any, **named: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def with_arguments(self, given: Mapping[str, Any]) -> Self:
        """Return the job with other arguments; a target in tokens replaces one in samples, and the reverse."""
        one, other = _TARGETS
        for mine, replaced in ((one, other), (other, one)):
            if given.get(mine) is not None and given.get(replaced) is None:
                given = {**given, replaced: None}
        return replace(self, **given)

    def samples_of_target(self, batch: Any) -> int:
        """Return the samples per update; with `target_tokens`, how many are as long as those of a batch on average.

        Args:
            batch: A batch of the loader.

        Raises:
            InvalidInputError: There is no target, or the batch does not tell its tokens.
        """
        check_target(self.target_batch, self.target_tokens)
        if self.target_tokens is None:
            return int(self.target_batch)
        counts = tokens_of(piece_of(batch, self.split))
        return max(1, round(int(self.target_tokens) * len(counts) / max(sum(counts), 1)))

    def fit_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for `fit`, with the model made.

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
