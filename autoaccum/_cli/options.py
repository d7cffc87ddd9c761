"""Command-line options for the arguments of `fit`, made from `fit`'s signature and docstring.

An option has the name of its argument, and its help is the first sentence of the argument's text in `fit`'s docstring.
The tables here hold the differences: arguments that only a recipe can set, values written differently on a command
line, and help where `fit`'s text is about Python.
"""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from autoaccum._cli.numbers import check_counts, check_minutes, check_texts
from autoaccum._engine.options import ON_NAN
from autoaccum._engine.precision import PRECISIONS
from autoaccum._engine.saving_names import AUTO, CHUNKED
from autoaccum._launch.job import NOT_OF_A_JOB, texts_of_arguments
from autoaccum._training.api import check_seed, fit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RECIPE = typer.Argument(
    metavar="RECIPE.py[:FUNCTION]",
    help="A Python file and the function in it that returns an autoaccum.Job; default: job.",
    show_default=False,
)
# Python objects, and settings that belong to them. In place of `progress` commands have --quiet.
IN_RECIPES_ALONE = frozenset(
    {
        *("model", "loader", "val_loader", "val_steps", "metrics", "callbacks"),
        *("forward", "split", "batchnorm", "drop_last"),
        *("loss", "loss_reduction", "loss_scope"),
        *("optimizer", "scheduler", "scheduler_interval", "lr_scaling", "base_batch", "clip_grad_norm"),
        *NOT_OF_A_JOB,
    }
)
# Each process of a Slurm job uses the card of its local rank, and a job always resumes from its own checkpoint.
NOT_ON_SLURM = frozenset({"device", "resume"})


def _auto_or_number(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} must be 'auto' or a whole number") from None


def _auto_or_yes_or_no(text: str) -> str | bool:
    meanings: dict[str, str | bool] = {"auto": "auto", "yes": True, "no": False}
    if text not in meanings:
        raise typer.BadParameter(f"{text!r} must be 'auto', 'yes' or 'no'")
    return meanings[text]


class _Form(NamedTuple):
    """How an argument is written on a command line.

    Attributes:
        type: The type of its option.
        metavar: What --help shows for the value.
        help: A text that replaces `fit`'s.
        parser: Parses a value that no type describes.
        flag: The option, if it takes no value.
    """

    type: Any
    metavar: str | None = None
    help: str | None = None
    parser: Callable[[str], Any] | None = None
    flag: str | None = None


# By the type that `fit` declares.
_BY_TYPE = {
    "int": _Form(int),
    "int | None": _Form(int),
    "float | None": _Form(float),
    "str | PathLike[str] | None": _Form(Path, "FOLDER"),
    "str": _Form(str),
    "str | None": _Form(str),
    "bool": _Form(bool),
}
_BY_NAME = {
    "memory_limit": _Form(str, "SIZE", "Memory limit: 600MiB, bytes, or a fraction such as 0.5."),
    "micro_batch": _Form(Any, "auto|N", parser=_auto_or_number),
    "cache": _Form(bool, flag="--no-cache", help="Neither use nor store what earlier runs found."),
    "memory": _Form(
        list[str],
        f"{AUTO}|{CHUNKED}|checkpoint[:NAME]|offload",
        "What saves memory, for time; can be given several times. auto: where not even one sample fits.",
    ),
    "precision": _Form(str, "|".join(PRECISIONS)),
    "device": _Form(str, help="The device, such as cpu, cuda or cuda:1."),
    "checkpoint": _Form(Path, "FOLDER", "Write checkpoints there, and resume from the newest."),
    "resume": _Form(
        Any,
        "auto|yes|no",
        "Resume from a checkpoint: auto, if there is one; yes, there must be one; no, start over.",
        _auto_or_yes_or_no,
    ),
    "oom_report": _Form(Path, "FOLDER", "When memory first runs out, write there what was alive."),
    "shard": _Form(bool, flag="--shard", help="Under torchrun: each rank takes its part of what the loader yields."),
    "on_nan": _Form(str, "|".join(ON_NAN)),
    "noise_scale": _Form(
        bool,
        flag="--noise-scale",
        help="Measure in every 50th window the gradient noise scale, which says whether a larger batch would pay; "
        "Job(noise_scale=N) in the recipe measures every Nth.",
    ),
}


def of_fit(*names: str, without: frozenset[str] = frozenset()) -> dict[str, inspect.Parameter]:
    """Return options for arguments of `fit`, by name and in `fit`'s order. An option not given is None.

    Args:
        names: The arguments; if none, all that a command line can set.
        without: Arguments to leave out.
    """
    texts = texts_of_arguments(fit)
    return {
        name: _option(name, _BY_NAME.get(name) or _BY_TYPE[one.annotation], texts.get(name, ""))
        for name, one in inspect.signature(fit).parameters.items()
        if name not in IN_RECIPES_ALONE | without and name in (names or [name])
    }


def _option(name: str, form: _Form, text: str) -> inspect.Parameter:
    flag = form.flag or (f"--{name.replace('_', '-')}" if form.type is bool else None)
    declared = [flag] if flag else []
    option = typer.Option(
        *declared, metavar=form.metavar, help=form.help or _first_clause(text), parser=form.parser, show_default=False
    )
    kind: Any = form.type if form.parser else form.type | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _first_clause(text: str) -> str:
    found = re.match(r"(.+?)(?:[.;](?=\s)|\.?$)", text)
    return f"{found[1]}." if found is not None else ""


def takes(options: dict[str, inspect.Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options to a command, after its arguments and before its own options.

    The command receives those given as its `**given`: by name, with values as `fit` takes them.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "given"]
        arguments = [one for one in own if one.kind is not one.KEYWORD_ONLY]
        parameters = [*arguments, *options.values(), *own[len(arguments) :]]

        @functools.wraps(command)
        def called(**values: Any) -> None:
            found = {name: values.pop(name) for name in options}
            given = {name: value for name, value in found.items() if value is not None and value != []}
            if "cache" in given:
                given["cache"] = False  # its option is --no-cache
            command(**values, **given)

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        return called

    return decorate


def check_given(given: Mapping[str, Any]) -> None:
    """Raise if a number or text is beyond any training, before the recipe is loaded.

    Raises:
        InvalidInputError: One is.
    """
    counts = ("target_batch", "target_tokens", "epochs", "max_steps", "micro_batch", "checkpoint_steps")
    check_counts({name: given[name] for name in counts if name in given})
    check_seed(given.get("seed"))
    check_minutes("checkpoint_minutes", given.get("checkpoint_minutes"))
    check_texts({"memory_limit": given.get("memory_limit")})
