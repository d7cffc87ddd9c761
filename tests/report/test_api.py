"""The report from end to end: what is measured on simulated devices and the host, and what is refused."""

import copy
import inspect
import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum import Simulated, preflight
from autoaccum._estimate.footprint import KINDS  # the kinds of memory by name
from autoaccum._memory.limits import format_bytes  # the words of a number
from autoaccum._report import capacity
from autoaccum.errors import DeviceMissingError, InvalidInputError
from support.models.small import assert_bitwise, classifier, labelled, state_of

MIB = 1 << 20
NEEDS_NO_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")


def wide():
    """A model whose samples take much more than itself: some 64 KiB each."""
    return nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 2))


def batch_of(samples=8):
    return torch.randn(samples, 8), torch.randint(0, 2, (samples,))


def report_on(capacity="2MiB", target=64, **options):
    options = {"device": Simulated(capacity), "optimizer": torch.optim.SGD} | options
    model = options.pop("model", None) or wide()
    return preflight(model, options.pop("batch", None) or batch_of(), target, **options)


def test_there_are_at_most_22_arguments():
    assert len(inspect.signature(preflight).parameters) <= 22


def test_what_is_measured_is_what_find_micro_batch_finds():
    model, batch = wide(), batch_of()

    measured = report_on(model=model, batch=batch).measured
    found = autoaccum.find_micro_batch(
        model, batch, optimizer=torch.optim.SGD, device=Simulated("2MiB"), max_micro_batch=64
    )

    assert measured.micro_batch == found.micro_batch < 64
    assert [(one.size, one.fits, one.peak_bytes) for one in measured.trials[: len(found.trials)]] == [
        (one.size, one.fits, one.peak_bytes) for one in found.trials
    ]


def test_the_plan_cuts_the_target_in_what_fits_and_its_peak_lies_within_the_device():
    report = report_on()
    measured = report.measured

    assert report.fits
    assert measured.plan == autoaccum.plan(64, measured.micro_batch)
    assert 0 < measured.peak_bytes <= measured.device.room_bytes == 2 * MIB
    assert measured.headroom_bytes == 2 * MIB - measured.peak_bytes


def test_nothing_that_is_trained_is_changed():
    model, batch = classifier(), labelled(12)
    optimizer = torch.optim.Adam(model.parameters())
    model(batch[0]).sum().backward()
    optimizer.step()
    loader = DataLoader(TensorDataset(*batch), batch_size=4, shuffle=True)
    before = state_of(model), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state(), random.getstate()
    inputs = batch[0].clone()

    preflight(model, batch, 24, optimizer=optimizer, device=Simulated("64MiB"), loader=loader)

    after = state_of(model), optimizer.state_dict(), torch.get_rng_state(), random.getstate()
    assert_bitwise(after[:3], before[:3])
    assert after[3] == before[3]
    assert_bitwise(batch[0], inputs)


def test_where_not_even_one_sample_fits_that_is_the_answer():
    report = report_on("40KiB")

    assert not report.fits
    assert report.micro_batch == 0
    assert "a sample of shapes" in report.measured.reason
    assert {trial.fits for trial in report.measured.trials} == {False}
    assert (report.measured.plan, report.measured.footprint.size) == (None, 1)
    assert "fails" in str(report)


def test_on_the_host_it_is_measured_for_real():
    measured = report_on(device="cpu", memory_limit="64MiB", target=16).measured

    assert measured.micro_batch == 16
    assert measured.device.holds_model is False
    assert measured.pace.step_s > 0


def test_an_epoch_has_the_samples_of_the_loader():
    loader = DataLoader(TensorDataset(torch.randn(40, 8), torch.zeros(40, dtype=torch.long)), batch_size=8)

    pace = report_on(loader=loader).measured.pace

    assert pace.epoch_samples == 40
    assert pace.epoch_s == pytest.approx(40 / pace.samples_per_s)


def test_a_model_that_a_function_makes_is_made_once():
    made = []

    def make():
        made.append(wide())
        return made[-1]

    report = report_on(model=make)

    assert len(made) == 1
    assert report.subject.model == "Sequential"


def test_batchnorm_in_a_cut_window_is_warned_of():
    model = nn.Sequential(nn.Linear(8, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 2))

    assert any("BatchNorm" in warning for warning in report_on(model=model).warnings)
    assert not any("BatchNorm" in warning for warning in report_on("64MiB", model=model).warnings)


def test_choices_are_noted_and_not_printed(capfd):
    report = preflight(wide(), batch_of(), 16, device=Simulated("64MiB"))

    assert any("AdamW(lr=1e-3)" in note for note in report.notes)
    assert capfd.readouterr() == ("", "")


def test_a_loss_over_the_whole_window_is_tried_as_such():
    def contrastive(outputs, targets):
        return (outputs @ outputs.T).logsumexp(dim=1).mean()

    measured = report_on(loss=contrastive, loss_scope="window", target=16, max_micro_batch=16).measured

    assert measured.micro_batch == 16
    assert measured.pace is None


def test_a_gpu_by_two_names_is_told_once():
    report = report_on(device=None, gpus=["RTX 3060", "t4", "NVIDIA GeForce RTX 3060"], measure=False)

    assert [one.gpu.name for one in report.predicted] == ["rtx-3060", "t4"]


def test_gpus_are_asked_about_without_a_device():
    report = report_on(device=None, gpus=["h100-80gb", "t4"], device_memory="24GiB", measure=False)

    assert report.measured is None
    assert [(one.gpu.name, one.precision) for one in report.predicted] == [
        ("h100-80gb", "bf16"),
        ("t4", "fp16"),
        ("device of 24GiB", "bf16"),
    ]
    assert report.fits


@pytest.mark.gpu_fakes
def test_predicted_and_measured_stand_side_by_side():
    report = report_on(gpus="t4")

    assert report.measured.micro_batch == report.micro_batch
    assert report.predicted[0].footprint.parameters_bytes == report.measured.footprint.parameters_bytes


@pytest.mark.parametrize("kind", ["measured", pytest.param("predicted", marks=pytest.mark.gpu_fakes)])
def test_who_holds_memory_at_the_peak_is_traced_for_the_plan(kind):
    report = report_on(gpus=["l4"], optimizer=torch.optim.Adam)

    one = report.measured if kind == "measured" else report.predicted[0]
    step = one.footprint
    assert step.size == one.plan.micro_batch
    assert {"0", "1", "2"} <= {one.module for one in step.alive}
    assert sum(step.bytes_by_kind.values()) == step.peak_bytes


@pytest.mark.parametrize("device", [Simulated("2MiB"), "cpu"], ids=["simulated", "host"])
def test_a_measured_peak_is_split_alike_in_text_page_and_json(device):
    report = report_on(device=device)

    measured = report.to_dict()["measured"]
    (peak,) = {one["peak_bytes"] for one in measured["trials"] if one["size"] == measured["plan"]["micro_batches"][0]}
    split = measured["footprint"]
    parts = {kind: split[f"{kind}_bytes"] for kind in (*KINDS, "outside")}
    of_model = 0 if measured["device"]["holds_model"] else split["parameters_bytes"] + split["buffers_bytes"]
    assert measured["peak_bytes"] == peak
    assert sum(parts.values()) == split["reserved_bytes"] == peak + of_model
    text, page = str(report), report.to_html()
    names = {"optimizer": "optimizer state", "outside": "outside tensors"}
    for kind, size in parts.items():
        name = names.get(kind, kind)
        assert not size or re.search(rf"^ *{name} +{re.escape(format_bytes(size))}$", text, re.MULTILINE)
        assert size <= 0 or f'title="{name}: {format_bytes(size)}"' in page


def test_what_takes_its_time_is_logged(caplog):
    with caplog.at_level("INFO", "autoaccum.report"):
        trials = report_on(gpus=["l4"], target=512).measured.trials

    assert [text.split()[0] for text in caplog.messages if not text[0].isdigit()] == [
        "predicting", "measuring", "tracing", "looking",
    ]  # fmt: skip
    searched = [text.split()[0] for text in caplog.messages if text[0].isdigit()]
    assert searched == [str(one.size) for one in trials][: len(searched)]


@pytest.mark.gpu_fakes
def test_a_step_that_runs_only_for_real_is_reported_without_a_trace():
    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets) * (1.0 if outputs.sum().item() > 0 else 2.0)

    report = report_on(loss=loss, gpus="l4")

    assert report.measured.plan is not None
    assert report.measured.footprint is None
    assert any(note.startswith("what takes the memory on ") and "branches on values" in note for note in report.notes)
    assert report.predicted == ()
    assert report.warnings[0].startswith("not predicted for l4: the model cannot be traced without values: it branches")
    with pytest.raises(InvalidInputError, match="branches on values"):
        report_on(loss=loss, gpus="l4", measure=False, device=None)


def test_the_largest_of_a_loaders_first_batches_counts():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 64), nn.Linear(64, 50)

        def forward(self, tokens):
            return self.head(self.embed(tokens)).mT

    short, long = (torch.zeros(4, length, dtype=torch.long) for length in (10, 300))
    options = {"loss": nn.functional.cross_entropy, "gpus": "l4", "measure": False}

    mixed = autoaccum.preflight(Tokens(), (short, short), 8, loader=[(short, short), (long, long)], **options)
    whole = autoaccum.preflight(Tokens(), (long, long), 8, **options)

    assert mixed.predicted[0].footprint == whole.predicted[0].footprint
    assert any("differ in size" in note for note in mixed.notes)
    assert not any("differ in size" in note for note in whole.notes)


@pytest.mark.gpu_fakes
def test_json_is_the_report_by_its_attributes():
    report = report_on(gpus=["l4"], optimizer=torch.optim.Adam)

    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))

    assert found["version"] == 3
    assert found["fits"] is report.fits
    assert found["predicted"][0]["verdict"] == report.predicted[0].verdict
    assert found["predicted"][0]["plan"]["micro_batches"] == list(report.predicted[0].plan.micro_batches)
    assert found["measured"]["trials"][0]["fits"] is True


@pytest.mark.gpu_fakes
def test_a_function_makes_its_model_without_memory_where_nothing_is_measured():
    made = []

    def make():
        made.append(wide())
        return made[-1]

    report_on(model=make, device=None, gpus="t4", measure=False)

    assert {parameter.device.type for parameter in made[0].parameters()} == {"meta"}


@pytest.mark.gpu_fakes
@pytest.mark.parametrize(("alias", "name"), [("no", "fp32"), ("bf16-mixed", "bf16"), ("16-mixed", "fp16")])
def test_frameworks_names_of_precisions_are_predicted_as_ours(alias, name):
    found, expected = (
        report_on(device=None, gpus="l4", measure=False, precision=asked).predicted[0] for asked in (alias, name)
    )

    assert (found.precision, found.footprint) == (expected.precision, expected.footprint)


def test_random_state_is_as_before_where_a_function_makes_the_model():
    def make():
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002 - the global generator
        return wide()

    def states():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = states()

    report_on(model=make, batch=(torch.ones(2, 8), torch.zeros(2, dtype=torch.long)))

    assert states() == before


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(2), nn.LazyLinear(2)], ids=["function", "module"])
def test_a_lazy_model_is_refused_before_anything_is_predicted(make):
    with pytest.raises(InvalidInputError, match="model: weight of LazyLinear has no shape before a first forward pass"):
        report_on(model=make, device=None, gpus="t4", measure=False)


@NEEDS_NO_GPU
def test_where_there_is_no_accelerator_asking_about_a_gpu_measures_nothing():
    assert report_on(device=None, gpus="t4").measured is None
    assert report_on(device="cpu", gpus="t4", memory_limit="64MiB").measured is not None


def test_a_device_that_is_not_there_has_an_error_of_its_own():
    with pytest.raises(DeviceMissingError, match="cuda:99"):
        report_on(device="cuda:99")


@pytest.mark.gpu_fakes
def test_a_limit_of_the_cpu_does_not_limit_a_gpu():
    limited, free = (report_on(device="cpu", target=16, gpus="l4", memory_limit=limit) for limit in ("64MiB", None))

    assert limited.measured.device.limit_bytes == 64 * MIB
    assert limited.predicted[0].room_bytes == free.predicted[0].room_bytes
    assert "within memory_limit" not in str(limited).partition("l4: ")[2].partition("Job")[0]
    assert any("the CPU's, on which is measured" in note for note in limited.notes)


def test_a_limit_holds_for_gpus_where_nothing_is_measured_on_the_cpu():
    report = report_on(device=None, gpus="l4", measure=False, memory_limit="64MiB")

    assert report.predicted[0].room_bytes == 64 * MIB
    assert "fits  l4: " in str(report)
    assert "predicted, within memory_limit=64MiB" in " ".join(str(report).split())
    assert "predicted, within memory_limit=64MiB." in report.to_html()


@pytest.mark.gpu_fakes
def test_a_prediction_says_how_uncertain_it_is_and_why():
    (found,) = report_on(device=None, gpus="l4", measure=False).to_dict()["predicted"]

    assert 0 < found["uncertainty"] < 0.2
    assert any("published trainings of models without convolutions" in note for note in found["notes"])
    assert found["verdict"] == "fits"


@pytest.mark.parametrize("options", [{}, {"fsdp": True}], ids=["whole", "sharded"])
def test_on_several_ranks_each_has_its_share(options):
    report = report_on(device=None, gpus="l4", measure=False, target=100, ranks=8, **options)

    assert report.predicted[0].plan.target_batch == 13
    assert (report.subject.target_batch, report.subject.ranks) == (100, 8)
    assert any(note.startswith("ranks: 13 samples on each of 8;") for note in report.notes)
    assert "100 samples, 13 on each of 8 ranks" in str(report)
    assert "plan for 13" in str(report)


def test_ranks_take_more_with_buckets_and_less_with_shards():
    def of(**options):
        return report_on(device=None, gpus="l4", measure=False, max_micro_batch=64, target=512, **options).predicted[0]

    alone, buckets, sharded = of(), of(ranks=8), of(ranks=8, fsdp=True)

    footprints = [one.footprint for one in (alone, buckets, sharded)]
    assert footprints[0].peak_bytes < footprints[1].peak_bytes
    assert footprints[2].parameters_bytes == pytest.approx(footprints[0].parameters_bytes / 8, rel=0.1)


@pytest.mark.parametrize("device", ["mps", "xpu:0"])
def test_what_would_help_on_a_device_of_another_kind_is_not_predicted(monkeypatch, device):
    facts = capacity._facts
    monkeypatch.setattr(capacity, "_facts", lambda *of: replace(facts(*of), device=device))

    report = report_on("700KiB", target=256)

    assert any("not known, since the step cannot be traced" in warning for warning in report.warnings)
    assert report.remedies == ()
    assert report.measured.footprint is None
