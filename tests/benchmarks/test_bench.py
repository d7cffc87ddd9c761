"""Tables on pages are those of the results; a bracket closes around the truth; one limit and one heap for all."""

import itertools
import json
import re
import resource
from dataclasses import replace

import pytest
import torch

from support.processes.folders import ROOT


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

    assert shown == (
        bench.readme_table(results["finders"], results["throughput"]) if name == "finders" else bench.markdown(results)
    )


@pytest.mark.parametrize("at_once", [1, 6])
@pytest.mark.parametrize("truth", [0, 33, 100, 101, 104, 140, 700])
def test_bracket_around_the_truth_closes(bench, truth, at_once):
    low, high, _ = bench.finders.bracket(100, lambda sizes: {n: n <= truth for n in sizes}, at_once)

    assert (low, high) == (truth, truth + 1)


@pytest.fixture
def wide(bench):
    """A workload whose step keeps 4 MiB a sample for the backward pass, and its model and optimizer."""
    layers = [torch.nn.Linear(1, 2**18), torch.nn.Sigmoid(), torch.nn.Sigmoid(), torch.nn.Linear(2**18, 2)]
    workload = replace(
        bench.WORKLOADS["mlp"],
        limit_bytes=64 * 2**20,
        model=lambda: torch.nn.Sequential(*layers),
        batch=lambda size: (torch.randn(size, 1), torch.randint(2, (size,))),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
    return workload, *workload.made()


def test_what_takes_more_than_the_limit_is_refused_and_does_not_count_towards_the_next_attempt(bench, wide):
    workload, model, optimizer = wide

    with bench.finders.limited(workload, model):
        workload.step(model, optimizer, [workload.batch(2)])
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match=r"bytes of 67,108,864"):
                workload.step(model, optimizer, [workload.batch(40)])
            optimizer.zero_grad()
            optimizer.step(lambda: workload.loss(model, workload.batch(4)).backward())  # as Lightning calls it
            workload.step(model, optimizer, [workload.batch(4)] * 2)


def test_loop_by_hand_keeps_its_blocks_once_nothing_is_measured(bench, wide):
    workload, model, optimizer = wide

    def page_faults():
        """Return those of the step with the fewest of ten: the heap grows in some of the first."""
        counts = []
        for _ in range(11):
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
            workload.step(model, optimizer, [workload.batch(4)])
        return min(after - before for before, after in itertools.pairwise(counts))

    with bench.finders.limited(workload, model) as meter:
        measured = page_faults()
        meter.stop()
        assert page_faults() < measured / 4
