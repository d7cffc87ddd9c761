"""The names that users write, and the arguments they give."""

import importlib
import inspect
import operator
import re

import pytest

import autoaccum
from support.processes.folders import ROOT

ARGUMENTS = list(inspect.signature(autoaccum.fit).parameters)
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


def test_fit_has_the_arguments_of_the_reference_in_its_order():
    listed = (ROOT / "docs" / "reference.md").read_text().partition("## Arguments of `fit`")[2].partition("\n## ")[0]

    assert re.findall(r"`(\w+)`", listed.partition("|---|")[2]) == ARGUMENTS


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("autoaccum", name) for name in ("Runner", "Accumulator", "find_micro_batch", "preflight")),
        *((f"autoaccum.integrations.{name}", "auto_accumulate") for name in ("transformers", "accelerate")),
        ("autoaccum.integrations.lightning", "AutoAccumulate"),
    ],
)
def test_arguments_are_in_the_order_of_fit(module, name):
    pytest.importorskip(module.rpartition(".")[2])
    function = getattr(importlib.import_module(module), name)
    named = {name for name, one in inspect.signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY}
    of_its_own = {"loader"} if function is autoaccum.preflight else set()  # of which it measures the speed
    shared = [name for name in inspect.signature(function).parameters if name in (named - of_its_own) & {*ARGUMENTS}]

    assert shared == sorted(shared, key=ARGUMENTS.index)


def test_arguments_whose_values_are_a_list_have_them_in_their_types():
    types = {name: str(one.annotation) for name, one in inspect.signature(autoaccum.fit).parameters.items()}

    assert [name for name in types if "Literal[" in types[name]] == [
        *("loss_reduction", "loss_scope", "batchnorm"),
        *("optimizer", "scheduler_interval", "lr_scaling"),
        *("progress", "on_nan"),
        *("precision", "micro_batch", "on_too_large"),
        "resume",
    ]
