"""Tables of pages are those of the results, and margins of predictions those of the published trainings."""

import json
import subprocess
import sys

import pytest

from autoaccum._estimate.uncertainty import MARGINS  # constants that are written by hand, from the results
from support.processes.folders import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import bench
import margins


@pytest.mark.parametrize(("page", "name"), [("README.md", "finders"), ("docs/benchmarks.md", "bench")])
def test_pages_hold_the_tables_of_the_results(page, name):
    results = json.loads((ROOT / "benchmarks" / "results" / "bench-2-cores.json").read_text())
    finders = bench.readme_table(results["finders"], results["throughput"])
    expected = {"finders": finders, "bench": bench.markdown(results)}[name]

    assert f"<!-- {name}: begin -->\n\n{expected}\n\n<!-- {name}: end -->" in (ROOT / page).read_text()


def test_pages_say_of_gpus_what_the_results_say():
    """If not, `python scripts/gpu_results.py` writes them."""
    command = [sys.executable, str(ROOT / "scripts" / "gpu_results.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_margins_are_what_the_published_trainings_say():
    """If they differ, benchmarks/margins.py prints those of _estimate/uncertainty.py."""
    assert {kind: (margin.share, margin.runs) for kind, margin in MARGINS.items()} == margins.margins()


@pytest.mark.parametrize("source", ["segments", "tensors"])
def test_of_the_published_trainings_95_in_100_stay_within_their_margin(source):
    within = [share <= MARGINS[kind, precision].share for of, kind, precision, share in margins.runs() if of == source]

    assert sum(within) >= 0.95 * len(within)
    assert sum(within) < len(within)


def test_page_has_the_table_of_the_published_peaks_of_tensors():
    """If not, benchmarks/margins.py prints it."""
    assert margins.table() in (ROOT / "docs" / "dev" / "estimates.md").read_text()
