"""What losses weigh in micro-batches of unlike samples."""

from __future__ import annotations

import pytest
import torch

import autoaccum


def _tokens(samples):
    return sum(len(steps) for steps in samples)


def _padded(samples):
    lengths = torch.tensor([len(steps) for steps in samples])
    steps = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return steps, torch.arange(steps.shape[1]) < lengths[:, None]


def _per_sample(outputs, mask):
    return (outputs.squeeze(-1).square() * mask).sum(1) / mask.sum(1)


def _per_sample_and_by_weight(outputs, mask):
    each = outputs.squeeze(-1).square() * mask
    return {"samples": _per_sample(outputs, mask), "tokens": each.sum() / mask.sum()}


def _by_sample_and_its_mean(model, batch):
    each = _per_sample(model(batch[0]), batch[1])
    return {"loss": each, "mean": each.mean().detach()}


def _by_weight(model, batch):
    return (model(batch[0]).squeeze(-1).square() * batch[1]).sum() / batch[1].sum()


@pytest.mark.parametrize("loss", [_per_sample, _per_sample_and_by_weight, [_by_sample_and_its_mean, _by_weight]])
def test_a_loss_of_each_sample_counts_by_samples_whatever_the_split_weighs(loss):
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(length, 4, generator=generator, dtype=torch.float64) for length in (2, 3, 9, 4)]
    found = []
    for micro_batch in (4, 1):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1, dtype=torch.float64)
        runner = autoaccum.Runner(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            autoaccum.plan(4, micro_batch),
            loss=loss,
            forward=None if isinstance(loss, list) else lambda model, batch: model(batch[0]),
            split=autoaccum.ListOfSamples(_padded, weight=_tokens),
        )
        report, batches = runner.step(samples), [samples] if micro_batch > 1 else [samples[:2], samples[2:]]
        found.append([report.loss, *report.losses.values(), *model.weight[0].tolist(), runner.evaluate(batches)])
    assert found[1] == pytest.approx(found[0], rel=1e-12)
