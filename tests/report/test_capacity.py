from dataclasses import replace

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._estimate.estimate import trace_step  # an argument
from autoaccum._estimate.trace import Estimate  # an argument
from autoaccum._report.capacity import Question, predict
from support.data.reports import GIB, MIB, SIZES, footprint, gpu

ASKED = Question(None, 256, 256, None, "micro_batch")


class OnALine(Estimate):
    """An estimate without a traced step."""

    def at(self, size, room_bytes=None):
        return footprint(size)

    def fits(self, size, room_bytes):
        return self.at(size).reserved_bytes <= room_bytes


def estimate():
    return OnALine(tuple(map(footprint, SIZES)), ("counted in bf16.",), 0.0, None, None)


def test_a_large_gpu_takes_the_target_at_once():
    found = predict(ASKED, gpu(total=22 * GIB), "fp32", estimate())

    assert (found.micro_batch, found.plan.micro_batches) == (256, (256,))
    assert found.headroom_bytes == found.room_bytes - footprint(256).reserved_bytes


def test_a_smaller_gpu_cuts_it():
    found = predict(ASKED, gpu(total=6 * GIB), "fp32", estimate())

    assert 128 <= found.micro_batch < 256
    assert found.plan.micro_batches == (128, 128)
    assert estimate().at(found.micro_batch).reserved_bytes <= found.room_bytes


def test_a_gpu_that_is_too_small_says_what_the_least_step_takes():
    found = predict(ASKED, gpu(total=600 * MIB), "fp32", estimate())

    assert (found.micro_batch, found.plan, found.footprint.size) == (0, None, 1)
    assert found.headroom_bytes < 0


@pytest.mark.parametrize(("limit", "room"), [("2GiB", 2 * GIB), ("100GiB", 22 * GIB - 448 * MIB), (0.5, 11 * GIB)])
def test_a_memory_limit_holds_for_gpus_too(limit, room):
    found = predict(replace(ASKED, memory_limit=limit), gpu(total=22 * GIB), "fp32", estimate())

    assert found.room_bytes == room


def test_it_is_said_where_one_sample_more_than_the_search_allows_would_fit_too():
    assert predict(ASKED, gpu(total=22 * GIB), "fp32", estimate()).is_capped
    assert not predict(ASKED, gpu(total=6 * GIB), "fp32", estimate()).is_capped
    assert not predict(ASKED, gpu(total=600 * MIB), "fp32", estimate()).is_capped


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 96, 16, 16)
        layer = nn.TransformerEncoderLayer(96, 3, 384, batch_first=True, dropout=0.0)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(96, 1000)

    def forward(self, images):
        return self.head(self.blocks(self.patches(images).flatten(2).mT).mean(1))


def language():
    """Embeddings of more indices than their backward pass sums without sorting them."""
    return nn.Sequential(
        nn.Embedding(5000, 128), *(nn.Linear(128, 128) for _ in range(6)), nn.Flatten(), nn.Linear(16384, 10)
    )


@pytest.mark.parametrize(
    ("make", "batch"),
    [(Vision, torch.zeros(2, 3, 64, 64)), (language, torch.zeros(2, 128, dtype=torch.long))],
    ids=["vision", "language"],
)
def test_what_fits_has_room_left_and_does_not_depend_on_the_target(make, batch):
    gpus = [gpu(total=total * MIB + 448 * MIB) for total in range(60, 420, 24)]
    answers = {}
    for target in (333, 1024):
        traced = trace_step(make, batch, loss=lambda outputs, _: outputs.sum(), kind="cuda", most=target)
        asked = replace(ASKED, target_batch=target, most=target)
        for one in gpus:
            found = predict(asked, one, "fp32", traced.estimate(one))
            if found.plan is not None:
                assert found.headroom_bytes >= 0, (target, one)
            answers.setdefault(one, {})[target] = found.micro_batch

    for by_target in answers.values():
        largest = by_target[1024]
        assert all(found == min(largest, target) for target, found in by_target.items())
    assert len({by_target[1024] for by_target in answers.values()}) > len(gpus) / 2


@pytest.mark.parametrize("uncertainty", [0.0, 0.05, 0.5])
def test_a_safe_size_fits_even_if_it_takes_more_than_predicted_by_the_uncertainty(uncertainty):
    known = replace(estimate(), uncertainty=uncertainty)

    found = predict(ASKED, gpu(total=6 * GIB), "fp32", known)

    taken = known.at(found.safe_micro_batch).reserved_bytes
    assert taken * (1 + uncertainty) <= found.room_bytes
    assert known.at(found.safe_micro_batch + 1).reserved_bytes * (1 + uncertainty) > found.room_bytes
    assert (found.safe_micro_batch < found.micro_batch) is (uncertainty > 0)
    assert found.plan.micro_batch <= found.safe_micro_batch
    assert found.verdict == "fits"


def test_what_is_predicted_to_fit_but_for_the_uncertainty_is_tight():
    found = predict(ASKED, gpu(total=720 * MIB), "fp32", replace(estimate(), uncertainty=0.5))

    assert found.verdict == "tight"
    assert (found.micro_batch, found.safe_micro_batch) == (1, 0)
    assert found.plan.micro_batch == 1
    assert found.headroom_bytes >= 0


class Fragmented(nn.Module):
    """Fits any size once, as where an allocator's cache then lies in pieces; afterwards no more than 60 samples."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 2), set()

    def forward(self, features):
        if len(features) > 60 and len(features) in self.seen:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        self.seen.add(len(features))
        return self.layer(features)


def test_size_that_fits_only_in_its_trial_is_reported_smaller():
    batch = torch.randn(8, 4), torch.randint(2, (8,))

    report = autoaccum.preflight(Fragmented(), batch, 64, loss=nn.CrossEntropyLoss(), device="cpu")

    assert report.measured.micro_batch == 57
    assert report.measured.trials[-1].size == report.measured.plan.micro_batch == 32
    assert any("whole step of 64 ran out of memory" in warning for warning in report.warnings)


def test_where_the_plans_own_size_does_not_fit_few_others_are_asked_about():
    asked = []

    class Ragged(OnALine):
        def fits(self, size, room_bytes):
            asked.append(size)
            return size <= 1000 or size == 4095

    known = Ragged((footprint(1),), (), 0.0, None, None)
    found = predict(replace(ASKED, target_batch=8190, most=8190), gpu(), "fp32", known)

    assert 900 < found.plan.micro_batch <= 1000
    assert len(asked) < 100
