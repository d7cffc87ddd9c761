"""The command `autoaccum doctor`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from autoaccum._cli.exit_codes import errors_as_exit_codes, print_result
from autoaccum._doctor import examine
from autoaccum._doctor.text import table_of
from autoaccum._report.table import plain_text
from autoaccum._system.output import is_terminal


def doctor_command(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, for bug reports.")] = False,
) -> None:
    """Show the installation, the machine, its limits and its devices, and what of it does not fit together."""
    with errors_as_exit_codes():
        found = examine()
        if as_json:
            print_result(json.dumps(found.to_dict(), indent=2), done="nothing was changed")
        elif is_terminal(sys.stdout):
            Console(highlight=False).print(table_of(found))
        else:
            print_result(plain_text(table_of(found)), done="nothing was changed")
