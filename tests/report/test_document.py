import json
import math
import re
from dataclasses import replace

import pytest
import torch

import autoaccum
from autoaccum._report.document import SCHEMA_VERSION
from folders import ROOT
from report_examples import MANY_CARDS, MEASURED, NOTHING_FITS, PREDICTED_ONLY, REPORT

PAGE = ROOT / "docs" / "report.md"


@pytest.mark.parametrize("report", [REPORT, NOTHING_FITS, PREDICTED_ONLY, MANY_CARDS])
def test_every_report_is_strict_json_of_the_same_keys(report):
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False)).keys() == REPORT.to_dict().keys()


def test_numbers_that_json_has_no_word_for_are_null():
    report = replace(REPORT, measured=replace(MEASURED, pace=replace(MEASURED.pace, update_s=math.inf)))

    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))

    assert document["measured"]["pace"]["update_s"] is None


def test_the_document_names_its_version():
    assert REPORT.to_dict()["schema_version"] == SCHEMA_VERSION


def test_the_page_on_reports_describes_every_key_of_the_document():
    assert re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE) == list(REPORT.to_dict())


def test_the_example_on_the_page_runs_where_nothing_is_measured(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    model = torch.nn.Linear(4, 2)
    loader = [(torch.randn(8, 4), torch.randint(0, 2, (8,)))]

    exec(example, {"autoaccum": autoaccum, "model": model, "loader": loader})  # noqa: S102 - our own

    assert (tmp_path / "report.html").is_file()
