"""A split means the same everywhere: fit, Runner, windows, find_micro_batch, preflight, resume, evaluation, ranks."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum
from autoaccum.errors import InvalidInputError
from support.models.small import Limited, fit_quietly
from support.ranks.training import FAR, assert_alike, far, sgd
from support.training import splits

TARGET = 16
OF_ROWS = {"loss": splits.mean, "forward": splits.forward, "device": "cpu"}


def loader():
    return DataLoader(splits.rows(), batch_size=7, collate_fn=list)


def updated(loss, collate, data, *, micro_batch, weight=None, **options):
    """The parameters after one update from all of some samples, by fit in micro-batches of some size."""
    model = splits.net()
    fit_quietly(
        model,
        [data],
        len(data),
        loss=loss,
        optimizer=sgd,
        split=autoaccum.ListOfSamples(collate, weight=weight),
        micro_batch=micro_batch,
        **options,
    )
    return [p.detach() for p in model.parameters()]


def updated_by_hand(loss, batch):
    model = splits.net()
    optimizer = sgd(model.parameters())
    inputs, targets = batch
    loss(model(inputs), targets).backward()
    optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_fit_makes_the_updates_of_whole_windows():
    made = splits.train(0, 1, target_batch=TARGET, micro_batch=3, epochs=2)

    assert made["samples"] == [16, 16, 12] * 2
    assert far(made["parameters"], splits.by_hand(TARGET, epochs=2)) <= FAR


def test_runner_takes_the_windows_of_a_split():
    model, split = splits.net(), splits.split()
    runner = autoaccum.Runner(model, sgd(model.parameters()), autoaccum.plan(TARGET, 5), split=split, **OF_ROWS)

    for window in autoaccum.windows(loader(), TARGET, split=split):
        runner.step(window)

    assert far([p.detach() for p in model.parameters()], splits.by_hand(TARGET)) <= FAR
    data = splits.rows()
    whole = splits.collate(data)
    assert runner.step(data[:9]).samples == 9
    model.eval()
    expected = splits.mean(splits.forward(model, whole), whole).detach()
    assert runner.evaluate(loader()) == pytest.approx(float(expected), rel=1e-12)


def test_batches_that_keep_micro_batches_small_are_told_once(capsys):
    loader = [(torch.randn(4, length, 6), torch.randint(4, (4, length))) for length in (3, 4, 5, 6)]

    def fit(loader, micro_batch):
        model = nn.Sequential(nn.Linear(6, 4), Transposed())
        autoaccum.fit(model, loader, 8, loss=nn.CrossEntropyLoss(), micro_batch=micro_batch, device="cpu")
        return [line for line in capsys.readouterr().err.splitlines() if "differ in shape" in line]

    (said,) = fit(loader, 8)
    assert "4 samples at most, and not 8 as planned" in said
    assert "ListOfSamples" in said
    assert fit(loader, 4) == []
    assert fit([loader[0]] * 4, 8) == []
    of_the_end = [(inputs[:3], targets[:3]) for inputs, targets in loader[1:3]]
    assert fit([loader[0], loader[0], *of_the_end], 8) == []


def test_ranks_weigh_their_parts_by_the_split(rank_pool):
    found = rank_pool.run("support.training.splits:train", size=2, target_batch=TARGET, micro_batch=3, shard_data=True)

    assert_alike(found)
    assert far(found[0]["parameters"], splits.by_hand(TARGET)) <= FAR


def test_micro_batch_is_found_by_samples():
    model, batch = Limited(splits.net(), most=60), splits.rows(8)
    before = copy.deepcopy(model.state_dict())

    result = autoaccum.find_micro_batch(model, batch, split=splits.split(), max_micro_batch=64, **OF_ROWS)

    repeated = [len(batch[number % 8][1]) for number in range(64)]
    assert result.micro_batch == max(n for n in range(65) if sum(repeated[:n]) <= 60)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


@pytest.mark.gpu_fakes
def test_report_counts_by_the_split():
    report = autoaccum.preflight(
        splits.net(),
        splits.rows(8),
        TARGET,
        split=splits.split(),
        gpus="h100-80gb",
        loader=loader(),
        **OF_ROWS,
    )

    assert report.fits
    assert report.measured.pace.epoch_samples == splits.SAMPLES
    assert report.predicted[0].micro_batch == TARGET


# --- losses -----------------------------------------------------------------------------------------------------------


def first_rows(samples):
    return torch.stack([inputs[0] for inputs, _ in samples]), torch.stack([targets[0] for _, targets in samples])


def root(outputs, targets):
    return functional.mse_loss(outputs[:, 0], targets.double()).sqrt()


@pytest.mark.parametrize(
    ("loss", "scope"),
    [(functional.cross_entropy, "micro_batch"), (root, "window")],
    ids=["inferred by running the model on parts of a list", "over the window"],
)
def test_loss_takes_samples_of_a_list(loss, scope):
    data = splits.rows(TARGET)

    cut = updated(loss, first_rows, data, micro_batch=3, loss_scope=scope)

    assert far(cut, updated_by_hand(loss, first_rows(data))) <= FAR


def test_torch_loss_and_pairs_keep_their_own_weights():
    """A weight stands for a mean that nothing else explains; here it would be wrong, and is not used."""
    split = autoaccum.ListOfSamples(lambda samples: tuple(map(torch.stack, zip(*samples, strict=True))), weight=len)
    inputs = torch.randn(12, 5, 6, dtype=torch.float64)
    targets = torch.randint(4, (12, 5))
    targets[torch.rand(12, 5) < 0.5] = -100
    data = list(zip(inputs, targets, strict=True))

    def pair(outputs, targets):
        summed = functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="sum")
        return summed, (targets != -100).sum()

    expected = None
    for loss in (pair, nn.CrossEntropyLoss()):
        torch.manual_seed(0)
        body = nn.Linear(6, 4).double()
        model = body if loss is pair else nn.Sequential(body, Transposed())
        fit_quietly(
            model, [data], 12, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), split=split, micro_batch=5
        )
        torch.manual_seed(0)
        whole = nn.Linear(6, 4).double()
        if expected is None:
            functional.cross_entropy(whole(inputs).transpose(1, 2), targets).backward()
            expected = whole.weight.detach() - whole.weight.grad
        torch.testing.assert_close(body.weight.detach(), expected, rtol=1e-12, atol=1e-12)


class Transposed(nn.Module):
    def forward(self, outputs):
        return outputs.transpose(1, 2)


# --- what collators and weights do ------------------------------------------------------------------------------------


def concatenated(samples):
    inputs, targets = zip(*samples, strict=True)
    return torch.cat(inputs), torch.cat(targets)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), None, functional.cross_entropy], ids=["torch.nn", "default", "function"]
)
def test_mean_over_concatenated_targets_is_weighed_by_them(loss):
    data = splits.rows(11)

    cut = updated(loss, concatenated, data, micro_batch=3)

    assert far(cut, updated(loss, concatenated, data, micro_batch=11)) <= FAR


def pair_of(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="sum"), (targets != -100).sum()


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), pair_of], ids=["torch.nn", "pair"])
def test_collator_that_draws_is_counted_as_it_trains(loss):
    def masked(samples):
        inputs, targets = concatenated(samples)
        return inputs, torch.where(torch.rand(len(targets)) < 0.5, targets, -100)

    data = splits.rows(12)
    cut = updated(loss, masked, data, micro_batch=4)

    splits.net()  # seeds the draws, as before
    by_size = sorted(data, key=lambda sample: max(map(torch.numel, sample)), reverse=True)
    parts = [masked(by_size[start : start + 4]) for start in (0, 4, 8)]
    whole = [torch.cat(both) for both in zip(*parts, strict=True)]
    assert far(cut, updated_by_hand(functional.cross_entropy, whole)) <= FAR


def own_loss(outputs, targets):
    """One of torch's would not ask for weights."""
    return functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda samples: max(len(targets) for _, targets in samples), r"does not add up: .* 3 micro-batches"),
        (lambda samples: -1.0, r"weight returned -1.0"),
        (lambda samples: None, r"weight returned None"),
        (lambda samples: torch.ones(2), r"weight returned tensor"),
    ],
)
def test_weight_that_cannot_be_one_is_refused(weight, message):
    with pytest.raises(InvalidInputError, match=message):
        updated(own_loss, concatenated, splits.rows(9), micro_batch=3, weight=weight)


def test_samples_without_rows_are_no_reason_to_fail():
    data = [(torch.zeros(0, 6, dtype=torch.float64), torch.zeros(0, dtype=torch.long)), *splits.rows(8)]

    def loss(outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="sum"), len(targets)

    assert (
        far(updated(loss, concatenated, data, micro_batch=2), updated(loss, concatenated, data, micro_batch=9)) <= FAR
    )


def test_window_of_another_split_than_the_runners_is_refused():
    split = splits.split()
    (window, *_) = autoaccum.windows(loader(), TARGET, split=split)
    model = splits.net()

    for other in (None, splits.split()):
        runner = autoaccum.Runner(model, sgd(model.parameters()), autoaccum.plan(TARGET, 5), split=other, **OF_ROWS)
        with pytest.raises(InvalidInputError, match=r"made with split=ListOfSamples\(collate\), and the Runner has"):
            runner.step(window)


def test_loader_whose_batches_count_no_sample_is_explained_by_the_split():
    class Nothing:
        count = staticmethod(lambda batch: 0)
        cut = staticmethod(lambda batch, sizes: [batch])
        join = staticmethod(lambda batches: batches[0])

    with pytest.raises(InvalidInputError, match=r"gave no batch with a sample, as split=.* counts them"):
        autoaccum.fit(nn.Linear(3, 2), [(torch.randn(8, 3), torch.zeros(8))], 8, split=Nothing(), progress=False)


def costing(found):
    class Costly(autoaccum.ListOfSamples):
        def cost(self, batch):
            return found

    samples = [(torch.randn(4), torch.tensor(number % 2)) for number in range(4)]
    split = Costly(torch.utils.data.default_collate)
    return autoaccum.fit(nn.Linear(4, 2), [samples] * 2, 4, split=split, device="cpu", progress=False)


@pytest.mark.parametrize("found", [torch.tensor(3), 0.003, 3])
def test_cost_of_a_split_is_any_number(found):
    assert costing(found).steps == 2


@pytest.mark.parametrize("found", [None, float("nan"), -1, "much"])
def test_cost_that_is_no_number_is_refused(found):
    with pytest.raises(autoaccum.InvalidInputError, match="cost returned"):
        costing(found)
