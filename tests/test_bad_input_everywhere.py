"""Every public argument refuses what it cannot use, names itself, and leaves everything as it was."""

import pytest
from hypothesis import HealthCheck, given, settings

import autoaccum
from bad_inputs import CALLS, READ_ONLY, arguments_of, cases, judge, missing, of_one_argument, of_several

LISTED = [
    *((f"{name}({argument}) {number}", of_one_argument(name, argument, make))
      for name, call in CALLS.items() if name != "Job"
      for argument, several in call.also.items() if argument in arguments_of(call)
      for number, make in enumerate(several)),
    *((f"{name} {number}", of_several(name, make))
      for name, call in CALLS.items() if name != "Job"
      for number, make in enumerate(call.together)),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_public_argument_has_bad_values():
    assert not missing(), "say in tests/bad_inputs.py (CALLS) what these may be"
    assert set(CALLS) - {"Runner.step", "Runner.evaluate"} | READ_ONLY == set(autoaccum.__all__)


@pytest.mark.parametrize("case", [case for _, case in LISTED], ids=[name for name, _ in LISTED])
def test_listed_bad_input_is_refused_by_name_and_changes_nothing(case, folder):
    assert judge(case, folder) == ""


@settings(
    max_examples=120,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(case=cases())
def test_drawn_bad_input_is_refused_by_name_and_changes_nothing(case, folder):
    assert judge(case, folder) == ""
