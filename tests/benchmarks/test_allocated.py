"""Trainings whose `torch.cuda.max_memory_allocated()` others published are predicted, without a card."""

import sys

import pytest
import torch

from folders import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import allocated
import allocated_images
import allocated_text

GIB = 2**30
ENTRY = {
    "Name": "fcn_r50-d8_4xb2-40k_cityscapes-512x1024",
    "Config": "configs/fcn/fcn_r50-d8_4xb2-40k_cityscapes-512x1024.py",
    "Metadata": {"Training Resources": "4x V100 GPUS", "Memory (GB)": 5.7},
}
TEXT = list(allocated_text.published_runs())
_MISTRAL = ("mistralai/Mistral-7B-v0.1", "full", "4")


def test_every_run_with_text_has_a_model_and_a_size_that_its_card_has():
    assert len(TEXT) == 10
    for run in TEXT:
        assert run["model"] in allocated_text.MODELS
        assert run["card"] == "a100-80gb"
        assert int(run["end_bytes"]) < run["real_bytes"] < 80 * GIB


# What is alive at the optimizer's step, where the peak is, is the same in every version of transformers.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_an_llm_took_of_a_real_card_is_predicted_to_within_a_mebibyte():
    run = next(run for run in TEXT if (run["model"], run["method"], run["batch"]) == _MISTRAL)

    row = allocated.predicted("text", run)

    assert row["ours_bytes"] == pytest.approx(72_434_837_504, abs=2**20)


def test_sizes_of_the_model_zoo_are_gibibytes_but_one():
    assert allocated_images.run_of(ENTRY)["real_bytes"] == int(5.7 * GIB)
    one = ENTRY | {"Metadata": ENTRY["Metadata"] | {"Memory (GB)": 3826.0}}
    assert allocated_images.run_of(one)["real_bytes"] == 3826 * 2**20
    assert allocated_images.run_of(ENTRY | {"Metadata": {"Training Resources": "4x V100 GPUS"}}) is None


def test_a_training_counts_once_however_long_it_went_on_and_not_with_two_sizes():
    told = [("fcn_4xb2-40k_a", 5), ("fcn_4xb2-80k_a", 5), ("fcn_4xb2-80k_b", 5), ("jpu", 5), ("jpu", 9)]

    kept = allocated_images.once_each({"run": name, "real_bytes": size} for name, size in told)

    assert [run["run"] for run in kept] == ["fcn_4xb2-40k_a", "fcn_4xb2-80k_b"]


def test_what_went_into_a_softmax_is_held_until_its_gradient_is_made():
    source = torch.randn(4, 8, requires_grad=True)
    with allocated_images.InputsOfSoftmax() as mode:
        made = source.mul(2).log_softmax(-1)
        assert len(mode.held) == 1
        made.sum().backward()
        assert not mode.held


def test_table_tells_each_kind_and_each_family():
    rows = [
        {"kind": "text", "of": "transformers 4.48.1", "run": "a full 4", "real_bytes": 1000, "ours_bytes": 1001},
        {"kind": "images", "of": "psp", "run": "b", "real_bytes": 1000, "ours_bytes": 920},
        {"kind": "images", "of": "psp", "run": "c", "real_bytes": 1000, "ours_bytes": 1060},
    ]

    table = allocated.markdown(rows)

    assert "| all | 3 | 6.00% | 33% | 33% | 1 | 1 |" in table
    assert "| text | 1 | 0.10% | 100% | 100% | 0 | 0 |" in table
    assert "| a full 4 | 1,000 | 1,001 | +0.100% |" in table
    assert "| psp | 2 | -1.0% | -8.0% | +6.0% |" in table


def test_what_cannot_be_predicted_is_left_out_with_its_reason(monkeypatch):
    results = {"rows": [{"kind": "images", "run": "fcn"}], "left_out": {}}

    def refused(_run):
        raise NotImplementedError("an operator that is compiled")

    monkeypatch.setattr(allocated_images, "timeline_of", refused)
    allocated.add(results, "images", allocated_images.run_of(ENTRY | {"Name": "fcn"}))

    assert results == {"rows": [], "left_out": {"fcn": "NotImplementedError"}}
