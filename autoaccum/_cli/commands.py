"""The commands that start without torch: `run` and `slurm`; `verify` and `doctor`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from autoaccum._cli.exit_codes import ExitCode, complain, print_result
from autoaccum._launch.run import GRACE_S, RETRIES, Options, until_done
from autoaccum._launch.slurm import RESTARTS, WARN_S, Submission, submit
from autoaccum._verify import api as verifying

if TYPE_CHECKING:
    from collections.abc import Callable

_NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}


def _of_run(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what `run` and `slurm` have in common; an option after the command belongs to it."""
    for decorate in (
        click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND [ARGUMENTS]"),
        click.option("--no-placeholder", is_flag=True, help="The command reads the sizes from variables."),
        click.option(
            "--world-size", **_NUMBER, help="Ranks; default: by torchrun's options, WORLD_SIZE or SLURM_NTASKS."
        ),
        click.option("--retries", **_NUMBER, default=RETRIES, show_default=True, help="Restarts after memory ran out."),
        click.option("--micro-batch", **_NUMBER, help="Largest size to begin with; default: what worked before."),
        click.option("--target-batch", **_NUMBER, help="Samples per optimizer step, over all ranks."),
    ):
        command = decorate(command)
    return command


@click.command("run", context_settings={"allow_interspersed_args": False})
@_of_run
@click.option(
    "--grace",
    type=float,
    metavar="SECONDS",
    default=GRACE_S,
    show_default=True,
    help="Time from a signal that asks the command to end to SIGKILL.",
)
@click.option("--no-cache", is_flag=True, help="Neither use nor remember the size that worked.")
@click.option(
    "--verify",
    "check",
    is_flag=False,
    flag_value="stop",
    type=click.Choice(["stop", "warn"]),
    help="First run autoaccum verify; end if gradients depend on the micro-batch, or only warn (--verify=warn).",
)
@click.pass_context
def run_command(
    context: click.Context, /, command: tuple[str, ...], grace: float, no_cache: bool, check: str | None, **given: Any
) -> None:
    """Run any command; restart it with smaller micro-batches if it runs out of memory.

    {micro_batch}, {accum_steps}, {target_batch} and {world_size} are filled in anywhere in its arguments, without a
    shell. Put the launcher inside: autoaccum run -- torchrun train.py.
    """
    options = Options(grace_s=grace, cache=not no_cache, **given)
    if check is not None:
        found = verifying.verify_command(command, options)
        for line in str(found).splitlines():
            complain(line)
        if not found.is_right and check == "stop":
            complain("the command is not started: with another micro-batch it would not be the same training")
            context.exit(ExitCode.WRONG)
    context.exit(until_done(command, options))


@click.command("slurm", context_settings={"allow_interspersed_args": False})
@_of_run
@click.option("--nodes", **_NUMBER, default=1, show_default=True, help="Nodes.")
@click.option(
    "--gpus-per-node", "gpus", **_NUMBER, default=0, help="GPUs on each node; torchrun starts a process for each."
)
@click.option("--time", metavar="TIME", help="Time limit, such as 12:00:00; the job resumes after it.")
@click.option("--mem", metavar="SIZE", help="Memory of each node, such as 64G.")
@click.option(
    "--cpus",
    **_NUMBER,
    help="Cores of each node; default: the cluster's, and at least one for each of torchrun's processes.",
)
@click.option("--partition", metavar="NAME", help="Partition.")
@click.option("--account", metavar="NAME", help="Account.")
@click.option("--array", metavar="RANGE", help="Several jobs, told apart by SLURM_ARRAY_TASK_ID, such as 0-3.")
@click.option("--job-name", metavar="NAME", help="Name of the job; default: that of the script.")
@click.option("--slurm", "others", multiple=True, metavar="KEY=VALUE", help="Any other option of sbatch; repeatable.")
@click.option(
    "--warn-before",
    "warn_s",
    **_NUMBER,
    default=WARN_S,
    show_default=True,
    help="Seconds before the time limit to write a checkpoint in.",
)
@click.option(
    "--max-restarts", "restarts", **_NUMBER, default=RESTARTS, show_default=True, help="Most returns to the queue."
)
@click.option("--preflight", metavar="SCRIPT.py", help="Run autoaccum report on this script first; end if it fails.")
@click.option("--dry-run", is_flag=True, help="Print the batch script and submit nothing; needs no Slurm.")
def slurm_command(
    command: tuple[str, ...], cpus: int | None, others: tuple[str, ...], dry_run: bool, **given: Any
) -> None:
    """Submit a command to Slurm as a job that resumes after its time limit and after preemption.

    The command must resume by itself, as autoaccum.fit(checkpoint=FOLDER) does. The batch script is kept beside the
    log; --dry-run prints it.
    """
    of_run = ("target_batch", "micro_batch", "world_size", "retries", "no_placeholder")
    run = Options(**{name: given.pop(name) for name in of_run})
    about = {name: given.pop(name) for name in ("nodes", "gpus", "warn_s", "restarts", "preflight")}
    sbatch = {name.replace("_", "-"): value for name, value in given.items()} | {"cpus-per-task": cpus}
    for other in others:
        name, _, value = other.partition("=")
        sbatch[name] = value
    job = Submission(command=command, run=run, sbatch=sbatch, **about)
    print_result(job.script().rstrip("\n") if dry_run else submit(job))


@click.command("verify", context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND [ARGUMENTS]")
@click.option("--target-batch", **_NUMBER, help="Samples per optimizer step, over all ranks.")
@click.option("--micro-batch", **_NUMBER, help="Largest size, which others are compared with; default: all samples.")
@click.option("--world-size", **_NUMBER, help="Ranks; default: by torchrun's options, WORLD_SIZE or SLURM_NTASKS.")
@click.option("--no-placeholder", is_flag=True, help="The command reads the sizes from variables.")
@click.option("--steps", **_NUMBER, default=1, show_default=True, help="Optimizer steps to compare.")
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    metavar="SECONDS",
    default=verifying.TIMEOUT_S,
    show_default=True,
    help="Time for each run.",
)
@click.option("--keep-dropout", is_flag=True, help="Leave dropout on; its masks then count as noise.")
@click.option("--deterministic", is_flag=True, help="Have torch use deterministic algorithms.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def verify_command(context: click.Context, /, command: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Check that a command makes the same gradient however its batch is split.

    It runs twice with the whole batch as one micro-batch, and once with each of up to four smaller ones, every time to
    its first optimizer step. {micro_batch} and {accum_steps} are filled in, as by autoaccum run.
    """
    names = ("target_batch", "micro_batch", "world_size", "no_placeholder")
    found = verifying.verify_command(command, Options(**{name: given.pop(name) for name in names}), **given)
    print_result(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    context.exit(ExitCode.DONE if found.is_right else ExitCode.WRONG)


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for bug reports.")
def doctor_command(as_json: bool) -> None:
    """Show the installation, the machine, its limits and its GPUs, and what is wrong with them."""
    from autoaccum._cli.doctor import examine  # noqa: PLC0415 - it imports torch

    found = examine()
    print_result(json.dumps(found.to_dict(), indent=2) if as_json else found.to_text())
