"""`fit` is the one definition of what a training can be asked: jobs and commands have its arguments."""

import dataclasses
import inspect
from pathlib import Path

import pytest
import typer
from autoaccum._cli.options import _BY_NAME, IN_RECIPES_ALONE, NOT_ON_SLURM, of_fit

import autoaccum
from autoaccum._cli.app import app
from autoaccum._launch.job import NOT_OF_A_JOB, texts_of_arguments

OF_FIT = inspect.signature(autoaccum.fit).parameters
# Options of the commands themselves, which say nothing of the training.
OF_THE_COMMAND = {
    "fit": {"recipe", "log", "quiet", "as_json"},
    "slurm": {
        *("recipe", "nodes", "gpus_per_node", "tasks_per_node", "partition", "time_limit", "mem", "cpus_per_task"),
        *("account", "qos", "constraint", "job_name", "slurm", "signal_delay", "folder", "retries", "no_preflight"),
        *("dry_run", "as_json"),
    },
}


def options(command):
    return {one.name: one for one in typer.main.get_command(app).commands[command].params}


def test_job_has_all_arguments_of_fit_but_how_it_is_watched():
    assert [field.name for field in dataclasses.fields(autoaccum.Job)] == [n for n in OF_FIT if n not in NOT_OF_A_JOB]


def test_commands_have_all_arguments_of_fit_but_the_named_exceptions():
    on_a_command_line = OF_FIT.keys() - IN_RECIPES_ALONE

    assert options("fit").keys() - OF_THE_COMMAND["fit"] == on_a_command_line
    assert options("slurm").keys() - OF_THE_COMMAND["slurm"] == on_a_command_line - NOT_ON_SLURM


@pytest.mark.parametrize("names", [IN_RECIPES_ALONE, NOT_ON_SLURM, NOT_OF_A_JOB, _BY_NAME])
def test_exceptions_name_arguments_that_there_are(names):
    assert set(names) <= OF_FIT.keys()


@pytest.mark.parametrize("name", OF_FIT)
def test_every_argument_of_fit_is_documented_once(name):
    assert texts_of_arguments(autoaccum.fit)[name]


@pytest.mark.parametrize("name", sorted(OF_FIT.keys() - IN_RECIPES_ALONE))
def test_help_of_an_option_begins_as_the_docstring_of_fit_does(name):
    shown = options("fit")[name].help
    own = _BY_NAME[name].help if name in _BY_NAME else None

    assert shown.endswith(".")
    assert shown == own if own else texts_of_arguments(autoaccum.fit)[name].startswith(shown.removesuffix("."))


@pytest.mark.parametrize(("name", "kind"), [("epochs", int), ("checkpoint_minutes", float), ("checkpoint", Path)])
def test_type_of_an_option_is_that_of_the_argument(name, kind):
    assert of_fit(name)[name].annotation.__origin__ == kind | None
