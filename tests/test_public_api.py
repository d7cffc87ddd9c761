"""The names that users write, and the arguments they give."""

import inspect
import operator
import re

import pytest

import autoaccum
from folders import ROOT

CALLED = [autoaccum.fit, autoaccum.find_micro_batch, autoaccum.plan, autoaccum.Runner, autoaccum.windows]


def test_errors_are_one_tree():
    kinds = [getattr(autoaccum, name) for name in autoaccum.__all__ if name.endswith("Error")]

    assert all(issubclass(kind, autoaccum.AutoaccumError) for kind in kinds)
    assert issubclass(autoaccum.InvalidInputError, ValueError)
    assert not issubclass(autoaccum.DoesNotFitError, ValueError)


def test_all_is_sorted_and_each_name_is_there():
    assert list(autoaccum.__all__) == sorted(autoaccum.__all__)
    assert set(autoaccum.__all__) <= set(dir(autoaccum))
    assert all(getattr(autoaccum, name) is not None for name in autoaccum.__all__)


NAMES = [*autoaccum.__all__, *(f"records.{name}" for name in autoaccum.records.__all__)]


def test_public_names_are_documented():
    listed = re.findall(r"^::: autoaccum\.(.*)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)

    assert [name for name in NAMES if not inspect.getdoc(operator.attrgetter(name)(autoaccum))] == []
    assert set(NAMES) <= set(listed)


@pytest.mark.parametrize("function", CALLED, ids=lambda function: function.__name__)
def test_function_documents_every_argument_and_what_it_raises(function):
    documentation = inspect.getdoc(function)

    explained = [name for name in inspect.signature(function).parameters if f"\n    {name}: " in documentation]

    assert explained == list(inspect.signature(function).parameters)
    assert "Raises:\n    InvalidInputError: " in documentation
