"""What the error says of a sample, and of anything else, that does not fit."""

import inspect
import re
import textwrap

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum import Window
from autoaccum._engine.assembly import assemble
from autoaccum._engine.does_not_fit import described, sample_does_not_fit, sample_of, whole_does_not_fit
from autoaccum._engine.options import Options
from autoaccum._engine.out_of_memory import Phase
from autoaccum._records import Neighbour  # an argument
from autoaccum._system.notices import Notices  # an argument
from autoaccum.records import MemoryReading
from support.models.small import runner_of

SAID = (
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 17.60 GiB is "
    "free. Including non-PyTorch memory, this process has 122.20 GiB memory in use. Of the allocated memory"
)
GIB = 2**30


class Device(autoaccum.Simulated):
    """A device of 80 GiB with so much left, and with others on it."""

    def __init__(self, free_bytes=70 * GIB, others=()):
        super().__init__("80GiB")
        self.free_bytes, self.others = free_bytes, others

    def reading(self):
        return MemoryReading(80 * GIB, self.free_bytes, 0)

    def neighbours(self):
        return self.others


def step_on(device=None, *, takes=autoaccum.fit, model=None, optimizer=None):
    options = Options.of(takes, {"optimizer": optimizer, "precision": "fp32"})
    return assemble(model or nn.Linear(4, 3), options, memory=device or Device(), notices=Notices(silent=True))


def test_sample_of_a_window_of_several_shapes_is_numbered():
    window = Window([torch.zeros(4, 3), torch.zeros(4, 5)])

    assert sample_of(window, 6) == "sample 6 of the window, of shape (5,),"


class Blocks(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4)))


@pytest.mark.parametrize("phase", [None, *Phase])
@pytest.mark.parametrize("limit_bytes", [None, 3 * GIB])
@pytest.mark.parametrize(
    "takes", [autoaccum.fit, autoaccum.Runner, autoaccum.Accumulator, autoaccum.find_micro_batch, autoaccum.preflight]
)
def test_every_option_that_is_advised_is_one_of_the_function_that_was_called(takes, limit_bytes, phase):
    device = Device()
    step = step_on(device, takes=takes, model=Blocks())
    with device.limited(limit_bytes):
        errors = [sample_does_not_fit(step, SAID, phase=phase)]
        errors += [] if phase is None else [whole_does_not_fit(step, SAID, phase, 2)]

    for error in errors:
        advised = str(error).partition("; try ")[2]
        named = set(re.findall(r"(\w+)=", advised.replace("an optimizer with foreach=False", "")))
        assert advised
        assert named <= Options.of(takes, {}).names


@pytest.mark.parametrize("limit_bytes", [None, 3 * GIB])
def test_text_takes_three_lines_whatever_there_is_to_say(limit_bytes):
    others = [Neighbour(pid, "a process with a long name", GIB) for pid in range(5)]
    device = Device(GIB, others)
    batch = {f"an entry of a long name {number}": torch.zeros(1, 31, 7) for number in range(30)}
    step = step_on(device, model=Blocks())

    with device.limited(limit_bytes):
        sample = described(batch, "sample 3 of the window, 31 columns long")
        text = str(sample_does_not_fit(step, SAID, sample=sample, phase=Phase.WEIGH))

    assert len(textwrap.wrap(text, 120)) <= 3
    assert "and 28 more" in text
    assert "CUDA out of memory. Tried to allocate 1.00 GiB" in text
    assert "; try " in text


def with_runner(model, batch, **options):
    runner_of(model, micro_batch=4, **options).step(batch)


def with_fit(model, batch, **options):
    autoaccum.fit(model, [batch], 8, epochs=1, device="cpu", progress=False, **options)


def with_accumulator(model, batch, **options):
    autoaccum.Accumulator(model, device="cpu", **options).backward(batch)


ENTRIES = {with_runner: autoaccum.Runner, with_fit: autoaccum.fit, with_accumulator: autoaccum.Accumulator}


class TooLarge(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def forward(self, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


@pytest.mark.parametrize("entry", ENTRIES)
def test_sample_that_does_not_fit_is_named_with_its_shape_and_remedies_of_what_was_called(entry):
    with pytest.raises(autoaccum.DoesNotFitError) as caught:
        entry(TooLarge(), (torch.randn(8, 5, 7), torch.zeros(8).long()), loss=nn.CrossEntropyLoss())

    said = str(caught.value)
    assert "5, 7" in said
    assert not re.search(r"[KMG]iB (are )?free", said)  # the memory that is free is not to blame
    assert {*re.findall(r"(\w+)=", said)} <= {*inspect.signature(ENTRIES[entry]).parameters}
