"""A command line that is not understood is answered in a sentence, as other errors are, instead of a framed box."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import typer
from typer.core import TyperGroup

from autoaccum._cli.exit_codes import ExitCode, complain
from autoaccum._system.exceptions import contextmanager

if TYPE_CHECKING:
    from collections.abc import Iterator

# By name: typer may vendor click. Its text is the help of a command without arguments, which typer shows itself.
_HELP = "NoArgsIsHelpError"
_USAGE_ERROR = cast("type[Exception]", typer.BadParameter.__bases__[0])


class Commands(TyperGroup):
    """The commands of autoaccum."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Parse the options in front of a command."""
        with _in_a_sentence():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Parse a command's own options, and run it."""
        with _in_a_sentence():
            return super().invoke(ctx)


@contextmanager
def _in_a_sentence() -> Iterator[None]:
    try:
        yield
    except _USAGE_ERROR as error:
        if type(error).__name__ == _HELP:
            raise
        context: Any = getattr(error, "ctx", None)
        command = "autoaccum" if context is None else context.command_path
        message = str(getattr(error, "format_message")()).rstrip(".")  # noqa: B009 - of click's base class
        complain(f"error: {message} ({command} --help shows what there is)")
        raise typer.Exit(ExitCode.USAGE) from None
