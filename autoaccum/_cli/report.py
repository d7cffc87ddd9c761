"""`autoaccum report`: calls `preflight` for a script, prints the report, and exits with a code for job scripts.

The table, or with --json the document, goes to stdout; everything else, including the script's output, to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.console import Console
from torch import nn

from autoaccum._cli.exit_codes import ExitCode, complain, print_result
from autoaccum._data.nesting import shapes_of
from autoaccum._launch.script import ScriptError, errors_explained, first_call
from autoaccum._memory.limits import format_bytes, parse_size
from autoaccum._oom import first_line, is_oom
from autoaccum._report.api import chosen_gpus, preflight
from autoaccum._report.records import TIGHT
from autoaccum._report.table import plain_text
from autoaccum._system.files import check_place
from autoaccum._system.output import is_terminal, write_line
from autoaccum._system.own_code import raised_here
from autoaccum.errors import AutoaccumError, DeviceMissingError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from autoaccum._launch.script import FitCall
    from autoaccum._report import Report

# CUDA's error if another process has exclusive use of a GPU.
_BUSY = "busy or unavailable"
# Arguments that a call of fit cannot have, so that they are always options here.
_OF_PREFLIGHT_ALONE = ("max_micro_batch", "gpus", "device_memory", "display", "ranks", "fsdp")

_SIZE: dict[str, Any] = {"metavar": "SIZE"}
_NUMBER: dict[str, Any] = {"type": click.IntRange(min=1), "metavar": "N"}


@click.command("report", context_settings={"max_content_width": 100})
@click.argument("script", metavar="FILE.py")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]")
@click.option("--target-batch", **_NUMBER, help="Samples per optimizer step.")
@click.option("--target-tokens", **_NUMBER, help="Tokens per optimizer step, in place of samples.")
@click.option("--memory-limit", **_SIZE, help="Memory limit: 600MiB, bytes, or a fraction such as 0.5.")
@click.option("--save-memory", multiple=True, metavar="NAME", help="What saves memory, as in fit; repeatable.")
@click.option("--device", metavar="NAME", help="The device, such as cpu, cuda or cuda:1.")
@click.option("--precision", metavar="NAME", help="auto, fp32, bf16 or fp16.")
@click.option("--gpu", "gpus", multiple=True, metavar="NAME", help="Predict for this GPU (h100-80gb); repeatable.")
@click.option("--device-memory", **_SIZE, help="Predict for a GPU with this memory, such as 24GiB.")
@click.option("--display", **_SIZE, help="Memory of each GPU that a display uses, such as 600MiB.")
@click.option("--ranks", **_NUMBER, default=1, help="Processes that train together, each with its share of the batch.")
@click.option("--fsdp", is_flag=True, help="Predict for a model that is sharded over the ranks.")
@click.option("--max-micro-batch", **_NUMBER, help="The largest micro-batch of interest.")
@click.option("--no-measure", is_flag=True, help="Only predict, whatever device there is.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON document.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Also write the report as a page.")
@click.option("--require-micro-batch", **_NUMBER, help="Exit with 6 if the largest safe micro-batch is below N.")
@click.option("--optimistic", is_flag=True, help="Exit by the sizes that are predicted to fit, not by the safe ones.")
@click.option("--require-free", **_SIZE, help="Exit with 7 if the device has less memory free, such as 20GiB.")
@click.option("--quiet", is_flag=True, help="Do not show the trials.")
@click.pass_context
def report_command(
    context: click.Context,
    /,
    script: str,
    arguments: tuple[str, ...],
    *,
    gpus: tuple[str, ...],
    device_memory: str | None,
    display: str | None,
    ranks: int,
    fsdp: bool,
    max_micro_batch: int | None,
    no_measure: bool,
    as_json: bool,
    html: Path | None,
    require_micro_batch: int | None,
    optimistic: bool,
    require_free: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Report whether and how a training fits: measured here, or predicted for GPUs.

    FILE.py is a training script, which is run up to its first call of autoaccum.fit, Runner.step or
    Accumulator.backward, with what follows -- as its arguments.
    """
    given: dict[str, Any] = {
        name: list(value) if name == "save_memory" else value
        for name, value in options.items()
        if value not in (None, ())
    }
    with _missing_as_exit_code(context):
        # A device that the script names does not matter, because most name one.
        is_of_gpus_alone = not given.get("device") and (gpus or device_memory) and not torch.accelerator.is_available()
        with _in_words_of_options(["require_free"]):
            free_bytes = None if require_free is None else parse_size(require_free, name="require_free")
        _check_gpus(gpus, device_memory, display, no_measure=no_measure)
        if html is not None:
            check_place(html, "--html")  # before any slow work
        with contextlib.redirect_stdout(sys.stderr):
            call = first_call(script, arguments).with_arguments(given)
            batch = _first_batch(call)
            with _in_words_of_options([*given, *_OF_PREFLIGHT_ALONE]), _progress(quiet=quiet):
                most = _most(call, batch, max_micro_batch, require_micro_batch)
                made = _report_of(
                    call,
                    batch,
                    gpus=gpus,
                    device_memory=device_memory,
                    display=display,
                    ranks=ranks,
                    fsdp=fsdp,
                    max_micro_batch=most,
                    measure=False if no_measure or is_of_gpus_alone else None,
                )
        made = dataclasses.replace(
            made,
            subject=dataclasses.replace(made.subject, script=script),
            required_micro_batch=require_micro_batch,
            is_optimistic=optimistic,
        )
        # Before the files: a full disk must not cost the result.
        _print(made.to_dict() if as_json else made)
        if html is not None:
            made.save_html(html)
        code, why = verdict(made, require_free_bytes=free_bytes)
        if why:
            complain(why)
        context.exit(code)


def verdict(report: Report, *, require_free_bytes: int | None) -> tuple[ExitCode, str]:
    """Return the exit code for a report, and why it is not 0.

    Needing several micro-batches is not a failure. A device with less free memory than required counts as busy,
    whatever fits in the rest. Predictions count with the sizes that are safe, unless the report is optimistic.
    """
    if require_free_bytes is not None:
        asked = f"--require-free {format_bytes(require_free_bytes)}"
        if report.measured is None:
            return ExitCode.NO_DEVICE, f"{asked}: there is no device here"
        device = report.measured.device
        if device.free_bytes < require_free_bytes:
            return ExitCode.NO_DEVICE, f"{asked}: {device.name} has {format_bytes(device.free_bytes)} free"
    if not report.fits:
        return ExitCode.DOES_NOT_FIT, "does not fit on every device requested"
    tight = [one for one in report.predicted if one.verdict == TIGHT]
    if tight and not report.is_optimistic:
        names = ", ".join(f"{one.gpu.name} (by {one.uncertainty:.1%})" for one in tight)
        why = f"predicted to fit, but within the uncertainty of the prediction: {names}; --optimistic accepts that"
        return ExitCode.DOES_NOT_FIT, why
    if report.short:
        found = ", ".join(f"{size} on {name}" for name, size in report.short)
        kind = "the largest that fits" if report.is_optimistic else "the largest that safely fits"
        return ExitCode.SMALLER, f"--require-micro-batch {report.required_micro_batch}: {kind} is {found}"
    return ExitCode.DONE, ""


def _report_of(call: FitCall, batch: Any, **asked: Any) -> Report:
    if call.get("target_tokens") is not None:
        samples = call.samples_of_target(batch)
        complain(
            f"a target of {call.get('target_tokens')} tokens is taken as {samples} samples as long as those of the "
            "first batch, padded as they are there"
        )
    with _errors_of(call, batch):
        target = {"target_batch": call.samples_of_target(batch)}
        own = {name: call.arguments[name] for name in call.arguments.keys() & inspect.signature(preflight).parameters}
        return preflight(batch=batch, **own | target | asked)


@contextlib.contextmanager
def _errors_of(call: FitCall, batch: Any) -> Iterator[None]:
    """Turn an error in the script's model, loss or optimizer into one that describes the batch.

    Raises:
        ScriptError: There was such an error.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, AutoaccumError) or is_oom(error) or _BUSY in str(error) or raised_here(error):
            raise
        model = call.get("model")
        name = type(model).__name__ if isinstance(model, nn.Module) else f"{getattr(model, '__name__', model)}()"
        raise ScriptError(
            f"the script's model ({name}) or its step raised {type(error).__name__}: {first_line(error)}; its first "
            f"batch holds {shapes_of(batch)}; correct the script"
        ) from error


@contextlib.contextmanager
def _in_words_of_options(given: Sequence[str]) -> Iterator[None]:
    """Replace Python arguments in errors by the names of their options, for those given on the command line."""
    try:
        yield
    except ScriptError:  # of the script's own words
        raise
    except InvalidInputError as error:
        text = str(error)
        for name in given:
            option = _option_of(name)
            text = re.sub(rf"^{name}(?=[ :])", option, text)
            text = re.sub(rf"(?<![\w-]){name}=(True\b|(?=[\s,;)]|$))", option, text)
            text = re.sub(rf"(?<![\w-]){name}=", f"{option} ", text)
        error.args = (text,)
        raise


def _option_of(name: str) -> str:
    return "--gpu" if name == "gpus" else f"--{name.replace('_', '-')}"


def _most(call: FitCall, batch: Any, asked: int | None, required: int | None) -> int | None:
    """Return the largest size to search; a required size may exceed the target batch."""
    own = call.get("micro_batch")
    most = own if asked is None and isinstance(own, int) else asked
    return most if required is None else max(required, most or call.samples_of_target(batch))


def _first_batch(call: FitCall) -> Any:
    try:
        batches = iter(call.get("loader"))
    except TypeError:
        raise InvalidInputError(
            f"the script's call has no loader (loader={call.get('loader')!r}), and a report needs its first batch; "
            "pass a DataLoader, or a list of one batch"
        ) from None
    with errors_explained("the script's loader"):  # even if its text is that of a busy device
        for batch in batches:
            return batch
    raise InvalidInputError(
        f"the script's loader ({type(call.get('loader')).__name__}) has no batch, and a report needs the first one"
    )


def _check_gpus(names: Sequence[str], device_memory: str | None, display: str | None, *, no_measure: bool) -> None:
    """Raise for unknown GPUs, or --no-measure without a GPU, before the script is run, which may be slow."""
    with _in_words_of_options(_OF_PREFLIGHT_ALONE):
        gpus = chosen_gpus(names, device_memory, display)
    if no_measure and not gpus:
        raise InvalidInputError(
            "--no-measure without a GPU leaves nothing to report; name GPUs (--gpu h100-80gb), pass a GPU's memory "
            "(--device-memory 24GiB), or omit --no-measure"
        )


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[None]:
    """Write what is being done, and each trial, to stderr."""
    log, handler = logging.getLogger("autoaccum.report"), _ToStderr()
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        write_line(f"autoaccum: {record.getMessage()}")


def _print(result: RenderableType | dict[str, Any]) -> None:
    """Print a result to stdout: a document as JSON, anything else coloured on a terminal and plain elsewhere."""
    if isinstance(result, dict):
        print_result(json.dumps(result, allow_nan=False))
        return
    if is_terminal(sys.stdout):
        Console().print(result)
    else:
        # rich would write escape codes to a file if FORCE_COLOR is set.
        print_result(plain_text(result))


@contextlib.contextmanager
def _missing_as_exit_code(context: click.Context) -> Iterator[None]:
    """Give a missing device, or one in exclusive use by another process, an exit code other than bad input."""
    try:
        yield
    except ScriptError as error:
        if not isinstance(error.__cause__, SystemExit):  # which says in words where it was
            write_line("".join(traceback.format_exception(error.__cause__ or error)).rstrip())
        raise
    except DeviceMissingError as error:
        reason = str(error)
    except RuntimeError as error:
        # The GPU is too full even for CUDA's own memory.
        if not is_oom(error) and _BUSY not in str(error):
            raise
        reason = first_line(error)
    else:
        return
    complain(f"error: {reason}")
    context.exit(ExitCode.NO_DEVICE)
