"""The tables of finders in the README and on the page are those of the results; a bracket closes around the truth."""

import json
import re

import pytest

from folders import ROOT


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench  # noqa: PLC0415

    return bench


@pytest.mark.parametrize(("page", "name"), [("README.md", "finders"), ("docs/benchmarks.md", "bench")])
def test_pages_hold_the_tables_of_the_results(bench, page, name):
    results = json.loads((ROOT / "benchmarks" / "results" / "bench-2-cores.json").read_text())

    (shown,) = re.findall(
        rf"<!-- {name}: begin -->\n\n(.*?)\n\n<!-- {name}: end -->", (ROOT / page).read_text(), re.DOTALL
    )

    assert shown == (bench.readme_table(results["finders"]) if name == "finders" else bench.markdown(results))


@pytest.mark.parametrize("at_once", [1, 6])
@pytest.mark.parametrize("truth", [0, 33, 100, 101, 104, 140, 700])
def test_bracket_around_the_truth_closes(bench, truth, at_once):
    low, high, _ = bench.finders.bracket(100, lambda sizes: {n: n <= truth for n in sizes}, at_once)

    assert (low, high) == (truth, truth + 1)
