"""The entry point of the command line: the group of commands, its help, and what errors become.

Messages go to stderr and begin with "autoaccum: "; stdout is for results, and for the command that `run` starts.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from autoaccum._cli.exit_codes import MEANINGS, ExitCode, code_for, complain
from autoaccum._system.output import BrokenPipeSafe
from autoaccum.errors import AutoaccumError

# Where a command is, and what it does.
_COMMANDS = {
    "run": ("commands", "Run any command; restart it with smaller micro-batches if it runs out of memory."),
    "slurm": ("commands", "Submit a command to Slurm as a job that resumes after its time limit."),
    "verify": ("commands", "Check that a command makes the same gradient however its batch is split."),
    "report": ("report", "Report whether and how a training fits: measured here, or predicted for GPUs."),
    "doctor": ("commands", "Show the installation, the machine and its limits, and what is wrong with them."),
}


class _Commands(click.Group):
    """Commands that are imported when they are called."""

    def list_commands(self, _: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        home = importlib.import_module(f"autoaccum._cli.{_COMMANDS[name][0]}")
        command: click.Command = getattr(home, f"{name}_command")
        return command

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def format_epilog(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes (run: those of its command, and 2 to 4)"):
            formatter.write_dl([(str(code.value), text) for code, text in MEANINGS.items()])

    def main(self, *args: Any, **named: Any) -> Any:
        try:
            sys.exit(super().main(*args, **{**named, "standalone_mode": False}))
        except click.UsageError as error:
            command = "autoaccum" if error.ctx is None else error.ctx.command_path
            complain(f"error: {error.format_message().rstrip('.')}; {command} --help shows what there is")
            sys.exit(ExitCode.USAGE)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            complain("interrupted")
            context.exit(ExitCode.INTERRUPTED)
        except AutoaccumError as error:
            complain(f"error: {error}")
            for note in getattr(error, "__notes__", ()):
                complain(note.removeprefix("autoaccum: "))
            context.exit(code_for(error))


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from autoaccum._system.own_distribution import __version__  # noqa: PLC0415 - it takes a while to find

        click.echo(f"autoaccum {__version__}")
        context.exit()


@click.group(
    "autoaccum", cls=_Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option("--version", is_flag=True, callback=_print_version, expose_value=False, help="Print the version.")
def cli() -> None:
    """Train with the batch size you want: autoaccum finds what fits, and survives running out of memory.

    Training itself is a Python script that calls autoaccum.fit: python train.py, or torchrun train.py.
    """


def main() -> None:
    """Run the command line; the entry point of the `autoaccum` script."""
    try:
        cli(prog_name="autoaccum")
    finally:
        for stream in (sys.stdout, sys.stderr):
            BrokenPipeSafe(stream).flush()
