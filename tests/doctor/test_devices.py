"""What the doctor says of cards, by stand-ins for the driver: machines without a card have none."""

import warnings

import pytest
import torch

from autoaccum._doctor import devices
from autoaccum._doctor.findings import Fact, Problem
from autoaccum._memory.nvml import CardReading, Driver
from autoaccum._records import Neighbour

GIB = 2**30
FREE = CardReading("NVIDIA H200", 140 * GIB, 139 * GIB, ())
FULL = CardReading("NVIDIA H200", 140 * GIB, GIB, (Neighbour(17, "python", 138 * GIB),))


@pytest.fixture
def machine(monkeypatch):
    def of(cards=(), driver=None, built="13.2", sees=None, warns=""):
        """Describe a machine with some cards, and what PyTorch makes of them."""

        def accelerator():
            if warns:
                warnings.warn(warns, stacklevel=1)
            return None if sees is None else torch.device(sees)

        monkeypatch.setattr(devices.nvml, "read_driver", lambda: driver)
        monkeypatch.setattr(devices.nvml, "cards_of", lambda wanted: tuple(cards) if wanted is None or wanted else ())
        monkeypatch.setattr(devices, "find_accelerator", accelerator)
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(cards))

    return of


def found(environment=None):
    findings = list(devices.of_devices(environment or {}))
    facts = {one.name: one for one in findings if isinstance(one, Fact)}
    return facts, [one.text for one in findings if isinstance(one, Problem)]


def test_machine_without_a_card_has_no_problem(machine):
    machine()

    facts, problems = found()

    assert (facts["NVIDIA driver"].value, facts["used by PyTorch"].text) == (None, "the CPU alone")
    assert problems == []


def test_cards_are_shown_with_what_is_free(machine):
    machine([FREE, FULL], Driver("580.65", (13, 0)), sees="cuda")

    facts, (problem,) = found()

    assert facts["NVIDIA driver"].text == "580.65, for CUDA up to 13.0"
    assert facts["card 0"].text == "NVIDIA H200, 139.0 GiB free of 140.0 GiB"
    assert facts["card 1"].text.endswith("used by python (pid 17)")
    assert facts["used by PyTorch"].text == "2 x cuda"
    assert problem.startswith("card 1 has 1.0 GiB of 140.0 GiB free (python (pid 17) use it)")


@pytest.mark.parametrize(
    ("described", "environment", "said"),
    [
        ({"built": None}, {}, "is built without CUDA"),
        ({"cards": []}, {}, "sees no card"),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' hides the 1 card"),
        ({"driver": Driver("535.1", (12, 2))}, {}, "supports up to CUDA 12.2; update the driver"),
        ({"warns": "CUDA initialization: unknown error\nmore"}, {}, "(CUDA initialization: unknown error)"),
        ({}, {}, "(it gives no reason)"),
    ],
)
def test_why_pytorch_does_not_use_a_card(machine, described, environment, said):
    machine(**{"cards": [FREE], "driver": Driver("580.65", (13, 0)), **described})

    _, (problem,) = found(environment)

    assert said in problem


def test_variables_that_change_what_is_measured_are_shown(machine):
    machine()

    facts, (problem,) = found({"CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"})

    assert facts["PYTORCH_ALLOC_CONF"].value == "expandable_segments:True"
    assert "unset it" in problem
