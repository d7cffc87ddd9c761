"""The entry point of the command line, and `autoaccum fit`.

`autoaccum fit RECIPE.py[:function]` loads the recipe's Job, overrides its arguments with the options given, and calls
`fit`. Messages go to stderr; stdout is for results: one JSON document with --json, otherwise nothing. The
exit codes are in `exit_codes.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoaccum._callbacks import Callback, check_callbacks
from autoaccum._cli import tracebacks
from autoaccum._cli.doctor import doctor_command
from autoaccum._cli.exit_codes import EPILOG, ExitCode, errors_as_exit_codes, loaded, print_result
from autoaccum._cli.options import RECIPE, check_given, of_fit, takes
from autoaccum._cli.report import report_command
from autoaccum._cli.run import SETTINGS, run_command_line
from autoaccum._cli.slurm import jobs_command, slurm_command
from autoaccum._cli.usage import Commands
from autoaccum._json import evaluation_record, finite, oom_record, plan_record, probe_record, trial_record
from autoaccum._launch import load_recipe
from autoaccum._launch.recipe_exit_guard import exits_refused
from autoaccum._system.output import Dropping, stand_in_for_closed
from autoaccum._system.own_distribution import __version__
from autoaccum._training.api import fit
from autoaccum._training.loggers import JSONLinesLog

if TYPE_CHECKING:
    from autoaccum._records import FitResult, MemoryEvent, Plan, ProbeResult

__all__ = ["ExitCode", "app", "main"]

app = typer.Typer(
    name="autoaccum",
    cls=Commands,
    help="Train with the batch size you want: autoaccum finds what fits, and survives running out of memory.",
    epilog=EPILOG,
    no_args_is_help=True,
    # Not typer's, which differ on a terminal and in a log file; `tracebacks` says what is shown.
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; the entry point of the `autoaccum` script."""
    stand_in_for_closed()
    try:
        app(tracebacks.with_option_first(sys.argv[1:]))
    except Exception as error:  # noqa: BLE001 - shown as Python would, with fewer frames
        tracebacks.show(error)
        sys.exit(ExitCode.UNEXPECTED)
    finally:
        for stream in (sys.stdout, sys.stderr):
            Dropping(stream).flush()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autoaccum {__version__}")
        raise typer.Exit


def _show_all(wanted: bool) -> None:
    if wanted:
        tracebacks.show_all()


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
    _traceback: Annotated[
        bool,
        typer.Option(
            tracebacks.OPTION, help="Show all frames of tracebacks, also those of autoaccum.", callback=_show_all
        ),
    ] = False,
) -> None:
    """Hold the options without a command."""


app.command("report", epilog=EPILOG)(report_command)
app.command("run", epilog=EPILOG, context_settings=SETTINGS)(run_command_line)
app.command("slurm", epilog=EPILOG)(slurm_command)
app.command("jobs", epilog=EPILOG)(jobs_command)
app.command("doctor", epilog=EPILOG)(doctor_command)


@app.command("fit", epilog=EPILOG)
@takes(of_fit())
def fit_command(
    recipe: Annotated[str, RECIPE],
    *,
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Append each event to this file as a line of JSON."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
    **given: Any,
) -> None:
    """Train the job that a recipe describes. Options replace the job's arguments."""
    is_first = os.environ.get("RANK", "0") == "0"  # of several processes, one logs and prints
    with errors_as_exit_codes():
        check_given(given)
        # The recipe's own output must not mix with the document.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            job = loaded(recipe, load_recipe)
            memory_log = _MemoryLog()
            logs = [JSONLinesLog(log)] if log is not None and is_first else []
            with exits_refused(recipe):
                check_callbacks(job.callbacks)
                given["callbacks"] = [*job.callbacks, memory_log, *logs]
                arguments = job.with_arguments(given).fit_arguments()
                result = fit(**arguments, progress=False if quiet else "auto")
        if as_json and is_first:
            document = json.dumps(_document(recipe, result, memory_log), allow_nan=False)
            print_result(document, done="training is complete")


class _MemoryLog(Callback):
    """Records what FitResult lacks for the document: the last probe, and each out-of-memory event."""

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
        "autoaccum": __version__,
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
        "resumed_from": result.resumed_from,
        "stopped": result.stopped,
        "noise_scale": finite(result.noise_scale),
        "memory": list(result.memory),
        "time_spent": dataclasses.asdict(result.time_spent),
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
    }


if __name__ == "__main__":
    main()
