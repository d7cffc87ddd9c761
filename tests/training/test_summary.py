"""What a call is summed up as: where its time went, and what would make the next one faster."""

import dataclasses
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import autoaccum
from autoaccum._records import Plan, TimeSpent
from autoaccum._training.summary import advice_on, rows_of
from record_examples import MIB, fit_result

RESULT = dataclasses.replace(fit_result(), elapsed_s=100.0)


class Slow(Dataset):
    """Takes 5 ms for each sample."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.randn(4), torch.tensor(index % 3)


def spent(**seconds):
    return dataclasses.replace(RESULT, time_spent=TimeSpent(**seconds))


def test_fit_tells_what_it_waited_for(tmp_path):
    result = autoaccum.fit(
        nn.Linear(4, 3),
        DataLoader(Slow(), batch_size=8),
        target_batch=8,
        val_loader=DataLoader(Slow(), batch_size=8),
        device="cpu",
        epochs=1,
        checkpoint=tmp_path / "run",
        progress=False,
    )

    found = result.time_spent
    assert found.data_s >= 24 * 0.005
    assert found.evaluation_s >= 24 * 0.005
    assert found.checkpoint_s > 0
    assert found.search_s > 0
    assert found.start_s > 0
    assert found.recomputation_s == 0
    assert sum(dataclasses.astuple(found)) <= result.elapsed_s


def test_windows_that_ran_out_of_memory_count_by_what_was_computed_again():
    failures = iter([True])

    class Fails(nn.Linear):
        def forward(self, inputs):
            if len(inputs) > 2 and next(failures, False):
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            return super().forward(inputs)

    batches = [(torch.randn(8, 4), torch.arange(8) % 3)] * 3
    result = autoaccum.fit(
        Fails(4, 3), batches, target_batch=8, micro_batch=4, device="cpu", loss=nn.CrossEntropyLoss(), progress=False
    )

    (report,) = [report for report in result.history if report.oom_events]
    share = report.recomputed_samples / (8 + report.recomputed_samples)
    assert result.time_spent.recomputation_s == pytest.approx(report.elapsed_s * share)


def test_shares_that_show_are_told():
    rows = dict(rows_of(spent(search_s=12.0, data_s=30.0, checkpoint_s=0.01), 512 * MIB, 1024 * MIB))

    assert rows["time"] == "search 12.0 s (12%), waiting for data 30.0 s (30%)"
    assert rows["peak memory"] == "512.0 MiB of 1.0 GiB"
    assert rows["out of memory"] == "1 time"


@pytest.mark.parametrize(
    ("seconds", "advice"),
    [
        ({"data_s": 20.0}, "the loader is waited for"),
        ({"recomputation_s": 5.0}, "begin with micro_batch=34"),
        ({"evaluation_s": 50.0}, "evaluate less often"),
        ({"checkpoint_s": 20.0}, "write fewer (checkpoint_every=)"),
    ],
)
def test_what_took_long_is_named_with_what_to_change(seconds, advice):
    (told,) = advice_on(spent(**seconds), None, None)

    assert advice in told


def test_memory_that_stayed_free_is_named_where_windows_are_cut():
    (told,) = advice_on(RESULT, 400 * MIB, 1000 * MIB)
    whole = dataclasses.replace(RESULT, plan=Plan(100, (100,)))

    assert told.startswith("600.0 MiB of memory stayed free: larger micro-batches than 34 fit")
    assert list(advice_on(whole, 400 * MIB, 1000 * MIB)) == []
    assert list(advice_on(RESULT, 900 * MIB, 1000 * MIB)) == []


def test_nothing_larger_is_advised_where_sizes_were_searched_for():
    assert list(advice_on(spent(search_s=5.0), 400 * MIB, 1000 * MIB)) == []
    assert list(advice_on(dataclasses.replace(RESULT, resumed_from=3), 400 * MIB, 1000 * MIB)) == []


def test_short_or_fine_call_gets_no_advice():
    assert list(advice_on(RESULT, None, None)) == []
    assert list(advice_on(dataclasses.replace(spent(data_s=1.0), elapsed_s=2.0), None, None)) == []
