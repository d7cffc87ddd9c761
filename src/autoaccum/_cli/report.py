"""`autoaccum report`: calls `preflight` for a recipe, prints the report, and ends with an exit code for job scripts.

The table, or with --json the document, goes to stdout; all else, the recipe's own output included, goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from autoaccum._cli.exit_codes import ExitCode, complain, errors_as_exit_codes, loaded, print_result, show_traceback
from autoaccum._cli.numbers import check_counts, check_texts
from autoaccum._cli.options import RECIPE, check_given, of_fit, takes
from autoaccum._data.batches import shapes_of
from autoaccum._estimate.gpus import card_named, custom_card
from autoaccum._launch import load_recipe
from autoaccum._launch.job import shared_arguments
from autoaccum._launch.recipe_exits import exits_refused, is_exit
from autoaccum._memory.limits import format_bytes, parse_size
from autoaccum._oom import first_line, is_oom
from autoaccum._report.api import preflight
from autoaccum._report.durations import left_by_slurm, seconds_in
from autoaccum._report.files import check_place
from autoaccum._report.oom_view import read_postmortem, show_postmortem
from autoaccum._report.table import plain_text
from autoaccum._system.output import is_terminal
from autoaccum._system.own_code import raised_here
from autoaccum._training.console import LineProgress
from autoaccum.errors import AutoaccumError, DeviceMissingError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType

    from autoaccum._launch import Job
    from autoaccum._report import Report

# No sequence is longer, and `int` refuses numbers of thousands of digits with an error of its own.
_MOST_DIGITS = 12
# CUDA's error where another process has a card to itself.
_BUSY = "busy or unavailable"
_DONE = "the report was made"


@takes(of_fit("target_batch", "memory_limit", "device", "precision", "strategy"))
def report_command(
    recipe: Annotated[str | None, RECIPE] = None,
    *,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Predict for this card, such as h100-80gb; may be given several times."),
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Predict for a card of so much memory, such as 24GiB.")
    ] = None,
    max_micro_batch: Annotated[int | None, typer.Option(help="The largest micro-batch of interest.")] = None,
    length: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]N",
            help="Sequences of this length; where a batch holds several, by name: --length labels=64.",
        ),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time limit of the training, such as 12h or 1-12:00:00; without it what Slurm leaves the job.",
        ),
    ] = None,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Only predict, whatever device there is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as a page, too.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw memory over the micro-batch (.png, .svg, .pdf), too.")
    ] = None,
    require_micro_batch: Annotated[
        int | None, typer.Option(metavar="N", help="Exit with 6 where the largest micro-batch is below N.")
    ] = None,
    require_free: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Exit with 7 where the device has less free, such as 20GiB.")
    ] = None,
    oom: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Show what was alive when memory ran out, as fit --oom-report wrote it."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no trials on the way.")] = False,
    **given: Any,
) -> None:
    """Report before a training whether it fits and how: measured here, or predicted for cards."""
    if (recipe is None) == (oom is None):
        raise typer.BadParameter("give either a recipe or --oom FILE")
    with errors_as_exit_codes(), _missing_as_exit_code():
        if oom is not None:
            _print(read_postmortem(oom) if as_json else show_postmortem(oom))
            return
        assert recipe is not None
        check_given(given)
        check_counts({"max_micro_batch": max_micro_batch, "require_micro_batch": require_micro_batch})
        check_texts({"device_memory": device_memory, "require_free": require_free, "time": time})
        lengths = _lengths(length or ())
        limit_s = left_by_slurm(os.environ) if time is None else seconds_in(time, name="--time")
        measures = not no_measure and _is_to_measure(given.get("device"), gpu, device_memory)
        free_bytes = None if require_free is None else parse_size(require_free, name="--require-free")
        _check_required(require_micro_batch, max_micro_batch)
        _check_cards(gpu or (), device_memory, no_measure=no_measure)
        _check_files(html, plot)
        with contextlib.redirect_stdout(sys.stderr):
            job = loaded(recipe, load_recipe)
            job = dataclasses.replace(job, **given)
            most = _most(job, max_micro_batch, require_micro_batch)
            with (
                exits_refused(recipe),
                _in_words_of_options([*given, "length", "max_micro_batch"]),
                _status(quiet=quiet) as on_part,
            ):
                report = _report_of(
                    job,
                    gpus=gpu or (),
                    device_memory=device_memory,
                    max_micro_batch=most,
                    length=lengths,
                    time_limit=limit_s,
                    on_part=on_part,
                    measure=None if measures else False,
                    on_trial=(lambda _: None) if quiet else LineProgress().on_trial,
                )
        report = dataclasses.replace(report, subject=dataclasses.replace(report.subject, recipe=recipe))
        # Before the files: a disk that is full must not cost the answer.
        _print(report.to_dict() if as_json else report)
        if html is not None:
            report.save_html(html)
        if plot is not None:
            report.plot(plot)
        code, why = verdict(report, require_micro_batch=require_micro_batch, require_free_bytes=free_bytes)
        if why:
            complain(why)
        raise typer.Exit(code)


def verdict(report: Report, *, require_micro_batch: int | None, require_free_bytes: int | None) -> tuple[ExitCode, str]:
    """Return the exit code for a report, and why it is not 0.

    Several micro-batches for the target batch are no failure. A device with less free memory than required is busy,
    whatever fits in the rest.
    """
    if require_free_bytes is not None:
        asked = f"--require-free {format_bytes(require_free_bytes)}"
        if report.measured is None:
            return ExitCode.NO_DEVICE, f"{asked}: there is no device here whose memory could be free"
        device = report.measured.device
        if device.free_bytes < require_free_bytes:
            return ExitCode.NO_DEVICE, f"{asked}: {device.name} has {format_bytes(device.free_bytes)} free"
    if not report.fits:
        return ExitCode.DOES_NOT_FIT, "does not fit everywhere that was asked about"
    if require_micro_batch is not None and report.micro_batch < require_micro_batch:
        why = f"--require-micro-batch {require_micro_batch}: the largest that fits is {report.micro_batch}"
        return ExitCode.SMALLER, why
    return ExitCode.DONE, ""


def _report_of(job: Job, **asked: Any) -> Report:
    batch = _first_batch(job)
    with _errors_of(job, batch):
        return preflight(batch=batch, **shared_arguments(job, preflight) | asked)


@contextlib.contextmanager
def _errors_of(job: Job, batch: Any) -> Iterator[None]:
    """Show the traceback of an error in the recipe's model, loss or optimizer, and raise one that describes the batch.

    Raises:
        InvalidInputError: There was one.
    """
    try:
        yield
    except Exception as error:
        if (
            isinstance(error, AutoaccumError)
            or is_exit(error)
            or is_oom(error)
            or _BUSY in str(error)
            or raised_here(error)
        ):
            raise
        show_traceback(error)
        name = type(job.model).__name__ if isinstance(job.model, nn.Module) else f"{_name_of(job.model)}()"
        raise InvalidInputError(
            f"the recipe's model ({name}) or its step raised {type(error).__name__}: {first_line(error)}; its first "
            f"batch holds {shapes_of(batch)}; correct the recipe"
        ) from error


@contextlib.contextmanager
def _in_words_of_options(given: Sequence[str]) -> Iterator[None]:
    """Put the names of options into errors in place of Python arguments, for those given on the command line."""
    try:
        yield
    except InvalidInputError as error:
        text = str(error)
        for name in given:
            option = f"--{name.replace('_', '-')}"
            text = re.sub(rf"^{name}(?= )", option, re.sub(rf"(?<![\w-]){name}=", f"{option} ", text))
        error.args = (text,)
        raise


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _is_to_measure(device: str | None, gpu: list[str] | None, device_memory: str | None) -> bool:
    """Whether to measure here: not where --gpu or --device-memory is given on a machine without an accelerator.

    The recipe's own device does not matter, since most recipes name one.
    """
    return device is not None or not (gpu or device_memory) or torch.accelerator.is_available()


def _most(job: Job, asked: int | None, required: int | None) -> int | None:
    """Return the largest size to look for; a required one may be beyond the target batch."""
    if asked is not None or required is None:
        return asked if asked is not None or not isinstance(job.micro_batch, int) else job.micro_batch
    return max(required, int(job.target_batch))


def _lengths(given: Sequence[str]) -> int | dict[str, int] | None:
    """Return lengths as `preflight` takes them: one number, or numbers by name."""
    by_name: dict[str, int] = {}
    for text in given:
        name, _, number = text.rpartition("=")
        is_length = number.isascii() and number.isdigit() and len(number) <= _MOST_DIGITS and int(number) >= 1
        if not is_length or (not name and len(given) > 1):
            raise InvalidInputError(
                f"--length {text} is no length; give one number (--length 512), or numbers by the names under which a "
                "batch holds its sequences (--length input_ids=512 --length labels=64)"
            )
        by_name[name] = int(number)
    return by_name.get("", by_name or None)


def _first_batch(job: Job) -> Any:
    try:
        batches = iter(job.loader)
    except TypeError:
        raise InvalidInputError(
            f"the recipe's job has no loader (loader={job.loader!r}), and a report needs its first batch; pass "
            "autoaccum.Job(model, loader, target_batch) with a DataLoader, or a list of one batch"
        ) from None
    try:
        for batch in batches:
            return batch
    except Exception as error:
        if is_exit(error):
            raise
        # An error of the loader, even where its text is that of a busy device.
        show_traceback(error)
        raise InvalidInputError(f"the recipe's loader raised {type(error).__name__}: {error}; correct it") from error
    raise InvalidInputError(
        f"the recipe's loader ({type(job.loader).__name__}) has no batch, and a report needs the first one"
    )


def _check_cards(names: Sequence[str], device_memory: str | None, *, no_measure: bool) -> None:
    """Refuse unknown cards, and --no-measure without a card, before the recipe is loaded, which may take long."""
    for name in names:
        card_named(name)
    if device_memory is not None:
        parse_size(device_memory, name="--device-memory")
        with _in_words_of_options(["device_memory"]):
            custom_card(device_memory)
    if no_measure and not names and device_memory is None:
        raise InvalidInputError(
            "--no-measure without a card leaves nothing to report; name cards (--gpu h100-80gb), give a card's memory "
            "(--device-memory 24GiB), or measure, without --no-measure"
        )


def _check_required(required: int | None, most: int | None) -> None:
    """Refuse a required micro-batch below 1 or above --max-micro-batch."""
    if required is None:
        return
    if required < 1:
        raise InvalidInputError(f"--require-micro-batch {required} asks for nothing; give 1 or more")
    if most is not None and 1 <= most < required:
        raise InvalidInputError(
            f"--require-micro-batch {required} asks for more than --max-micro-batch {most} looks for; leave one out"
        )


def _check_files(html: Path | None, plot: Path | None) -> None:
    """Refuse files that cannot be written, before anything takes long."""
    for option, path in (("--html", html), ("--plot", plot)):
        if path is not None:
            check_place(path, option)
    if plot is not None:
        # Here, because matplotlib is slow to import and few need it.
        from autoaccum._report.plotting import check_plot  # noqa: PLC0415

        check_plot(plot)


@contextlib.contextmanager
def _status(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current part on a terminal, and nothing elsewhere."""
    if quiet or not is_terminal(sys.stderr):
        yield lambda _: None
        return
    with Console(stderr=True).status("") as status:
        yield status.update


def _print(result: RenderableType | dict[str, Any]) -> None:
    """Print a result to stdout: a document as JSON, anything else in colours on a terminal and plain elsewhere."""
    if isinstance(result, dict):
        print_result(json.dumps(result, allow_nan=False), done=_DONE)
        return
    if is_terminal(sys.stdout):
        Console().print(result)
    else:
        # rich would put escape codes into a file where FORCE_COLOR is set.
        print_result(plain_text(result), done=_DONE)


@contextlib.contextmanager
def _missing_as_exit_code() -> Iterator[None]:
    """Give a missing device, and one that another process has to itself, an exit code other than bad input."""
    try:
        yield
    except DeviceMissingError as error:
        reason = str(error)
    except RuntimeError as error:
        # A card so full that not even CUDA's own share fits.
        if not is_oom(error) and _BUSY not in str(error):
            raise
        reason = first_line(error)
    else:
        return
    complain(f"error: {reason}")
    raise typer.Exit(ExitCode.NO_DEVICE)
