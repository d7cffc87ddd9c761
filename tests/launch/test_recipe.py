"""Recipes: from a file to the Job in it, and what goes wrong on the way."""

import contextlib
import pickle
import sys
import traceback

import pytest

from autoaccum._launch import load_recipe
from autoaccum._launch.recipe import check_recipe
from autoaccum.errors import InvalidInputError

GOOD = """
import torch
from autoaccum import Job

def job():
    return Job(torch.nn.Linear(2, 1), [], 100)

def other(target_batch=50):
    return Job(torch.nn.Linear(2, 1), [], target_batch)
"""


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe and return its path as the command line would give it."""

    def write(text, name="recipe.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_without_a_name_the_function_called_job_is_taken(recipe):
    assert load_recipe(recipe(GOOD)).target_batch == 100


def test_a_function_can_be_named_after_a_colon(recipe):
    assert load_recipe(recipe(GOOD) + ":other").target_batch == 50


def test_a_colon_in_a_folders_name_is_no_function(tmp_path):
    folder = tmp_path / "run:3"
    folder.mkdir()
    (folder / "recipe.py").write_text(GOOD)

    assert load_recipe(str(folder / "recipe.py")).target_batch == 100


def test_a_recipe_imports_its_neighbours_when_imported_and_when_called(recipe):
    recipe("TARGET = 7", "a_neighbour_for_the_import.py")
    recipe("from torch.nn import Identity", "a_neighbour_for_the_call.py")

    job = load_recipe(
        recipe("""
from a_neighbour_for_the_import import TARGET
from autoaccum import Job

def job():
    from a_neighbour_for_the_call import Identity
    return Job(Identity(), [], TARGET)
""")
    )

    assert job.target_batch == 7


@pytest.mark.parametrize("text", [GOOD, "raise ValueError", "def job(): raise ValueError"])
def test_the_search_path_is_put_back_however_it_ends(recipe, text):
    before = list(sys.path)

    with contextlib.suppress(InvalidInputError):
        load_recipe(recipe(text))

    assert sys.path == before


def test_a_recipe_named_like_a_library_does_not_take_its_place(recipe):
    load_recipe(recipe(GOOD, "json.py"))

    assert not hasattr(sys.modules["json"], "job")


def test_two_recipes_of_one_name_are_two_recipes(recipe, tmp_path):
    (tmp_path / "second").mkdir()
    load_recipe(recipe(GOOD))

    job = load_recipe(recipe(GOOD.replace("100", "30"), "second/recipe.py"))

    assert job.target_batch == 30


def test_classes_of_a_recipe_can_be_pickled_for_a_loaders_workers(recipe):
    job = load_recipe(
        recipe("""
from autoaccum import Job
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

def job():
    return Job(torch.nn.Identity(), Data(), 4)
""")
    )

    assert len(pickle.loads(pickle.dumps(job.loader))) == 4  # noqa: S301 - our own


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match=r"missing\.py' does not exist; pass the path"):
        load_recipe(str(tmp_path / "missing.py"))


def test_a_missing_file_with_a_function_is_named_without_the_function(tmp_path):
    with pytest.raises(InvalidInputError, match=r"missing\.py' does not exist"):
        load_recipe(str(tmp_path / "missing.py:job"))


def test_a_folder_is_refused_as_one(tmp_path):
    with pytest.raises(InvalidInputError, match="is a folder"):
        load_recipe(str(tmp_path))


def test_a_file_that_is_no_python_is_refused(recipe):
    with pytest.raises(InvalidInputError, match=r"its name must end in \.py"):
        load_recipe(recipe(GOOD, "recipe.txt"))


@pytest.mark.parametrize("name", ["", "not a name", "3"])
def test_a_function_that_has_no_name_is_refused(recipe, name):
    with pytest.raises(InvalidInputError, match=r"write RECIPE\.py or RECIPE\.py:function"):
        load_recipe(f"{recipe(GOOD)}:{name}")


def test_a_missing_function_is_answered_with_those_that_are_there(recipe):
    path = recipe("from os import getcwd\ndef train(): ...\ndef evaluate(): ...\ndef _helper(): ...")

    with pytest.raises(InvalidInputError) as refused:
        load_recipe(path)

    assert str(refused.value) == (
        f"the recipe {path!r} has no function job(); its functions: train(), evaluate(); try recipe.py:train"
    )


def test_a_function_that_needs_arguments_is_not_advised(recipe):
    path = recipe("def accuracy(outputs, targets): ...\ndef small(width=8): ...")

    with pytest.raises(InvalidInputError, match=r"its functions: accuracy\(\), small\(\); try recipe.py:small"):
        load_recipe(path)


def test_a_recipe_without_any_function_is_told_to_write_one(recipe):
    with pytest.raises(InvalidInputError, match=r"its functions: none; try a function job\(\) that returns"):
        load_recipe(recipe("x = 1"))


def test_a_function_that_needs_arguments_is_refused_with_their_names(recipe):
    with pytest.raises(InvalidInputError, match=r"needs arguments \(size, depth\).*give them defaults"):
        load_recipe(recipe("def job(size, depth, width=3, *rest, **more): ..."))


def test_a_function_that_returns_something_else_is_refused_with_its_type(recipe):
    with pytest.raises(InvalidInputError, match=r"returned dict; return autoaccum\.Job"):
        load_recipe(recipe("def job(): return {}"))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x = 1\nraise KeyError('weights')", "KeyError"),
        ("def job():\n    raise KeyError('weights')", "KeyError"),
        ("import no_such_module_anywhere", "ModuleNotFoundError"),
        ("def job(:", "SyntaxError"),
    ],
)
def test_a_recipe_that_raises_keeps_its_own_traceback_as_the_cause(recipe, text, what):
    path = recipe(text)

    with pytest.raises(InvalidInputError, match=f"raised {what}") as refused:
        load_recipe(path)

    shown = "".join(traceback.format_exception(refused.value.__cause__))
    assert path in shown
    assert text.splitlines()[-1].strip() in shown
    assert "importlib" not in shown


def test_a_recipe_that_could_not_be_imported_leaves_no_module_behind(recipe):
    before = set(sys.modules)

    with pytest.raises(InvalidInputError):
        load_recipe(recipe("raise ValueError", "unfinished.py"))

    assert not {name for name in set(sys.modules) - before if "unfinished" in name}


def test_ctrl_c_in_a_recipe_is_no_mistake_of_the_recipe(recipe):
    with pytest.raises(KeyboardInterrupt):
        load_recipe(recipe("def job(): raise KeyboardInterrupt"))


def test_a_recipe_is_checked_without_being_called(recipe):
    path = recipe("def job(): raise SystemExit")

    assert check_recipe(path) == f"{path}:job"


def test_a_recipe_without_its_function_does_not_pass_the_check(recipe):
    with pytest.raises(InvalidInputError, match=r"has no function train\(\)"):
        check_recipe(recipe(GOOD) + ":train")
