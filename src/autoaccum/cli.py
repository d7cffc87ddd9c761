"""The command line: arguments in, text and exit codes out.

`autoaccum fit RECIPE.py[:function]` loads the recipe's Job, replaces in it what options say, and hands it to
`fit`. Nothing is decided here that the library does not decide. Text for people goes to stderr; stdout is for
results, which is one JSON document with --json and nothing without.

Exit codes (`ExitCode`):

- 0: done
- 1: an unexpected error; its traceback is on stderr
- 2: the command line could not be understood
- 3: bad input, or a recipe that cannot be used
- 4: not even the smallest micro-batch fits in memory
- 5: the device was lost, or an optimizer failed half-way; start a new process, from a checkpoint
- 130: interrupted by Ctrl-C
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import sys
import traceback
from importlib.metadata import version
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoaccum.callbacks import Callback
from autoaccum.errors import (
    AutoaccumError,
    CheckpointError,
    DeviceLostError,
    DoesNotFitError,
    InvalidInputError,
    StateDamagedError,
)
from autoaccum.fit import fit
from autoaccum.jobs import load_recipe
from autoaccum.loggers import (
    JSONLinesLog,
    evaluation_record,
    finite,
    oom_record,
    plan_record,
    probe_record,
    trial_record,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoaccum.jobs import Job
    from autoaccum.records import FitResult, MemoryEvent, Plan, ProbeResult


class ExitCode(enum.IntEnum):
    """What the process's exit code says; the module's docstring and `--help` spell them out."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2
    BAD_INPUT = 3
    DOES_NOT_FIT = 4
    DAMAGED = 5
    INTERRUPTED = 130


_EPILOG = (
    "Exit codes: 0 done; 1 unexpected error, with its traceback; 2 command line not understood; "
    "3 bad input or recipe; 4 does not fit in memory; "
    "5 device lost or state damaged, start a new process; 130 interrupted."
)

app = typer.Typer(
    name="autoaccum",
    help="Train with the batch size you mean: what fits is found, and running out of memory is survived.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    # An unexpected error is shown as Python shows it: whole, and the same on a terminal and in a log file.
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; the entry point of the `autoaccum` script."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autoaccum {version('autoaccum')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Hold the options that belong to no command."""


def _auto_or_number(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither 'auto' nor a whole number") from None


@app.command("fit", epilog=_EPILOG)
def fit_command(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE.py[:FUNCTION]",
            help="A Python file and the function in it that returns an autoaccum.Job; without a name: job.",
            show_default=False,
        ),
    ],
    *,
    target_batch: Annotated[int | None, typer.Option(help="Samples an optimizer update is made from.")] = None,
    epochs: Annotated[int | None, typer.Option(help="How often to go through the data.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after so many updates.")] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory to stay within: 600MiB, bytes, or a fraction such as 0.5."),
    ] = None,
    micro_batch: Annotated[
        Any,
        typer.Option(parser=_auto_or_number, metavar="auto|N", help="Samples on the device at once; auto: what fits."),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu, cuda or cuda:1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random generator.")] = None,
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Append each event to this file as a line of JSON."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Train the job that a recipe describes. Options replace what the job says."""
    overrides: dict[str, Any] = {
        "target_batch": target_batch,
        "epochs": epochs,
        "max_steps": max_steps,
        "memory_limit": memory_limit,
        "micro_batch": micro_batch,
        "precision": precision,
        "device": device,
        "seed": seed,
    }
    with _errors_as_exit_codes():
        # What the recipe prints must not get into the document.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            job = _loaded(recipe)
            memory_log = _MemoryLog()
            chosen: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
            chosen["callbacks"] = [*job.callbacks, memory_log, *([] if log is None else [JSONLinesLog(log)])]
            arguments = dataclasses.replace(job, **chosen).fit_arguments()
            result = fit(**arguments, progress=False if quiet else "auto")
        if as_json:
            typer.echo(json.dumps(_document(recipe, result, memory_log), allow_nan=False))


def _loaded(recipe: str) -> Job:
    try:
        return load_recipe(recipe)
    except InvalidInputError as error:
        if error.__cause__ is not None:
            # Something in the recipe raised. The message alone would not tell its author where.
            traceback.print_exception(error.__cause__, file=sys.stderr)
        raise


class _MemoryLog(Callback):
    """Keeps what the document tells and FitResult does not: the last probe and each running out of memory."""

    def __init__(self) -> None:
        self.probe: ProbeResult | None = None
        self.events: list[dict[str, Any]] = []

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:  # noqa: ARG002 - the protocol's
        if probe is not None:
            self.probe = probe

    def on_oom(self, event: MemoryEvent, *, step: int) -> None:
        self.events.append({"step": step, **oom_record(event)})


def _document(recipe: str, result: FitResult, memory_log: _MemoryLog) -> dict[str, Any]:
    """Return what --json prints; docs/cli.md describes it."""
    probe = memory_log.probe
    return {
        "autoaccum": version("autoaccum"),
        "recipe": recipe,
        "steps": result.steps,
        "samples": result.samples,
        "elapsed_s": result.elapsed_s,
        "last_loss": finite(result.history[-1].loss) if result.history else None,
        "plan": plan_record(result.plan),
        "plans": [{"step": step, **plan_record(plan)} for step, plan in result.plans],
        "probe": None
        if probe is None
        else {**probe_record(probe), "trials": [trial_record(trial) for trial in probe.trials]},
        "oom_events": memory_log.events,
        "evaluations": [evaluation_record(evaluation) for evaluation in result.evaluations],
    }


@contextlib.contextmanager
def _errors_as_exit_codes() -> Iterator[None]:
    """Turn what autoaccum raises into a message and an exit code; everything else keeps its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        _complain("interrupted")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except AutoaccumError as error:
        _complain(f"error: {error}")
        raise typer.Exit(_code_for(error)) from None


def _code_for(error: AutoaccumError) -> ExitCode:
    if isinstance(error, InvalidInputError | CheckpointError):
        return ExitCode.BAD_INPUT
    if isinstance(error, DoesNotFitError):
        return ExitCode.DOES_NOT_FIT
    if isinstance(error, DeviceLostError | StateDamagedError):
        return ExitCode.DAMAGED
    return ExitCode.UNEXPECTED


def _complain(text: str) -> None:
    typer.echo(f"autoaccum: {text}", err=True)


if __name__ == "__main__":
    main()
