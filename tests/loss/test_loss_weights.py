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


@pytest.mark.parametrize("loss", [_per_sample, _per_sample_and_by_weight])
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
            forward=lambda model, batch: model(batch[0]),
            split=autoaccum.ListOfSamples(_padded, weight=_tokens),
        )
        report, batches = runner.step(samples), [samples] if micro_batch > 1 else [samples[:2], samples[2:]]
        found.append([report.loss, *report.losses.values(), *model.weight[0].tolist(), runner.evaluate(batches)])
    assert found[1] == pytest.approx(found[0], rel=1e-12)
