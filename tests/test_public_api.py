"""The names that users write, and the arguments they give."""

import inspect
import operator
import re

import pytest

import autoaccum
from folders import ROOT

KEYWORD = inspect.Parameter.KEYWORD_ONLY
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD

# Names come first, keyword arguments after; more may be added, none renamed.
SIGNATURES = {
    autoaccum.fit: (
        ["model", "loader", "target_batch"],
        {
            # the loss and the batch
            "loss": None,
            "loss_reduction": None,
            "loss_scope": "micro_batch",
            "forward": None,
            "split": None,
            "target_tokens": None,
            "batchnorm": "keep",
            # the update
            "optimizer": None,
            "scheduler": None,
            "scheduler_interval": "step",
            "lr_scaling": None,
            "base_batch": None,
            "clip_grad_norm": None,
            # the loop
            "epochs": None,
            "max_steps": None,
            "drop_last": False,
            "val_loader": None,
            "val_every": None,
            "metrics": None,
            "callbacks": (),
            "progress": "auto",
            "on_nan": "warn",
            # the device
            "device": None,
            "precision": "auto",
            "micro_batch": "auto",
            "memory_limit": None,
            "memory": None,
            "on_too_large": "raise",
            # long runs, ranks, diagnosis
            "checkpoint": None,
            "checkpoint_every": "10min",
            "resume": "auto",
            "shard": False,
            "noise_scale": False,
            "oom_report": None,
        },
    ),
    autoaccum.find_micro_batch: (
        ["model", "batch"],
        {
            "loss": None,
            "optimizer": None,
            "device": None,
            "precision": "auto",
            "memory_limit": None,
            "max_micro_batch": None,
        },
    ),
    autoaccum.preflight: (
        ["model", "batch", "target_batch"],
        {
            "loss": None,
            "optimizer": None,
            "device": None,
            "precision": "auto",
            "memory_limit": None,
            "forward": None,
            "loss_reduction": None,
            "gpus": (),
            "device_memory": None,
            "loader": None,
        },
    ),
    autoaccum.plan: (["target_batch", "max_micro_batch"], {"trials": ()}),
    autoaccum.Runner: (
        ["model", "optimizer", "plan"],
        {"loss": None, "device": None, "precision": "auto", "clip_grad_norm": None},
    ),
    autoaccum.Runner.step: (["self", "window"], {}),
    autoaccum.Runner.evaluate: (["self", "loader"], {}),
    autoaccum.windows: (["loader", "target_batch"], {"drop_last": False}),
    autoaccum.is_oom: (["exception"], {}),
    autoaccum.Plan: (["target_batch", "micro_batches"], {}),
}
FIELDS = {
    autoaccum.records.ProbeResult: ["micro_batch", "trials", "limit_bytes", "fixed_bytes", "bytes_per_sample"],
    autoaccum.records.Trial: ["size", "fits", "peak_bytes", "elapsed_s"],
    autoaccum.Plan: ["target_batch", "micro_batches", "micro_batch", "accum_steps"],
    autoaccum.records.StepReport: [
        "step",
        "samples",
        "loss",
        "micro_batches",
        "oom_events",
        "elapsed_s",
        "peak_bytes",
        "grad_norm",
        "skipped",
    ],
    autoaccum.records.FitResult: ["steps", "samples", "history", "plan", "plans", "oom_events"],
}
CALLED = [autoaccum.fit, autoaccum.find_micro_batch, autoaccum.plan, autoaccum.Runner, autoaccum.windows]


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature_is_what_users_were_told(function):
    positional, keywords = SIGNATURES[function]

    parameters = inspect.signature(function).parameters

    assert [name for name, parameter in parameters.items() if parameter.kind is POSITIONAL] == positional
    # A target may be in tokens instead.
    needed = [name for name in positional if name != "target_batch" or "target_tokens" not in parameters]
    assert all(parameters[name].default is inspect.Parameter.empty for name in needed)
    assert {name: parameters[name].default for name in keywords} == keywords
    assert all(parameters[name].kind is KEYWORD for name in keywords)


def test_fit_takes_these_in_this_order_and_no_more():
    positional, keywords = SIGNATURES[autoaccum.fit]

    assert list(inspect.signature(autoaccum.fit).parameters) == [*positional, *keywords]


@pytest.mark.parametrize("record", FIELDS, ids=lambda record: record.__name__)
def test_record_tells_what_users_were_told(record):
    told = set(getattr(record, "__dataclass_fields__", ())) | set(dir(record))

    assert set(FIELDS[record]) <= told


def test_runner_tells_its_plan():
    assert "plan:" in inspect.getdoc(autoaccum.Runner)


@pytest.mark.parametrize("function", [autoaccum.find_micro_batch, autoaccum.preflight])
def test_whatever_looks_before_fit_has_its_defaults(function):
    of_fit = inspect.signature(autoaccum.fit).parameters
    own = inspect.signature(function).parameters

    shared = (of_fit.keys() & own.keys()) - {
        "loader",
        "target_batch",
    }  # a report can do without the first, and fit has others in place of the second

    assert {name: own[name].default for name in shared} == {name: of_fit[name].default for name in shared}


def test_a_report_shows_itself_in_every_form():
    assert all(hasattr(autoaccum.records.Report, name) for name in ("fits", "to_dict", "to_html", "_repr_html_"))


def test_errors_are_one_tree():
    kinds = ["DoesNotFit", "InvalidInput", "DeviceLost", "StateDamaged", "UpdateComplete", "Checkpoint", "RankFailed"]
    kinds.append("NotFinite")

    kinds = [getattr(autoaccum, f"{kind}Error") for kind in kinds]

    assert all(issubclass(kind, autoaccum.AutoaccumError) for kind in kinds)
    assert issubclass(autoaccum.InvalidInputError, ValueError)
    assert not issubclass(autoaccum.DoesNotFitError, ValueError)


def test_all_is_sorted_and_each_name_is_there():
    assert list(autoaccum.__all__) == sorted(autoaccum.__all__)
    assert set(autoaccum.__all__) <= set(dir(autoaccum))
    assert all(getattr(autoaccum, name) is not None for name in autoaccum.__all__)


def test_public_functions_are_not_hidden_by_modules_of_their_name():
    assert callable(autoaccum.fit)
    assert callable(autoaccum.plan)


NAMES = [*autoaccum.__all__, *(f"records.{name}" for name in autoaccum.records.__all__)]


@pytest.mark.parametrize("name", NAMES)
def test_public_name_is_documented(name):
    reference = (ROOT / "docs" / "reference.md").read_text()

    assert inspect.getdoc(operator.attrgetter(name)(autoaccum))
    assert re.search(rf"^::: autoaccum\.{name}$", reference, re.MULTILINE)


@pytest.mark.parametrize("function", CALLED, ids=lambda function: function.__name__)
def test_function_documents_every_argument_and_what_it_raises(function):
    documentation = inspect.getdoc(function)

    explained = [name for name in inspect.signature(function).parameters if f"\n    {name}: " in documentation]

    assert explained == list(inspect.signature(function).parameters)
    assert "Raises:\n    InvalidInputError: " in documentation
