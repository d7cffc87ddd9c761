"""What `fit` obeys of the variables that a wrapper sets."""

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


def train(**options):
    torch.manual_seed(0)
    data = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(16)]
    return autoaccum.fit(nn.Linear(3, 1), data, N, **{"device": "cpu", "max_steps": 4, "progress": "lines"} | options)


def sizes(result):
    return [max(report.micro_batches) for report in result.history]


@pytest.mark.parametrize("text", ["0", "-1", "", "8.0", "many", " 8", "²", "9" * 5000])
def test_what_is_no_number_is_refused_by_name_before_anything_is_done(cap, text):
    cap(text)

    with pytest.raises(InvalidInputError, match=MAX_MICRO_BATCH):
        train()
    assert max_micro_batch({MAX_MICRO_BATCH: "0012"}) == 12


def test_a_fixed_size_is_capped_and_that_is_said_once(cap, capsys):
    cap(5)

    assert sizes(train(micro_batch=12)) == [5] * 4
    assert capsys.readouterr().err.count("micro-batches of at most 5 samples (AUTOACCUM_MAX_MICRO_BATCH=5)") == 1


def test_a_cap_that_no_window_reaches_changes_and_says_nothing(cap, capsys):
    cap(N)

    assert sizes(train(micro_batch=12)) == [12] * 4
    assert MAX_MICRO_BATCH not in capsys.readouterr().err


def test_no_search_goes_beyond_the_cap_and_what_it_finds_is_remembered_for_that_cap_alone(cap, monkeypatch):
    folder = Path(os.environ["AUTOACCUM_CACHE_DIR"])
    cap(3)
    assert max(sizes(train())) == 3
    (capped,) = folder.iterdir()
    found = capped.read_bytes()
    monkeypatch.delenv(MAX_MICRO_BATCH)

    assert train(max_steps=8).plan.micro_batch > 3
    assert capped.read_bytes() == found


def test_a_run_that_resumes_from_a_checkpoint_is_capped_too(cap, tmp_path):
    train(checkpoint=tmp_path, max_steps=3)
    cap(2)

    result = train(checkpoint=tmp_path, max_steps=6)

    assert result.resumed_from == 3
    assert [max(report.micro_batches) for report in result.history if report.step > 3] == [2, 2, 2]
