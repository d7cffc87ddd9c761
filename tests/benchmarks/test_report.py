"""The tables of finders in the README and on the page are those of the results."""

import json
import re
import sys

import pytest

from folders import ROOT


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import report  # noqa: PLC0415

    yield report
    for name in ("report", "finders", "throughput", "workloads"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("page", "name"), [("README.md", "finders"), ("docs/benchmarks.md", "bench")])
def test_pages_hold_the_tables_of_the_results(report, page, name):
    results = json.loads((ROOT / "benchmarks" / "results" / "bench-2-cores.json").read_text())

    (shown,) = re.findall(
        rf"<!-- {name}: begin -->\n\n(.*?)\n\n<!-- {name}: end -->", (ROOT / page).read_text(), re.DOTALL
    )

    assert shown == (report.readme_table(results["finders"]) if name == "finders" else report.markdown(results))
