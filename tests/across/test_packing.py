"""Where a collator packs samples into one row, micro-batches are filled up to the tokens that fit."""

import contextlib

import pytest
import torch
from torch import nn

import autoaccum
from support.data.ragged import VOCABULARY, lengths_of, texts
from support.training.long_runs import StopAt, StoppedError

SAMPLES, TARGET, CAPACITY = 480, 48, 400_000


class OfTokens(nn.Module):
    """Predicts each next token from a token and its place, so that packed sequences do not see each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.mix = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, VOCABULARY)).double()
        self.double()
        self.seen = []

    def forward(self, input_ids, position_ids, labels):
        self.seen.append(input_ids.numel())
        logits = self.mix(self.tokens(input_ids) + self.places(position_ids))
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def flattened(samples):
    """One row, as Transformers' DataCollatorWithFlattening makes it."""
    rows = [sample["input_ids"] for sample in samples]
    labels = [torch.cat([torch.full((1,), -100), row[1:]]) for row in rows]
    return {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
        "labels": torch.cat(labels)[None],
    }


def loader(samples=SAMPLES):
    each = [{"input_ids": text} for text in texts(*lengths_of(samples, most=60))]
    return [each[at : at + 16] for at in range(0, samples, 16)]


def trained(collate=flattened, *, capacity=CAPACITY, **options):
    model = OfTokens()
    device = "cpu" if capacity is None else autoaccum.Simulated(capacity)
    result = autoaccum.fit(
        model,
        loader(),
        TARGET,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        device=device,
        precision="fp32",
        split=autoaccum.ListOfSamples(collate),
        progress=False,
        **options,
    )
    return model, result


def of_windows(model, result):
    """The tokens of each micro-batch, by window: those of the last pass through each."""
    seen, found = list(model.seen), []
    for report in reversed(result.history):
        found.insert(0, seen[-len(report.micro_batches) :])
        del seen[-len(report.micro_batches) :]
    return found


def fewest(tokens, most):
    return -(-sum(tokens) // most)


def test_micro_batches_are_full_and_the_parameters_those_of_whole_windows():
    whole, _ = trained(capacity=None, micro_batch=TARGET, epochs=2)

    model, result = trained(epochs=2)

    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    last = of_windows(model, result)[-8:]
    most = max(map(max, last))
    assert all(len(tokens) > 1 for tokens in last)  # else nothing was to be filled
    assert sum(map(len, last)) <= 1 + sum(fewest(tokens, most) for tokens in last)


def test_rows_that_do_not_say_where_samples_begin_are_taken_as_before():
    def silent(samples):
        return {**flattened(samples), "position_ids": None}

    split = autoaccum.ListOfSamples(silent)

    split.join([loader()[0]])

    assert split.packs is False


@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.sweep), 6])
def test_run_that_goes_on_fills_micro_batches_as_before(stop, tmp_path):
    whole, undisturbed = trained()
    with pytest.raises(StoppedError):
        trained(checkpoint=tmp_path, callbacks=[StopAt(stop)])

    model, result = trained(checkpoint=tmp_path)

    assert result.resumed_from == stop
    assert result.steps == undisturbed.steps
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    last = of_windows(model, result)[-1]
    assert len(last) <= len(of_windows(whole, undisturbed)[-1]) + 1


def test_cap_counts_samples_of_packed_micro_batches_too(monkeypatch):
    monkeypatch.setenv("AUTOACCUM_MAX_MICRO_BATCH", "5")

    _, result = trained()

    assert max(max(report.micro_batches) for report in result.history) <= 5


def test_failure_later_on_has_less_tokens_in_a_micro_batch_and_the_same_parameters():
    whole, _ = trained(capacity=None, micro_batch=TARGET)
    held = []

    class Neighbour(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            if report.step == 6:
                held.append(torch.zeros(CAPACITY // 3, dtype=torch.uint8))

    model, result = trained(callbacks=[Neighbour()])

    assert result.steps == SAMPLES // TARGET
    before, after = (max(map(max, of_windows(model, result)[part])) for part in (slice(3, 6), slice(7, None)))
    assert after < before
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_number_of_samples_holds_also_where_an_earlier_run_has_packed_by_tokens(tmp_path):
    with contextlib.suppress(StoppedError):
        trained(checkpoint=tmp_path, callbacks=[StopAt(16)], epochs=2)

    _, result = trained(checkpoint=tmp_path, micro_batch=3, epochs=2)

    assert result.resumed_from is not None
    assert all(max(report.micro_batches) <= 3 for report in result.history)


def in_rows(samples):
    """The same texts padded, and no row of several."""
    rows = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "position_ids": nn.utils.rnn.pad_sequence([torch.arange(len(row)) for row in rows], batch_first=True),
        "labels": nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100),
    }


@pytest.mark.parametrize(("before", "now"), [(in_rows, flattened), (flattened, in_rows)])
def test_run_that_goes_on_with_another_collator_learns_what_fits_anew(before, now, tmp_path):
    with pytest.raises(StoppedError):
        trained(before, checkpoint=tmp_path, callbacks=[StopAt(12)], epochs=2)

    _, result = trained(now, checkpoint=tmp_path, epochs=2)

    assert result.resumed_from == 12
    assert max(len(report.micro_batches) for report in result.history) <= TARGET // 4
