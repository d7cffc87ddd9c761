"""How a command line that is not understood is answered."""

import pytest
from typer.testing import CliRunner

from autoaccum._cli.app import app


@pytest.mark.parametrize(
    ("arguments", "named", "help_of"),
    [
        (["fit", "r.py", "--batch-size", "8"], "No such option: --batch-size", "autoaccum fit"),
        (["fit", "r.py", "--target-batch", "many"], "'--target-batch'", "autoaccum fit"),
        (["run", "--target-batch", "8"], "-- COMMAND", "autoaccum run"),
        (["--wrong"], "No such option: --wrong", "autoaccum"),
        (["fitt"], "No such command 'fitt'", "autoaccum"),
    ],
)
def test_what_is_not_understood_is_answered_in_a_line_that_names_the_help(arguments, named, help_of):
    done = CliRunner().invoke(app, arguments, prog_name="autoaccum")

    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2
    assert line.startswith("autoaccum: error: ")
    assert named in line
    assert f"({help_of} --help shows what there is)" in line


def test_no_command_at_all_shows_the_help():
    done = CliRunner().invoke(app, [], prog_name="autoaccum")

    assert "Usage: autoaccum" in done.output
    assert "error:" not in done.output
