"""Runs that others measured on real GPUs are predicted, without a GPU, as the library of models at hand allows."""

import csv
import sys

import pytest

from support.processes.folders import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import published
from published_jobs import IMAGE_MODELS, TEXT_MODELS

with published.RUNS.open() as lines:
    RUNS = {run["run"]: run for run in csv.DictReader(lines)}


def test_every_run_has_a_model_a_gpu_and_a_size_that_the_gpu_has():
    for run in RUNS.values():
        assert run["model"] in IMAGE_MODELS or run["model"] in TEXT_MODELS
        assert published.gpu_named(run["gpu"]).total_bytes == pytest.approx(int(run["total_bytes"]), rel=0.005)
        assert 0 < int(run["nvml_bytes"]) < int(run["total_bytes"]) * 1.02
        assert int(run["nvml_bytes"]) % 2**20 == 0


# Versions of transformers differ by what their models keep, by up to some hundredths; cuDNN's choices by as much.
@pytest.mark.parametrize(
    ("run", "within"),
    [
        ("001-Anova/Transformer/001/distilbert-distilgpt2_Adam_30_1_10-124e", 0.02),
        pytest.param(
            "002-Monte Carlo/Transformer/001/facebook-opt-125m_AdamW_49_1_8-9eec", 0.02, marks=pytest.mark.sweep
        ),
        ("002-Monte Carlo/CNN/001/MobileNetV2_SGD_712_1_8889", 0.03),
    ],
)
@pytest.mark.gpu_fakes
def test_what_a_run_took_of_a_real_gpu_is_predicted(run, within):
    row = published.predicted(RUNS[run])

    assert row["ours_bytes"] == pytest.approx(row["real_bytes"], rel=within)
    assert not row["ours_runs_out"]


@pytest.mark.slow
@pytest.mark.gpu_fakes
def test_a_run_that_ran_out_of_memory_is_said_to():
    row = published.predicted(RUNS["002-Monte Carlo/Transformer/001/facebook-opt-350m_AdamW_48_1_8-0036"])

    assert row["ran_out"]
    assert row["ours_runs_out"]
