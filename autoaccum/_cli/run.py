"""The command line of `autoaccum run`.

Only the command writes to stdout; autoaccum's lines go to stderr and begin with "autoaccum: ".
"""

from __future__ import annotations

from typing import Annotated

import typer

from autoaccum._cli.exit_codes import errors_as_exit_codes
from autoaccum._launch.run import RETRIES, Options, run_command
from autoaccum._launch.supervisor import GRACE_S

# An option after the command belongs to it.
SETTINGS = {"allow_interspersed_args": False}


def run_command_line(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND [ARGUMENTS]",
            help="The command. {micro_batch}, {accum_steps}, {target_batch} and {world_size} are filled in anywhere in "
            "its arguments, without a shell.",
            show_default=False,
        ),
    ],
    *,
    target_batch: Annotated[int | None, typer.Option(help="Samples per optimizer update, over all ranks.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="The largest micro-batch to start with; default: what worked before, or all.")
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(help="Ranks; default: from torchrun's options in the command, WORLD_SIZE or SLURM_NTASKS."),
    ] = None,
    retries: Annotated[int, typer.Option(help="Restarts after memory ran out.")] = RETRIES,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time from a signal that asks the command to end to SIGKILL.")
    ] = GRACE_S,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither use nor store what worked before.")] = False,
) -> None:
    """Run any command, and restart it with a smaller cut if it runs out of memory."""
    with errors_as_exit_codes():
        options = Options(
            target_batch=target_batch,
            micro_batch=micro_batch,
            world_size=world_size,
            retries=retries,
            grace_s=grace,
            cache=not no_cache,
        )
        code = run_command(command, options)
    raise typer.Exit(code)
