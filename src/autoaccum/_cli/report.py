"""`autoaccum report`: a recipe in, its pre-flight report on stdout and in files, and an exit code for job scripts.

The table, or with --json the document, is the result and goes to stdout; all else, what the recipe prints included,
goes to stderr. Nothing is found out here that `preflight` does not find out.
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

# No sequence is as long; `int` refuses numbers of thousands of digits with an error of its own.
_MOST_DIGITS = 12
# What CUDA says where another process has a card to itself.
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
            help="What the training may take, such as 12h or 1-12:00:00; without it what Slurm leaves the job.",
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
    """Say beforehand whether and how a recipe can be trained: measured here, or predicted for cards."""
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
            job = loaded(recipe)
            job = dataclasses.replace(job, **given)
            most = _most(job, max_micro_batch, require_micro_batch)
            with (
                exits_refused(recipe),
                _in_words_of_options([*given, "length", "max_micro_batch"]),
                _told(quiet=quiet) as on_part,
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

    That the target batch takes several micro-batches is no failure: that is what accumulation is for. A device without
    the memory that is required is busy, whatever fits in the rest.
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
        return _preflight(job, batch, **asked)


def _preflight(job: Job, batch: Any, **asked: Any) -> Report:
    return preflight(
        job.model,
        batch,
        job.target_batch,
        loss=job.loss,
        optimizer=job.optimizer,
        device=job.device,
        precision=job.precision,
        memory_limit=job.memory_limit,
        forward=job.forward,
        loss_reduction=job.loss_reduction,
        loss_scope=job.loss_scope,
        epochs=job.epochs,
        max_steps=job.max_steps,
        batchnorm=job.batchnorm,
        strategy=job.strategy,
        loader=job.loader,
        **asked,
    )


@contextlib.contextmanager
def _errors_of(job: Job, batch: Any) -> Iterator[None]:
    """Show the traceback of an error that the recipe's model, loss or optimizer raised, and say with which batch.

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
    """Let errors name options, and not arguments in Python, where the value was given on the command line."""
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
    """Whether a device at hand is meant: not where cards are asked about on a machine without one.

    A recipe that names its device, as most do, is asked about there all the same.
    """
    return device is not None or not (gpu or device_memory) or torch.accelerator.is_available()


def _most(job: Job, asked: int | None, required: int | None) -> int | None:
    """Return the largest size of interest: one that is required is looked for even beyond the target batch."""
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
        # Whatever it says, it is the loader's, and no device that is busy.
        show_traceback(error)
        raise InvalidInputError(f"the recipe's loader raised {type(error).__name__}: {error}; correct it") from error
    raise InvalidInputError(
        f"the recipe's loader ({type(job.loader).__name__}) has no batch, and a report needs the first one"
    )


def _check_cards(names: Sequence[str], device_memory: str | None, *, no_measure: bool) -> None:
    """Refuse cards that are not known, and a question about none, before a recipe takes its time to be loaded."""
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
    """Refuse a micro-batch that is no requirement, or that nobody would look for."""
    if required is None:
        return
    if required < 1:
        raise InvalidInputError(f"--require-micro-batch {required} asks for nothing; give 1 or more")
    if most is not None and 1 <= most < required:
        raise InvalidInputError(
            f"--require-micro-batch {required} asks for more than --max-micro-batch {most} looks for; leave one out"
        )


def _check_files(html: Path | None, plot: Path | None) -> None:
    """Refuse what cannot be written before anything takes its time."""
    for option, path in (("--html", html), ("--plot", plot)):
        if path is not None:
            check_place(path, option)
    if plot is not None:
        # Here, because matplotlib is slow to import and few need it.
        from autoaccum._report.plotting import check_plot  # noqa: PLC0415

        check_plot(plot)


@contextlib.contextmanager
def _told(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield what shows on a terminal what is being done; nothing is shown where there is none."""
    if quiet or not is_terminal(sys.stderr):
        yield lambda _: None
        return
    with Console(stderr=True).status("") as status:
        yield status.update


def _print(result: RenderableType | dict[str, Any]) -> None:
    """Print a result to stdout: a document as JSON; all else in colours on a terminal, and plain where it is none."""
    if isinstance(result, dict):
        print_result(json.dumps(result, allow_nan=False), done=_DONE)
        return
    if is_terminal(sys.stdout):
        Console().print(result)
    else:
        # Not by what rich takes for a terminal: FORCE_COLOR would put escape codes into a file.
        print_result(plain_text(result), done=_DONE)


@contextlib.contextmanager
def _missing_as_exit_code() -> Iterator[None]:
    """Tell a device that is not there, or that another process has to itself, from input that is wrong."""
    try:
        yield
    except DeviceMissingError as error:
        reason = str(error)
    except RuntimeError as error:
        # A card so full that not even CUDA's own share fits: nothing has been tried yet.
        if not is_oom(error) and _BUSY not in str(error):
            raise
        reason = first_line(error)
    else:
        return
    complain(f"error: {reason}")
    raise typer.Exit(ExitCode.NO_DEVICE)
