"""The command line of `autoaccum run`.

stdout belongs to the command alone; autoaccum's own lines go to stderr and begin with "autoaccum: ".
"""

from __future__ import annotations

from typing import Annotated

import typer

from autoaccum._cli.exit_codes import errors_as_exit_codes
from autoaccum._launch.run import RETRIES, Options, run_command
from autoaccum._launch.supervisor import GRACE_S

# An option after the command is the command's.
SETTINGS = {"allow_interspersed_args": False}


def run_command_line(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND [ARGUMENTS]",
            help="What to run. {micro_batch}, {accum_steps}, {target_batch} and {world_size} are filled in anywhere in "
            "its arguments; no shell sees them.",
            show_default=False,
        ),
    ],
    *,
    target_batch: Annotated[
        int | None, typer.Option(help="Samples an optimizer update is made from, over all ranks.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="The most samples at once to begin with; without: all, or what worked before.")
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(help="Ranks; without: as torchrun's options in the command say, or WORLD_SIZE, or SLURM_NTASKS."),
    ] = None,
    retries: Annotated[int, typer.Option(help="How often to start again after memory ran out.")] = RETRIES,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="From a signal that asks the command to end to SIGKILL.")
    ] = GRACE_S,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither use nor keep what worked before.")] = False,
) -> None:
    """Run any command, and start it again with a smaller cut when it dies of lack of memory."""
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
