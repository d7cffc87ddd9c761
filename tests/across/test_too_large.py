"""A sample that does not fit even alone is an error, or left out: the window's mean then runs over the rest."""

import re
import time

import pytest
import torch
from torch import nn

import autoaccum
from support.models.small import fit_quietly

LARGEST = 16


class RunsOut(nn.Module):
    """Has no memory for a sample wider than some, nor for many at once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 2, dtype=torch.float64)

    def forward(self, inputs):
        if self.training and inputs.shape[1] * len(inputs) > LARGEST:
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        return self.layer(inputs.mean(1, keepdim=True))


def loader_of(widths):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(1, width, generator=generator, dtype=torch.float64), torch.tensor([number % 2]))
        for number, width in enumerate(widths)
    ]


def trained(widths, target=4, make=RunsOut, **options):
    model = make()
    result = autoaccum.fit(
        model,
        loader_of(widths),
        target,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        **{"device": autoaccum.Simulated("1GiB"), "precision": "fp32", "progress": False} | options,
    )
    return model, result


@pytest.mark.parametrize(("place", "micro_batch"), [(0, "auto"), (1, 2), (3, 2), (6, "auto")])
def test_sample_is_left_out_and_the_mean_runs_over_the_rest(place, micro_batch):
    widths = [4, 4, 4, 4, 4, 4, 4, 4]
    loader = loader_of(widths)
    wide = (torch.randn(1, 40, dtype=torch.float64), torch.tensor([0]))

    model = RunsOut()
    result = fit_quietly(
        model,
        [*loader[:place], wide, *loader[place + 1 :]],
        4,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        device=autoaccum.Simulated("1GiB"),
        precision="fp32",
        micro_batch=micro_batch,
        on_too_large="skip",
    )

    expected = RunsOut()
    for start in (0, 4):
        kept = [loader[at] for at in range(start, start + 4) if at != place]
        outputs = torch.cat([expected.layer(inputs.mean(1, keepdim=True)) for inputs, _ in kept])
        loss = nn.functional.cross_entropy(outputs, torch.cat([target for _, target in kept]))
        grads = torch.autograd.grad(loss, list(expected.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(expected.parameters(), grads, strict=True):
                parameter.sub_(0.1 * gradient)
    assert (result.steps, result.samples, result.skipped_samples) == (2, 7, 1)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_window_with_nothing_left_makes_no_update(capfd):
    _, result = trained([4, 4, 40, 40, 4, 4], target=2, on_too_large="skip", progress="lines")

    assert (result.steps, result.samples, result.skipped_samples) == (2, 4, 2)
    assert capfd.readouterr().err.count("a sample of shapes 40 of torch.float64 and") <= 1
    assert "samples left out, since they do not fit alone: 2" in str(result)


def test_nothing_that_fits_at_all_is_an_error_also_where_samples_are_left_out():
    with pytest.raises(autoaccum.DoesNotFitError):
        trained([40, 40], target=2, on_too_large="skip")


def test_sample_is_an_error_by_default():
    with pytest.raises(autoaccum.DoesNotFitError, match="40"):
        trained([4, 4, 40, 4])


def test_checkpoints_count_what_was_trained(tmp_path):
    _, whole = trained([4, 40, 4, 4, 4, 4, 40, 4], on_too_large="skip")
    trained([4, 40, 4, 4, 4, 4, 40, 4], on_too_large="skip", checkpoint=tmp_path, max_steps=1)
    _, rest = trained([4, 40, 4, 4, 4, 4, 40, 4], on_too_large="skip", checkpoint=tmp_path)

    assert (rest.resumed_from, rest.steps, rest.samples) == (1, whole.steps, whole.samples)
    assert rest.skipped_samples == whole.skipped_samples == 2


class Interrupts(RunsOut):
    """Is interrupted in the pass after one that had no memory, with all sizes given."""

    def forward(self, inputs):
        if getattr(self, "lacks", False):
            raise KeyboardInterrupt
        self.lacks = self.training and inputs.shape[1] > LARGEST
        return super().forward(inputs)


def test_sample_of_a_window_that_is_interrupted_is_counted_once(tmp_path):
    widths, options = [4, 4, 40, 4, 4, 4], {"on_too_large": "skip", "checkpoint": tmp_path, "micro_batch": 1}
    _, whole = trained(widths, 2, on_too_large="skip", micro_batch=1)
    with pytest.raises(KeyboardInterrupt):
        trained(widths, 2, make=Interrupts, **options)

    _, rest = trained(widths, 2, **options)

    assert (rest.resumed_from, rest.skipped_samples, whole.skipped_samples) == (1, 1, 1)


@pytest.mark.parametrize("wider", [0, 3], ids=["as wide", "wider and wider"])
def test_samples_that_are_no_smaller_are_not_waited_for_one_by_one(monkeypatch, wider):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)

    widths = [width for number in range(6) for width in (40 + wider * number, 4)]
    _, result = trained([4, *widths, 4], target=2, on_too_large="skip")

    assert result.skipped_samples == 6
    assert sum(pause > 0 for pause in waited) <= 2  # those for one of them


class Leaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.passes = nn.Linear(4, 2), 0

    def forward(self, features):
        self.passes += 1
        if self.passes > 30:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return self.layer(features)


@pytest.mark.filterwarnings("ignore")
def test_epoch_of_which_nothing_fits_any_more_ends_the_training():
    loader = [(torch.randn(2, 4), torch.randint(2, (2,))) for _ in range(1)]

    with pytest.raises(autoaccum.DoesNotFitError, match="no sample of epoch"):
        fit_quietly(Leaks(), loader, 2, loss=nn.CrossEntropyLoss(), max_steps=100, micro_batch=2, on_too_large="skip")


class Refuses(nn.Module):
    """Has no memory for a large number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs):
        if self.training and bool((inputs > 100).any()):
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        return self.layer(inputs)


class GivesUp(autoaccum.Callback):
    """Ends a training that repeats a window without end."""

    def __init__(self):
        self.events = 0

    def on_oom(self, event, *, step):
        self.events += 1
        if self.events > 50:
            raise AssertionError("the window is repeated without end")


def positives(outputs, targets):
    of_each = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (of_each * (targets > 0)).sum() / (targets > 0).sum().clamp(min=1)


def test_sample_that_the_check_of_a_later_window_finds_too_large_is_the_one_left_out():
    torch.manual_seed(0)
    # Nothing counts in the first windows, so the last is the first to be checked.
    batches = [(torch.randn(16, 3), torch.zeros(16, dtype=torch.long)) for _ in range(3)]
    batches.append((torch.randn(8, 3), torch.ones(8, dtype=torch.long)))
    batches[-1][0][0, 0] = 1000.0

    result = fit_quietly(
        Refuses(),
        batches,
        16,
        loss=positives,
        device=autoaccum.Simulated("1GiB"),
        precision="fp32",
        micro_batch=4,
        on_too_large="skip",
        callbacks=[GivesUp()],
    )

    assert (result.steps, result.samples, result.skipped_samples) == (4, 55, 1)


def left_out(capfd):
    return re.findall(r"(?<=sample )\d+(?= of the window)", capfd.readouterr().err)


def test_each_sample_that_is_left_out_is_named_by_its_place_in_the_window(capfd):
    _, result = trained([4, 40, 4, 4, 40, 4, 4, 40], target=8, micro_batch=1, on_too_large="skip", progress="lines")

    assert result.skipped_samples == 3
    assert sorted(left_out(capfd)) == ["1", "4", "7"]


def test_each_sample_of_a_list_that_is_left_out_is_named_by_its_place_in_the_loader(capfd):
    def collate(samples):
        inputs = nn.utils.rnn.pad_sequence([inputs for inputs, _ in samples], batch_first=True)
        return inputs, torch.stack([target for _, target in samples])

    batch = [(inputs[0], target[0]) for inputs, target in loader_of([4, 40, 4, 4, 90, 4, 4, 60])]

    result = fit_quietly(
        RunsOut(),
        [batch],
        8,
        loss=nn.CrossEntropyLoss(),
        device=autoaccum.Simulated("1GiB"),
        precision="fp32",
        split=autoaccum.ListOfSamples(collate),
        on_too_large="skip",
        progress="lines",
    )

    assert result.skipped_samples == 3
    assert left_out(capfd) == ["4", "7", "1"]
