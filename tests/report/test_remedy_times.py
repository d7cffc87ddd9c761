"""Remedies that `memory=` takes are timed on a device at hand, with a few micro-batches each and without a trace."""

import re

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum import Simulated
from autoaccum._report.table import plain_text
from fallback_models import Wide
from rung_training import is_plain

BATCH = torch.randn(8, 32), torch.randint(0, 4, (8,))


def reported(*, target=64, **options):
    model = Wide()
    report = autoaccum.preflight(model, BATCH, target, loss=nn.functional.cross_entropy, precision="fp32", **options)
    assert is_plain(model)
    return report


@pytest.fixture(scope="module")
def at_hand():
    return reported(device=Simulated("6MiB"))


def test_only_what_memory_takes_is_timed(at_hand):
    by_name = {remedy.name: remedy for remedy in at_hand.remedies}

    assert by_name["activation checkpointing"].memory == ("checkpoint",)
    assert by_name["activation checkpointing"].update_s > 0
    others = [remedy for remedy in at_hand.remedies if not remedy.memory]
    assert others
    assert all(remedy.update_s is None for remedy in others)


def test_table_and_json_tell_the_seconds(at_hand):
    assert re.search(r"safe\s+an update", plain_text(at_hand))
    assert all("update_s" in remedy for remedy in at_hand.to_dict()["remedies"])


def test_nothing_is_timed_for_a_card_that_is_not_here():
    report = reported(target=4096, device_memory="750MiB", measure=False)

    assert any(remedy.memory for remedy in report.remedies)
    assert all(remedy.update_s is None for remedy in report.remedies)
    assert not re.search(r"safe\s+an update", plain_text(report))


def test_what_turns_out_not_to_fit_is_not_timed():
    report = reported(device=Simulated("900KiB"))

    assert all(remedy.update_s is None for remedy in report.remedies if not remedy.safe_micro_batch)


def test_measuring_leaves_no_trace():
    model = Wide()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()

    autoaccum.preflight(model, BATCH, 64, loss=nn.functional.cross_entropy, device=Simulated("6MiB"))

    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
