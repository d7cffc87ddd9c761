"""What torchmetrics' metrics have counted is put back, whatever they counted in between."""

import pytest
import torch
import torchmetrics
from torch import nn

from autoaccum._engine.savepoint import Savepoint

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")  # too few samples for a curve


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3, average="macro")
        self.mean = torchmetrics.MeanMetric()
        self.maximum = torchmetrics.MaxMetric()
        self.curve = torchmetrics.AUROC("multiclass", num_classes=3)
        self.several = torchmetrics.MetricCollection(
            [torchmetrics.Precision("multiclass", num_classes=3), torchmetrics.Recall("multiclass", num_classes=3)]
        )

    def count(self, seed, samples=9):
        generator = torch.Generator().manual_seed(seed)
        outputs = torch.randn(samples, 3, generator=generator).softmax(1)
        targets = torch.randint(3, (samples,), generator=generator)
        for metric in (self.accuracy, self.curve, self.several):
            metric(outputs, targets)
        for metric in (self.mean, self.maximum):
            metric(outputs)

    def values(self):
        found = dict(self.several.compute().items())
        for name in ("accuracy", "mean", "maximum", "curve"):
            metric = getattr(self, name)
            found |= {name: metric.compute(), f"{name} updates": metric._update_count}
        return found


@pytest.mark.parametrize("before", [0, 1, 2])
def test_metrics_hold_what_they_held_when_the_mark_was_taken(before):
    plain, model = Model(), Model()
    for one in (plain, model):
        for seed in range(before):
            one.count(seed)

    mark = Savepoint([model], torch.device("cpu"))
    mark.take()
    model.count(7)
    mark.restore()
    model.count(8, samples=4)
    plain.count(8, samples=4)

    torch.testing.assert_close(model.values(), plain.values(), rtol=0, atol=0)
