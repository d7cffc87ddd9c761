"""Recipes: what is imported and called, and what is said of one that cannot be used."""

import sys

import pytest

import autoaccum
from autoaccum._launch.recipe import load_job
from autoaccum.errors import InvalidInputError

JOB = "autoaccum.Job(torch.nn.Linear(1, 1), [], 4, epochs=2)"
RECIPE = f"""
import torch
import autoaccum
from neighbour import NUMBER

def job():
    import late_neighbour
    return {JOB}

def other(size=NUMBER):
    return autoaccum.Job(torch.nn.Linear(1, 1), [], size)

def needs(size, *more):
    return {JOB}

def nothing():
    pass

def leaves():
    raise SystemExit(0)

def fails():
    raise KeyError("x")
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "neighbour.py").write_text("NUMBER = 7\n")
    (tmp_path / "late_neighbour.py").write_text("")
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    yield path
    for name in ("neighbour", "late_neighbour"):
        sys.modules.pop(name, None)


def test_a_recipe_returns_its_job_and_can_import_its_neighbours(recipe):
    before = list(sys.path)

    job, other = load_job(str(recipe)), load_job(f"{recipe}:other")

    assert (job.arguments["target_batch"], job.arguments["epochs"]) == (4, 2)
    assert other.arguments["target_batch"] == 7
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.py", "does not exist"),
        ("", "is a folder"),
        ("recipe.txt", "must end in .py"),
        ("recipe.py:", "names no function"),
        ("recipe.py:two words", "names no function"),
        ("recipe.py:absent", "its functions: job(), other(), needs(), nothing(), leaves(), fails()"),
        ("recipe.py:needs", "needs arguments (size)"),
        ("recipe.py:nothing", "returned NoneType; return autoaccum.Job("),
        ("recipe.py:leaves", "exited by sys.exit(0)"),
        ("recipe.py:fails", "raised KeyError: 'x'; correct the script"),
        ("exits.py", "exited by sys.exit('no data')"),
        ("broken.py", "raised NameError"),
    ],
)
def test_what_cannot_be_used_is_told(recipe, name, said):
    (recipe.parent / "recipe.txt").write_text("")
    (recipe.parent / "exits.py").write_text("raise SystemExit('no data')\n")
    (recipe.parent / "broken.py").write_text("undefined\n")

    with pytest.raises(InvalidInputError) as error:
        load_job(f"{recipe.parent}/{name}")

    assert said in str(error.value)


def test_a_recipe_with_a_librarys_name_does_not_replace_it(tmp_path):
    path = tmp_path / "torch.py"
    path.write_text(f"import torch, autoaccum\ndef job():\n    return {JOB}\n")

    assert isinstance(load_job(str(path)), autoaccum.Job)
    assert hasattr(sys.modules["torch"], "nn")
