"""`autoaccum slurm` submits a job to a cluster, and `autoaccum jobs` lists such jobs.

The job's id and folder, the list, and the script of --dry-run are results and go to stdout.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from autoaccum._arguments import check_positive_int
from autoaccum._cli.exit_codes import complain, errors_as_exit_codes, loaded, print_result
from autoaccum._cli.numbers import MOST_OF_SLURM, check_counts, check_texts
from autoaccum._cli.options import NOT_ON_SLURM, RECIPE, check_given, of_fit, takes
from autoaccum._engine.options import SHARED, Options
from autoaccum._launch.recipe import check_recipe
from autoaccum._launch.slurm.folder import Submitted
from autoaccum._launch.slurm.listing import jobs_in
from autoaccum._launch.slurm.submission import WARNING_S, Resources, script_of, submit
from autoaccum._launch.slurm.task import Task, resubmission_of
from autoaccum._sizing.planner import format_cut
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._launch.slurm.folder import JobFolder
    from autoaccum._launch.slurm.listing import Listed

FOLDER = Path("autoaccum-jobs")
# Folders that machines seldom share.
_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - nothing is written there


@dataclass(frozen=True)
class TaskWithExitCodes:
    """A task whose process exits with the codes of the command line.

    submitit pickles it and calls it on a node, so if this class moves, its former name must stay.
    """

    task: Task

    def __call__(self) -> dict[str, Any]:
        """Train."""
        try:
            with errors_as_exit_codes():
                return self.task()
        except typer.Exit as end:
            sys.exit(end.exit_code)

    def checkpoint(self) -> Any:
        """Return what submitit runs after a requeue."""
        return resubmission_of(self)


@takes(of_fit(without=NOT_ON_SLURM))
def slurm_command(
    recipe: Annotated[str, RECIPE],
    *,
    nodes: Annotated[int, typer.Option(help="Nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="Cards on each node, with one process each.")] = 0,
    tasks_per_node: Annotated[int, typer.Option(help="Processes on each node, if there are no cards.")] = 1,
    partition: Annotated[str | None, typer.Option(help="As for sbatch, like the next six.")] = None,
    time_limit: Annotated[
        str | None,
        typer.Option("--time", metavar="TIME", help="The time limit; before it, the job is requeued and resumes."),
    ] = None,
    mem: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a node, such as 64G.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(help="Cores of each process.")] = None,
    account: Annotated[str | None, typer.Option()] = None,
    qos: Annotated[str | None, typer.Option()] = None,
    constraint: Annotated[str | None, typer.Option()] = None,
    job_name: Annotated[str | None, typer.Option(help="Default: the recipe's name.")] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY[=VALUE]", help="Any other sbatch option, without dashes; repeatable."),
    ] = None,
    signal_delay: Annotated[
        int, typer.Option(metavar="SECONDS", help="Seconds before the time limit at which to write a checkpoint.")
    ] = WARNING_S,
    folder: Annotated[Path, typer.Option(help="Where each job gets a folder, also for its checkpoints.")] = FOLDER,
    retries: Annotated[int, typer.Option(help="Restarts after memory ran out.")] = 5,
    no_preflight: Annotated[bool, typer.Option("--no-preflight", help="Start without checking the device.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted, without submitting.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
    **given: Any,
) -> None:
    """Submit the training that a recipe describes to Slurm. The job is requeued until training is complete."""
    # The job runs elsewhere.
    given = {name: str(value.absolute()) if isinstance(value, Path) else value for name, value in given.items()}
    with errors_as_exit_codes():
        _check(given, retries)
        counts = {"nodes": nodes, "gpus_per_node": gpus_per_node, "tasks_per_node": tasks_per_node}
        counts |= {"signal_delay": signal_delay, "retries": retries}
        check_counts({**counts, "cpus_per_task": cpus_per_task}, MOST_OF_SLURM)
        check_texts({"time": time_limit, "mem": mem})
        named = {"mem": mem, "partition": partition, "account": account, "qos": qos, "constraint": constraint}
        others = {name: value for name, value in named.items() if value is not None}
        whole = loaded(recipe, check_recipe)
        resources = Resources(
            name=job_name or Path(whole.rpartition(":")[0]).stem,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            tasks_per_node=tasks_per_node,
            time=time_limit,
            cpus_per_task=cpus_per_task,
            warning_s=signal_delay,
            others=others | dict(_key_and_value(text) for text in slurm or ()),
        )
        if dry_run:
            print_result(script_of(resources, folder), done="nothing was submitted")
            return
        job_id, made = submit(
            resources,
            folder,
            lambda made: TaskWithExitCodes(Task(whole, str(made.path), given, checks=not no_preflight)),
            Submitted(
                name=resources.name,
                recipe=whole,
                tasks=resources.tasks,
                retries=retries,
                submitted_at=time.time(),
            ),
        )
        _print_submitted(job_id, made, as_json=as_json)
        if str(made.path).startswith(tuple(f"{place}/" for place in _LOCAL)):
            complain(f"nodes seldom share {made.path.parent}; if the node does not see it, the job leaves no files")


def jobs_command(
    *,
    folder: Annotated[Path, typer.Option(help="The folder passed to `autoaccum slurm`.")] = FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as one JSON document.")] = False,
) -> None:
    """List submitted jobs: their state, progress, cut, and why they were restarted."""
    with errors_as_exit_codes():
        listed = jobs_in(folder)
        if as_json:
            print_result(json.dumps([one.to_dict() for one in listed], allow_nan=False), done="no job was changed")
        elif listed:
            _print_jobs(listed)
        else:
            complain(f"there are no jobs in {folder.absolute()}")


def _check(given: dict[str, Any], retries: int) -> None:
    """Raise now for what `fit` would reject hours later, on a node."""
    for name, value in given.items():
        if isinstance(value, int) and not isinstance(value, bool) and name != "seed":
            check_positive_int(name, value)
    check_given(given)
    Options(**{name: value for name, value in given.items() if name in SHARED})
    if retries < 0:
        raise InvalidInputError(f"--retries {retries} must be 0 or more")


def _key_and_value(text: str) -> tuple[str, str | bool]:
    key, equals, value = text.partition("=")
    key = key.lstrip("-")
    if not key:
        raise InvalidInputError(f"--slurm {text!r} is not an option of sbatch; write --slurm exclude=node7")
    return key, value if equals else True


def _print_submitted(job_id: str, folder: JobFolder, *, as_json: bool) -> None:
    if as_json:
        document = {"job_id": job_id, "folder": str(folder.path), "log": str(folder.log(job_id))}
        print_result(json.dumps(document), done=f"job {job_id} is submitted, in {folder.path}")
        return
    print_result(f"{job_id} {folder.path}", done=f"job {job_id} is submitted, in {folder.path}")
    complain(f"submitted; its log is {folder.log(job_id)}, and `autoaccum jobs` shows its progress")


def _print_jobs(listed: list[Listed]) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("job", "name", "state", "step", "epoch", "samples/s", "loss", "cut", "restarts"):
        table.add_column(title, no_wrap=title != "state")
    for one in listed:
        table.add_row(*_row(one))
    # A file as wide as necessary, so that no line is cut or wrapped.
    console = Console(width=200 if not sys.stdout.isatty() else None, color_system=None, highlight=False)
    console.print(table)
    for one in listed:
        for text in _remarks(one):
            typer.echo(f"{one.folder.name}: {text}")


def _row(one: Listed) -> list[str]:
    submitted, progress = one.submitted, one.progress
    row = ["?" if submitted is None else submitted.job_id or "-", one.folder.name, one.state]
    if progress is None:
        return [*row, "", "", "", "", "", str(len(one.restarts))]
    return [
        *row,
        str(progress.step) if progress.steps is None else f"{progress.step} / {progress.steps}",
        _number(progress.epoch) if progress.epochs is None else f"{_number(progress.epoch)} / {progress.epochs}",
        "" if progress.samples_per_s is None else f"{progress.samples_per_s:.3g}",
        "" if progress.loss is None else f"{progress.loss:.4g}",
        format_cut(progress.micro_batches) if progress.micro_batches else "",
        str(len(one.restarts)),
    ]


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _remarks(one: Listed) -> list[str]:
    """Return the lines below the table."""
    lines = [
        f"start {number} after step {restart.step}: {restart.reason}"
        + ("" if restart.max_micro_batch is None else f"; micro-batches of at most {restart.max_micro_batch}")
        for number, restart in enumerate(one.restarts, start=2)
    ]
    if one.progress is not None and one.progress.error is not None and one.progress.phase == "failed":
        lines.append(one.progress.error)
    if one.reason is not None:
        lines.append(f"Slurm's reason: {one.reason}")
    return [*lines, *one.problems]
