"""Modules that take samples for time steps are named, once."""

import pytest
import torch
from torch import nn

import autoaccum

SAMPLES, TIME = 8, 5


class Tagger(nn.Module):
    """Tags each step; expects (T, N) unless it turns its input itself."""

    def __init__(self, *, turns=False, layer=None):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.layer = nn.GRU(4, 4) if layer is None else layer
        self.head = nn.Linear(4, 3)
        self.turns = turns

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        hidden = hidden.transpose(0, 1) if self.turns else hidden
        hidden = self.layer(hidden)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.head(hidden.transpose(0, 1) if self.turns else hidden)


def loader(*shape):
    return [(torch.randint(9, shape), torch.randint(3, shape)) for _ in range(2)]


def own_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def trained(model, batches, capsys, **options):
    autoaccum.fit(model, batches, 4, max_steps=4, micro_batch=2, device="cpu", **options)
    return [line for line in capsys.readouterr().err.splitlines() if "batch_first" in line]


@pytest.mark.parametrize(
    ("layer", "name"),
    [(nn.GRU(4, 4), "GRU 'layer'"), (nn.TransformerEncoderLayer(4, 2, 8), "MultiheadAttention 'layer.self_attn'")],
)
def test_module_that_takes_samples_for_time_is_named_where_the_loss_is_refused(capsys, layer, name):
    with pytest.raises(autoaccum.InvalidInputError, match="neither a mean nor a sum") as caught:
        trained(Tagger(layer=layer), loader(SAMPLES, TIME), capsys, loss=own_loss)

    (said,) = [note for note in caught.value.__notes__ if "batch_first" in note]
    assert name in said
    assert "split=autoaccum.Along(1)" in said


def test_data_cut_along_its_samples_is_not_warned_of(capsys):
    assert trained(Tagger(), loader(TIME, SAMPLES), capsys, split=autoaccum.Along(1)) == []
