"""The margins that predictions are given are those of the published trainings."""

import sys

import pytest

from autoaccum._estimate.uncertainty import MARGINS
from support.processes.folders import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import margins


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
