"""The command line: arguments in, text and exit codes out.

`autoaccum fit RECIPE.py[:function]` loads the recipe's Job, replaces in it what options say, and hands it to
`fit`. Nothing is decided here that the library does not decide. Text for people goes to stderr; stdout is for
results, which is one JSON document with --json and nothing without.

`autoaccum report` is in `_cli/report.py`, `autoaccum run` in `_cli/run.py`, `autoaccum slurm` and `autoaccum jobs` are
in `_cli/slurm.py`.

Exit codes (`ExitCode`):

- 0: done; of a report: it fits, and what was required is met
- 1: an unexpected error, whose traceback is on stderr; or the result could not be written to stdout
- 2: the command line could not be understood
- 3: bad input, or a recipe that cannot be used, or that exits
- 4: not even the smallest micro-batch fits in memory
- 5: the device was lost, an optimizer failed half-way, or another process of the same training failed; start a new
  process, from a checkpoint
- 6: of a report: it fits, but only in smaller micro-batches than --require-micro-batch asks for
- 7: of a report: the device is not there, or has less memory free than --require-free asks for
- 8: another process trains with the checkpoint folder, or has taken it over
- 9: the loss was not finite, and --on-nan stop was asked for
- 75: start again from the checkpoint, with a smaller cut
- 130: interrupted by Ctrl-C
- 143: ended by SIGTERM; `run` passes on the exit codes of its command
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoaccum._callbacks import Callback, check_callbacks
from autoaccum._cli.exit_codes import EPILOG, ExitCode, errors_as_exit_codes, loaded, print_result
from autoaccum._cli.options import RECIPE, check_given, of_fit, takes
from autoaccum._cli.report import report_command
from autoaccum._cli.run import SETTINGS, run_command_line
from autoaccum._cli.slurm import jobs_command, slurm_command
from autoaccum._json import evaluation_record, finite, oom_record, plan_record, probe_record, trial_record
from autoaccum._launch.recipe_exits import exits_refused
from autoaccum._system.output import Dropping, stand_in_for_closed
from autoaccum._training.api import fit
from autoaccum._training.loggers import JSONLinesLog

if TYPE_CHECKING:
    from autoaccum._records import FitResult, MemoryEvent, Plan, ProbeResult

__all__ = ["ExitCode", "app", "main"]

app = typer.Typer(
    name="autoaccum",
    help="Train with the batch size you mean: what fits is found, and running out of memory is survived.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    # An unexpected error is shown as Python shows it: whole, and the same on a terminal and in a log file.
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; the entry point of the `autoaccum` script."""
    stand_in_for_closed()
    try:
        app()
    finally:
        for stream in (sys.stdout, sys.stderr):
            Dropping(stream).flush()


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


app.command("report", epilog=EPILOG)(report_command)
app.command("run", epilog=EPILOG, context_settings=SETTINGS)(run_command_line)
app.command("slurm", epilog=EPILOG)(slurm_command)
app.command("jobs", epilog=EPILOG)(jobs_command)


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
    """Train the job that a recipe describes. Options replace what the job says."""
    is_first = os.environ.get("RANK", "0") == "0"  # of several processes one logs and prints what all have done
    with errors_as_exit_codes():
        check_given(given)
        # What the recipe prints must not get into the document.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            job = loaded(recipe)
            memory_log = _MemoryLog()
            logs = [JSONLinesLog(log)] if log is not None and is_first else []
            with exits_refused(recipe):
                check_callbacks(job.callbacks)
                given["callbacks"] = [*job.callbacks, memory_log, *logs]
                arguments = dataclasses.replace(job, **given).fit_arguments()
                result = fit(**arguments, progress=False if quiet else "auto")
        if as_json and is_first:
            document = json.dumps(_document(recipe, result, memory_log), allow_nan=False)
            print_result(document, done="the training is done")


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
        "resumed_from": result.resumed_from,
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
    }


if __name__ == "__main__":
    main()
