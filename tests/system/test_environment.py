"""The cap that a wrapper sets for `fit`."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._system.launched import MAX_MICRO_BATCH, max_micro_batch
from autoaccum.errors import InvalidInputError

N = 24


@pytest.fixture
def cap(monkeypatch):
    return lambda value: monkeypatch.setenv(MAX_MICRO_BATCH, str(value))


def train(device="cpu", **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    data = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(16)]
    arguments = {"max_steps": 4, "progress": "lines"} | options
    return autoaccum.fit(model, data, N, device=device, **arguments)


def sizes(result):
    return [max(report.micro_batches) for report in result.history]


@pytest.mark.parametrize("text", ["1", "8", "0012"])
def test_a_whole_number_of_samples_is_read(text):
    assert max_micro_batch({MAX_MICRO_BATCH: text}) == int(text)


@pytest.mark.parametrize("text", ["0", "-1", "", "8.0", "many", " 8", "²", "9" * 5000])
def test_anything_else_is_refused_by_name(text):
    with pytest.raises(InvalidInputError, match=MAX_MICRO_BATCH):
        max_micro_batch({MAX_MICRO_BATCH: text})


def test_fit_refuses_it_before_anything_is_done(cap):
    cap("many")

    with pytest.raises(InvalidInputError, match="AUTOACCUM_MAX_MICRO_BATCH='many'"):
        train()


def test_a_fixed_size_is_capped_and_that_is_said_once(cap, capsys):
    cap(5)

    result = train(micro_batch=12)

    assert sizes(result) == [5] * 4
    assert capsys.readouterr().err.count("micro-batches of at most 5 samples (AUTOACCUM_MAX_MICRO_BATCH=5)") == 1


@pytest.mark.parametrize("probe", ["inline", "before", "off"])
@pytest.mark.parametrize("strategy", [None, "balanced"])
def test_no_search_goes_beyond_the_cap(cap, probe, strategy):
    cap(7)

    result = train(probe=probe, strategy=strategy)

    assert max(sizes(result)) <= 7
    assert result.plan.micro_batch > 4


def test_short_samples_do_not_stand_in_larger_micro_batches_than_it_allows(cap):
    cap(5)
    lengths = [16, 2, 2, 2]
    data = [{"input_ids": torch.ones(6, length, dtype=torch.long)} for length in lengths] * 4

    result = autoaccum.fit(
        nn.Embedding(4, 2),
        data,
        N,
        device="cpu",
        max_steps=4,
        progress=False,
        forward=lambda m, b: m(b["input_ids"]).mean(),
    )

    assert max(sizes(result)) <= 5


def test_a_cap_that_no_window_reaches_changes_and_says_nothing(cap, capsys):
    cap(N)

    assert sizes(train(micro_batch=12)) == [12] * 4
    assert MAX_MICRO_BATCH not in capsys.readouterr().err


def test_what_is_found_under_a_cap_is_remembered_for_runs_under_that_cap(cap, monkeypatch):
    folder = Path(os.environ["AUTOACCUM_CACHE_DIR"])
    cap(3)
    train()
    (capped,) = folder.iterdir()
    found = capped.read_bytes()
    monkeypatch.delenv(MAX_MICRO_BATCH)

    assert train(max_steps=8).plan.micro_batch > 3
    assert len(list(folder.iterdir())) == 2
    assert capped.read_bytes() == found


def test_a_run_that_goes_on_from_a_checkpoint_is_capped_too(cap, tmp_path):
    train(checkpoint=tmp_path, max_steps=3)
    cap(2)

    result = train(checkpoint=tmp_path, max_steps=6)

    assert result.resumed_from == 3
    assert [max(report.micro_batches) for report in result.history if report.step > 3] == [2, 2, 2]
    assert result.plans[-1][1].micro_batch == 2
