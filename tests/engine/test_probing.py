"""The search for the largest micro-batch: real steps, the right answer, and no trace."""

import random
import subprocess
import textwrap

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

import autoaccum
import warm
from faults import FailAt, differences, state_of


class Hungry(nn.Module):
    """Takes 64 KiB a sample for its hidden layer, and has everything that a trial could leave traces in."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16 * 1024)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16 * 1024, 4)

    def forward(self, inputs):
        noise = random.random() + np.random.randn()  # noqa: NPY002, S311
        return self.norm(self.head(self.drop(self.body(inputs)))) + 0.0 * noise


@pytest.fixture
def batch():
    torch.manual_seed(0)
    return torch.randn(16, 8), torch.randint(0, 4, (16,))


def find(model, batch, capacity, **options):
    return autoaccum.find_micro_batch(
        model, batch, device=autoaccum.Simulated(capacity), **{"optimizer": sgd, "max_micro_batch": 400, **options}
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_answer_was_tried_and_three_percent_more_does_not_fit(batch):
    found = find(Hungry(), batch, "16MiB")

    assert [trial.fits for trial in found.trials if trial.size == found.micro_batch] == [True]
    more = int(found.micro_batch * 1.03) + 1
    above = find(Hungry(), batch, "16MiB", max_micro_batch=more)
    assert not any(trial.size == more and trial.fits for trial in above.trials)


def test_line_through_the_peaks_tells_what_a_sample_takes(batch):
    found = find(Hungry(), batch, "16MiB")

    # Hidden layer, its mask of bytes, dropout's output, and the gradients of both on the way back.
    assert 2 * 64 * 1024 <= found.bytes_per_sample <= 6 * 64 * 1024
    assert found.fixed_bytes > 0


def test_target_that_fits_takes_three_trials_and_none_fails(batch):
    found = find(Hungry(), batch, "1GiB", max_micro_batch=100)

    assert found.micro_batch == 100
    assert len(found.trials) <= 3
    assert all(trial.fits for trial in found.trials)


def test_batchs_own_length_is_the_largest_size_by_default(batch):
    found = find(Hungry(), batch, "1GiB", max_micro_batch=None)

    assert found.micro_batch == 16


def test_no_size_above_the_maximum_is_tried(batch):
    found = find(Hungry(), batch, "1GiB", max_micro_batch=37)

    assert max(trial.size for trial in found.trials) == 37


def test_nothing_fits_is_an_error_that_says_what_to_try(batch):
    with pytest.raises(autoaccum.DoesNotFitError, match=r"a sample of shape.* does not fit .*; try"):
        find(Hungry(), batch, "100KiB")


def prepared(batch):
    """A model in the middle of training: gradients, momentum, statistics, a frozen part, mixed modes."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    model = Hungry()
    optimizer = sgd(model.parameters())
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    model.drop.eval()
    return model, optimizer


@pytest.mark.parametrize("capacity", ["1GiB", "8MiB", "100KiB"], ids=["all fit", "some fail", "none fits"])
def test_probe_leaves_no_trace(batch, capacity):
    model, optimizer = prepared(batch)
    gradients = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    momentum = {parameter: state["momentum_buffer"] for parameter, state in optimizer.state.items()}
    before = state_of(model, optimizer)
    attributes = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | bool)}
    hooks = (len(optimizer._optimizer_step_post_hooks), len(model._forward_hooks))

    try:
        find(model, batch, capacity, optimizer=optimizer)
    except autoaccum.DoesNotFitError:
        assert capacity == "100KiB"

    assert differences(state_of(model, optimizer), before) == []
    assert all(optimizer.state[parameter]["momentum_buffer"] is kept for parameter, kept in momentum.items())
    for parameter, (gradient, value) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)
    assert {name: vars(optimizer)[name] for name in attributes} == attributes
    assert (len(optimizer._optimizer_step_post_hooks), len(model._forward_hooks)) == hooks


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError], ids=["interrupt", "model's own error"])
@pytest.mark.parametrize("point", [1, 40, 90])
def test_probe_that_is_broken_off_leaves_no_trace(batch, kind, point):
    error = kind("mine")  # made here: with its traceback it would keep a model alive for the tests to come
    model, optimizer = prepared(batch)
    before = state_of(model, optimizer)
    failing = FailAt(point, error=error)

    def loss(outputs, targets):
        with failing:
            return nn.functional.cross_entropy(outputs * 1.0, targets) * 1.0

    failing.points = {point % 5 + 1}

    with pytest.raises(kind):
        find(model, batch, "64MiB", optimizer=optimizer, loss=loss)

    assert failing.hits == 1
    assert differences(state_of(model, optimizer), before) == []


def test_caller_sees_the_trials_of_a_real_limit_on_the_host():
    """The limit is the process's own, and allocations really fail: in a process of its own."""
    script = textwrap.dedent(
        """
        import torch, autoaccum
        from torch import nn
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 16384), nn.GELU(), nn.Linear(16384, 64), nn.GELU(), nn.Linear(64, 4))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        batch = torch.randn(64, 64), torch.randint(0, 4, (64,))
        found = autoaccum.find_micro_batch(model, batch, max_micro_batch=4000, memory_limit="200MiB",
                                           optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        print(found)
        assert 100 < found.micro_batch < 4000, found.micro_batch
        assert any(not trial.fits for trial in found.trials) or found.trials[-1].size == found.micro_batch
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
        again = autoaccum.find_micro_batch(model, batch, max_micro_batch=found.micro_batch, memory_limit="200MiB",
                                           optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        assert again.micro_batch == found.micro_batch
        result = autoaccum.fit(model, [batch] * 40, 2560, memory_limit="200MiB", progress=False,
                               optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        assert result.plan.accum_steps > 1 and result.steps == 1, result
        """
    )

    done = subprocess.run([*warm.python(), "-c", script], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("capacity", ["12MiB", "14MiB", "16MiB"])
def test_optimizer_that_runs_out_in_a_trial_makes_a_failed_trial(capacity):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batch = torch.randn(64, 1000), torch.randint(10, (64,))

    with pytest.raises(autoaccum.DoesNotFitError):
        autoaccum.find_micro_batch(model, batch, device=autoaccum.Simulated(capacity))

    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


# --- a loss over the whole window ------------------------------------------------------------------------------------


class Embedder(nn.Module):
    """64 KiB a sample for its hidden layer, 16 bytes for its representation."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16 * 1024)
        self.head = nn.Linear(16 * 1024, 4)

    def forward(self, inputs):
        return self.head(torch.tanh(self.body(inputs)))


def all_against_all(outputs, _):
    return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def test_answer_for_a_loss_over_the_window_fits_a_real_window(batch):
    found = find(Embedder(), batch, "10MiB", loss=all_against_all, loss_scope="window")

    cuts, rest = divmod(400, found.micro_batch)
    device = autoaccum.Simulated("10MiB")
    runner = autoaccum.Runner(
        Embedder(),
        sgd,
        autoaccum.Plan(400, (found.micro_batch,) * cuts + (rest,) * bool(rest)),
        loss=all_against_all,
        loss_scope="window",
        device=device,
    )
    # The second begins with the memory of the optimizer's state taken.
    reports = [runner.step((batch[0].repeat(25, 1), batch[1].repeat(25))) for _ in range(2)]

    assert [report.oom_events for report in reports] == [0, 0]
    assert 1 < len(reports[1].micro_batches) < 400
    trial = next(trial for trial in found.trials if trial.size == found.micro_batch)
    assert device.peak_bytes() == pytest.approx(trial.peak_bytes, rel=0.05)


def test_loss_that_is_large_by_itself_is_part_of_every_trial(batch):
    def smallest_peak(**options):
        return (
            find(Embedder(), batch, "8MiB", loss=all_against_all, max_micro_batch=512, **options).trials[0].peak_bytes
        )

    # Of 512 x 512 similarities each step of the loss takes 1 MiB; two samples need a quarter of one.
    assert smallest_peak(loss_scope="window") > smallest_peak() + 2 * 1024**2


def test_loss_that_does_not_fit_at_all_says_so(batch):
    with pytest.raises(autoaccum.DoesNotFitError, match="the loss takes all 512 samples of a window at once"):
        find(Embedder(), batch, "4MiB", loss=all_against_all, max_micro_batch=512, loss_scope="window")


@pytest.mark.parametrize("capacity", ["1GiB", "16MiB", "100KiB"], ids=["all fit", "some fail", "none fits"])
def test_probe_of_a_loss_over_the_window_leaves_no_trace(batch, capacity):
    model, optimizer = prepared(batch)
    before = state_of(model, optimizer)
    data = [tensor.clone() for tensor in batch]

    try:
        find(model, batch, capacity, optimizer=optimizer, loss=all_against_all, loss_scope="window")
    except autoaccum.DoesNotFitError:
        assert capacity == "100KiB"

    assert differences(state_of(model, optimizer), before) == []
    assert all(map(torch.equal, batch, data))


def test_trial_of_a_loss_over_the_window_works_on_one_micro_batch(batch):
    sizes = []
    model = Embedder()
    model.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))

    found = find(model, batch, "1GiB", loss=all_against_all, loss_scope="window", max_micro_batch=40)

    # The first trial makes two steps, each of two passes; the last is the window itself, which needs one.
    assert [trial.size for trial in found.trials] == [2, 8, 40]
    assert sizes == [2, 2, 2, 2, 8, 8, 40]


def test_unknown_scope_is_refused(batch):
    with pytest.raises(autoaccum.InvalidInputError, match="loss_scope='batch' is unknown"):
        find(Embedder(), batch, "1GiB", loss_scope="batch")


def test_device_that_is_lost_in_a_trial_is_said_to_be(batch):
    def poisoned(outputs, targets):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(autoaccum.DeviceLostError, match="start a new one"):
        autoaccum.find_micro_batch(Hungry(), batch, loss=poisoned, device=autoaccum.Simulated("64MiB"))


def test_process_at_its_own_limit_is_told_that_a_search_does_not_fit():
    script = r"""
        import re, resource, sys
        from pathlib import Path
        import torch, autoaccum

        torch.set_num_threads(1)
        batch = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)
        autoaccum.find_micro_batch(torch.nn.Linear(4, 2), batch, device="cpu")  # all that is imported late is now there
        model = torch.nn.Sequential(torch.nn.Linear(4, 4096), torch.nn.Linear(4096, 4096))  # 64 MiB
        data = 1024 * int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1])
        resource.setrlimit(resource.RLIMIT_DATA, (data + (8 << 20), resource.getrlimit(resource.RLIMIT_DATA)[1]))
        try:
            autoaccum.find_micro_batch(model, batch, device="cpu")
        except autoaccum.DoesNotFitError as error:
            print(error)
    """

    done = subprocess.run([*warm.python(), "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)

    assert "the copy of all that a search puts back does not fit on host memory" in done.stdout, done.stderr


def test_answer_holds_in_training_where_what_is_set_aside_is_a_large_part_of_the_memory():
    torch.manual_seed(0)
    parts = [nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Linear(64, 4)]
    model = nn.Sequential(*parts)
    loader = [(torch.randn(1, 16), torch.randint(0, 4, (1,))) for _ in range(303)]
    options = {"progress": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    result = autoaccum.fit(model, loader, 101, optimizer=optimizer, device=autoaccum.Simulated("66KiB"), **options)

    assert result.oom_events == 0
    assert result.plan.accum_steps > 1


class Refuses(nn.Linear):
    """Has an operator that oneDNN does not know in this type."""

    def forward(self, inputs):
        raise RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive")


@pytest.mark.parametrize(("precision", "advised"), [("bf16", True), ("fp32", False)])
def test_operator_that_the_processor_may_not_have_is_named(precision, advised):
    with pytest.raises(autoaccum.DoesNotFitError) as caught:
        autoaccum.fit(
            Refuses(3, 1), [(torch.ones(2, 3), torch.ones(2, 1))], 2, device="cpu", precision=precision, progress=False
        )

    said = "try float32, since this processor may have no such operator in bf16"
    assert (said in str(caught.value)) == advised


def test_of_a_list_of_samples_the_largest_are_tried_first():
    widths = []

    class Pooled(torch.nn.Linear):
        def forward(self, rows):
            widths.append(rows.shape[1])
            return super().forward(rows.mean(1, keepdim=True)).square().mean()

    samples = [torch.rand(length) for length in (2, 9, 4)]
    split = autoaccum.ListOfSamples(lambda some: torch.nn.utils.rnn.pad_sequence(some, batch_first=True))

    find(Pooled(1, 1), samples, "1GiB", split=split, max_micro_batch=2, optimizer=sgd)

    assert set(widths[-2:]) == {9}


class SmallGpt(nn.Module):
    """Two layers of width 64 over 64 tokens."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(500, 64), nn.Linear(64, 500)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.tokens(tokens), mask=mask, is_causal=True)).transpose(1, 2)


KINDS = [("resnet18", "700MiB"), ("gpt", "150MiB"), ("gpt", "225MiB")]


def job(kind, samples):
    if kind == "resnet18":
        return torchvision.models.resnet18(num_classes=10), (
            torch.randn(samples, 3, 96, 96),
            torch.arange(samples) % 10,
        )
    tokens = torch.randint(500, (samples, 64))
    return SmallGpt(), (tokens, tokens)


def sgd_with_momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "limit"), KINDS)
def test_size_is_found_within_three_percent_in_six_trials(kind, limit):
    model, batch = job(kind, 4)

    found = autoaccum.find_micro_batch(
        model, batch, loss=nn.CrossEntropyLoss(), precision="fp32", optimizer=sgd_with_momentum,
        max_micro_batch=512, device=autoaccum.Simulated(limit),
    )  # fmt: skip

    smallest_failed = min(trial.size for trial in found.trials if not trial.fits)
    assert found.micro_batch >= 0.97 * (smallest_failed - 1)
    assert len(found.trials) <= 6


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "limit"), KINDS)
def test_size_is_found_within_three_percent_in_six_trials_under_a_real_limit(kind, limit):
    """One that is three percent larger takes more than the limit."""
    model, batch = job(kind, 4)
    asked = {"loss": nn.CrossEntropyLoss(), "precision": "fp32", "optimizer": sgd_with_momentum, "device": "cpu"}

    found = autoaccum.find_micro_batch(model, batch, max_micro_batch=512, memory_limit=limit, **asked)

    assert len(found.trials) <= 6
    larger = int(found.micro_batch / 0.97) + 1
    answer = autoaccum.find_micro_batch(model, batch, max_micro_batch=larger, memory_limit=limit, **asked)
    assert answer.micro_batch < larger
