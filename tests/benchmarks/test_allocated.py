"""Trainings whose `torch.cuda.max_memory_allocated()` others published are predicted, without a card."""

import json
import sys

import pytest
import torch

from folders import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import allocated
import allocated_adapters
import allocated_bert
import allocated_doubts
import allocated_images
import allocated_litgpt
import allocated_text
import allocated_videos
import mm_training

from autoaccum._estimate.allocation_trace import Category, Storage, Timeline

GIB = 2**30
# Both of cuBLAS's workspaces of 8.1 MiB are in one segment of 20.
CUBLAS_SEGMENT_BYTES = 20 * 2**20
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
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.card_fakes
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
    with mm_training.InputsOfSoftmax() as mode:
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

    assert "| all | 3 | 6.00% | 33% | 33.3% | 1 | 0 | 1 |" in table
    assert "| text | 1 | 0.10% | 100% | 100.0% | 0 | 0 | 0 |" in table
    assert "| a full 4 | 1,000 | 1,001 | +0.100% |" in table
    assert "| psp | 2 | -1.0% | -8.0% | +6.0% |" in table
    assert "| b | -8.0% |  |" in table


def test_a_number_that_its_source_contradicts_is_told_as_such():
    run = "slowfast_r101_r50_4x16x1_256e_kinetics400_rgb"
    rows = [{"kind": "videos", "of": "slowfast", "run": run, "real_bytes": 1000, "ours_bytes": 500}]

    assert "| videos | 1 | 50.00% | 0% | 0.0% | 1 | 1 | 0 |" in allocated.markdown(rows)


def of_family(family, *errors):
    return [
        {"kind": "images", "of": family, "run": str(error), "real_bytes": 1000, "ours_bytes": 1000 * (1 + error)}
        for error in errors
    ]


def test_a_family_is_in_thousands_of_mebibytes_only_if_every_training_of_it_is():
    all_of_it = of_family("isanet", -0.0234, -0.0220, -0.0240, -0.0236)
    not_one = of_family("hrnet", -0.0234, -0.0220, -0.0240, -0.0010)
    too_few = of_family("dpt", -0.0234)

    rows = allocated.in_own_units(all_of_it + not_one + too_few)

    assert [round(row["real_bytes"]) for row in rows] == 4 * [977] + 5 * [1000]


def test_every_doubt_is_of_a_published_training_that_is_far_off():
    kept = json.loads((ROOT / "benchmarks" / "results" / "allocated.json").read_text())["rows"]

    far = {row["run"] for row in kept if abs(allocated.error_of(row)) > allocated.FAR}

    assert set(allocated_doubts.DOUBTS) <= far


def test_videos_of_one_configuration_count_once_and_not_with_two_sizes(monkeypatch, tmp_path):
    table = tmp_path / "sizes.csv"
    table.write_text("family,config,gpus,mib\ntsn,tsn/a.py,8,8344\ntsn,tsn/a.py,8,8343\ntsm,b.py,8,1\ntsm,b.py,8,2\n")
    monkeypatch.setattr(allocated_videos, "PUBLISHED", table)

    assert [(run["run"], run["real_bytes"]) for run in allocated_videos.runs()] == [("a", 8344 * 2**20)]


def test_the_adapter_to_which_the_length_was_fitted_is_not_among_the_trainings(monkeypatch):
    monkeypatch.setattr(allocated_adapters.importlib.metadata, "version", lambda _name: "5.13.1")

    runs = [run["run"] for run in allocated_adapters.runs()]

    assert allocated_adapters.FITTED_TO not in runs
    assert len(runs) == len(set(runs)) > 50


def test_segments_that_a_step_left_unused_are_returned_before_the_next(monkeypatch):
    sizes = (30 * 2**20, 40 * 2**20)
    storages = [Storage(size_bytes, Category.MADE) for size_bytes in sizes]
    phases = [(0, "before"), (2, "returned"), (4, "returned")]
    timeline = Timeline(1, storages, events=[0, ~0, 1, ~1], phases=phases)
    monkeypatch.setattr(allocated_adapters, "timeline_of", lambda _run: timeline)

    in_all = allocated_adapters.predicted_bytes({})

    assert in_all == 40 * 2**20 + CUBLAS_SEGMENT_BYTES - allocated_adapters._AT_FIRST_BYTES


def test_sizes_of_litgpt_are_in_thousands_of_millions_of_bytes():
    runs = {run["run"]: run for run in allocated_litgpt.runs()}

    assert len(runs) == 13
    assert runs["Llama-2-7B lora 1"]["real_bytes"] == 21_300_000_000


def test_what_cannot_be_predicted_is_left_out_with_its_reason(monkeypatch):
    results = {"rows": [{"kind": "images", "run": "fcn"}], "left_out": {}}

    def refused(_run):
        raise NotImplementedError("an operator that is compiled")

    monkeypatch.setattr(allocated_images, "predicted_bytes", refused)
    allocated.add(results, "images", allocated_images.run_of(ENTRY | {"Name": "fcn"}))

    assert results == {"rows": [], "left_out": {"fcn": "NotImplementedError"}}


def test_sizes_of_bert_large_are_what_the_card_held_without_its_context():
    runs = {run["run"]: run for run in allocated_bert.runs()}

    assert len(runs) == 9
    assert runs["bert-large batch 4"]["real_bytes"] == (14949 - 1343 + 2) * 2**20


def test_softmax_of_the_time_of_bert_large_keeps_its_input():
    kept = []
    scores = torch.randn(2, 3, requires_grad=True)

    with allocated_bert._former_softmax(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, id):
        result = torch.nn.functional.softmax(scores, dim=-1)

    assert [tensor.data_ptr() for tensor in kept] == [scores.data_ptr(), result.data_ptr()]
    torch.testing.assert_close(result, scores.softmax(-1))


@pytest.mark.parametrize(("elements", "held"), [(4095, 2 * 4 * 4095), (8192, 2 * (8192 + 4 * 4))])
def test_states_of_8_bits_are_those_of_large_parameters(elements, held):
    parameter = torch.nn.Parameter(torch.zeros(elements))
    optimizer = allocated_bert._Adam8bit([parameter])

    optimizer.step()

    assert sum(state.nbytes for state in optimizer.state[parameter].values()) == held
