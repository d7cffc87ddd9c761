"""`autoaccum run` with a stand-in for what it starts, for tests of its command line."""

import pytest
from typer.testing import CliRunner

from autoaccum._cli import app, run


@pytest.fixture
def given(monkeypatch):
    """Put a stand-in for `run_command` in place that keeps what it was given."""
    arguments = []

    def keep(command, options):
        arguments[:] = [command, options]
        return 17

    monkeypatch.setattr(run, "run_command", keep)
    return arguments


def invoke(*arguments):
    return CliRunner().invoke(app.app, ["run", *(str(argument) for argument in arguments)])
