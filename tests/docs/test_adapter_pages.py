"""The pages of adapters: their scripts run, and their changes to a script are as short as they say."""

import logging
import os
import re

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from folders import ROOT

PAGES = ROOT / "docs" / "adapters"
MOST_LINES = 5
REPORTS = {
    "lightning": "windowed.report",
    "accelerate": "report",
    "transformers": "trainer.autoaccum.last_backward",
}


@pytest.fixture
def framework_of_its_own(monkeypatch, tmp_path):
    """Frameworks write to the working folder and to the environment, and Accelerate keeps its state for the process."""
    environment = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    yield
    os.environ.clear()
    os.environ.update(environment)
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning")
@pytest.mark.filterwarnings("ignore::FutureWarning:lightning")
@pytest.mark.parametrize("name", ["lightning", "accelerate", "transformers"])
def test_script_of_the_page_trains_with_the_loaders_batches(name, framework_of_its_own, capsys):
    page = PAGES / f"{name}.md"
    (script,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    names = {"__name__": f"page_{name}"}

    exec(compile(script, str(page), "exec"), names)  # noqa: S102 - the documentation's own

    report = eval(REPORTS[name], names)  # noqa: S307
    assert sum(report.micro_batches) == 100
    assert str(report.micro_batches) in capsys.readouterr().out


@pytest.mark.parametrize("name", ["lightning", "accelerate", "transformers"])
def test_change_to_a_script_is_short(name):
    (change,) = re.findall(r"```diff\n(.*?)```", (PAGES / f"{name}.md").read_text(), flags=re.DOTALL)

    assert len(change.splitlines()) <= MOST_LINES
