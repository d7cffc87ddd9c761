"""A loss divided by the sum of a number that each sample carries (`lengths.sum()`) is weighted by that."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._loss.weighting import Over, Weighting
from autoaccum._system.notices import Notices
from gradients import cut_gradient, joined

N = 16


def model():
    torch.manual_seed(0)
    return nn.Linear(6, 3).double()


def forward(model, batch):
    return model(batch["inputs"])


def batch_of(lengths, seed=1):
    torch.manual_seed(seed)
    inputs = torch.randn(N, 6, dtype=torch.float64)
    return {"inputs": inputs, "targets": torch.arange(N) % 3, "lengths": lengths}


def over_lengths(outputs, batch):
    losses = functional.cross_entropy(outputs, batch["targets"], reduction="none")
    return losses.sum() / batch["lengths"].sum()


def both_gradients(loss, batch, sizes, said=None, run=forward):
    """Return the gradient of a cut, and that of the whole batch."""
    notices = Notices(silent=True)
    found, _ = cut_gradient(model(), loss, batch, sizes, forward=run, notices=notices)
    whole = model()
    loss(run(whole, batch), batch if run is forward else batch[1]).backward()
    if said is not None:
        said += notices.texts
    return found, joined(whole)


@pytest.mark.parametrize("sizes", [(8, 8), (7, 5, 3, 1)])
@pytest.mark.parametrize("most", [3, 50, 10_000])
def test_loss_over_the_sum_of_lengths_is_exact(sizes, most):
    lengths, said = torch.randint(1, most + 1, (N,), generator=torch.Generator().manual_seed(2)), []

    found, expected = both_gradients(over_lengths, batch_of(lengths), sizes, said)

    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert sum("divided by the sum of 'lengths'" in text for text in said) == 1
    assert not any("could not be inferred" in text for text in said)


def test_lengths_that_come_with_the_targets_of_a_pair():
    lengths = torch.randint(1, 9, (N,), generator=torch.Generator().manual_seed(2))
    batch = batch_of(lengths)

    def loss(outputs, targets):
        return functional.cross_entropy(outputs, targets[0], reduction="sum") / targets[1].sum()

    pair = batch["inputs"], (batch["targets"], lengths)
    found, expected = both_gradients(loss, pair, (8, 8), run=lambda model, batch: model(batch[0]))

    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_classes_are_not_taken_for_lengths(dtype, seed):
    said = []
    torch.manual_seed(seed)
    batch = batch_of(torch.randint(1, 3, (N,)), seed) | {"targets": torch.randint(3, (N,))}

    found, expected = both_gradients(
        lambda outputs, batch: functional.cross_entropy(outputs.to(dtype), batch["targets"]), batch, (9, 7), said
    )

    torch.testing.assert_close(found, expected, rtol=0.05 if dtype is torch.bfloat16 else 1e-5, atol=0.01)
    assert not any("divided by the sum" in text for text in said)


@pytest.mark.parametrize("seed", range(6))
def test_loss_that_is_no_mean_is_not_taken_for_one_over_lengths(seed):
    said = []
    torch.manual_seed(seed)

    both_gradients(
        lambda outputs, batch: functional.cross_entropy(outputs, batch["targets"]).sqrt(),
        batch_of(torch.randint(1, 3, (N,)), seed),
        (8, 8),
        said,
    )

    assert any("could not be inferred" in text for text in said)


def test_lengths_that_are_equal_leave_the_question_open_until_they_differ():
    seen, trained = [], model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(joined(trained)))
    runner = autoaccum.Runner(
        trained, optimizer, autoaccum.plan(N, 8), loss=over_lengths, forward=forward, device="cpu", precision="fp32"
    )

    for number, lengths in enumerate([torch.full((N,), 4), torch.arange(1, N + 1), torch.arange(N, 0, -1)]):
        batch = batch_of(lengths, seed=number)
        runner.step(batch)
        whole = model()
        over_lengths(forward(whole, batch), batch).backward()
        torch.testing.assert_close(seen[-1], joined(whole), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("values", "tally"), [([3, 1, 4], 8), ([0, 0], 0), ([-100, 5], 5)])
def test_tally_is_the_sum_of_what_is_positive(values, tally):
    how = Weighting(Over.SUMMED, target="n")

    assert how.tally(len(values), {"n": torch.tensor(values)}) == tally
    assert how.tally_each(len(values), {"n": torch.tensor(values)}).sum() == tally
    assert not how.counts_all({"n": torch.tensor(values)})


@pytest.mark.parametrize("shape", [(N,), (N, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.uint8], ids=str)
def test_lengths_of_any_type_in_a_column_or_not(shape, dtype):
    lengths = torch.randint(1, 9, shape, generator=torch.Generator().manual_seed(2)).to(dtype)

    found, expected = both_gradients(over_lengths, batch_of(lengths), (7, 6, 3))

    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_weights_that_samples_carry_are_exact():
    weights = torch.rand(N, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def loss(outputs, batch):
        losses = functional.cross_entropy(outputs, batch["targets"], reduction="none")
        return (losses * batch["weight"].flatten()).sum() / batch["weight"].sum()

    found, expected = both_gradients(loss, batch_of(weights) | {"weight": weights}, (7, 6, 3))

    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_tensors_of_a_batch_of_several_may_be_what_the_loss_runs_over():
    batch = batch_of(torch.randint(1, 9, (N,), generator=torch.Generator().manual_seed(2)))
    targets = batch["targets"].masked_fill(batch["lengths"] > 5, -100)
    notices, found, whole = Notices(silent=True), model(), model()

    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[2])

    several = batch["inputs"], batch["lengths"], targets
    autoaccum.Accumulator(found, loss=[loss], micro_batch=7, precision="fp32", device="cpu", notices=notices).backward(
        several
    )

    loss(whole, several).backward()
    torch.testing.assert_close(joined(found), joined(whole), rtol=1e-9, atol=1e-12)
