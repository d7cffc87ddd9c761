"""A batch that is no pair is one argument; a model that does not take it gets an explanation with what to pass."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.errors import InvalidInputError

INPUTS, LENGTHS = torch.randn(8, 4), torch.randint(1, 5, (8,))
TARGETS = torch.randint(0, 3, (8,))


class WithLengths(nn.Linear):
    def forward(self, inputs, lengths):
        return super().forward(inputs / lengths[:, None])


class Reads(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs.float())


def fit(model, *tensors, **options):
    loader = DataLoader(TensorDataset(*tensors), batch_size=4)
    return autoaccum.fit(model, loader, 4, device="cpu", progress=False, **options)


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss()], ids=["no loss", "loss"])
@pytest.mark.parametrize(
    ("model", "tensors", "inputs", "targets"),
    [
        (nn.Linear(4, 3), (INPUTS, LENGTHS, TARGETS), "batch[0]", "batch[1:]"),
        (WithLengths(4, 3), (INPUTS, LENGTHS, TARGETS), "batch[0], batch[1]", "batch[2]"),
        (Reads(4, 3), (INPUTS, LENGTHS, TARGETS), "batch[0]", "batch[1:]"),
        (nn.Linear(4, 4), (INPUTS,), "batch[0]", "batch[0]"),
    ],
    ids=["one argument", "two arguments", "an attribute", "a tuple of one"],
)
def test_what_to_pass_is_named(model, tensors, inputs, targets, loss):
    with pytest.raises(InvalidInputError) as caught:
        fit(model, *tensors, loss=loss)

    said = str(caught.value)
    assert f"a batch is a list of {len(tensors)}, which is passed to the model as one argument" in said
    assert f"forward=lambda model, batch: model({inputs})" in said
    assert f"loss=lambda outputs, batch: criterion(outputs, {targets})" in said
    assert isinstance(caught.value.__cause__, TypeError | AttributeError)
    assert len(said) < 500


def test_model_that_takes_the_whole_batch_gets_it():
    class Takes(nn.Linear):
        def forward(self, batch):
            inputs, _, targets = batch
            return {"loss": nn.functional.cross_entropy(super().forward(inputs), targets)}

    assert fit(Takes(4, 3), INPUTS, LENGTHS, TARGETS).steps == 2
