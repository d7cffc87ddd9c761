"""Texts of unlike length: a small causal model that heeds its attention mask, and loaders that pad."""

import torch
from torch import nn

VOCABULARY, PAD = 23, 0


class Causal(nn.Module):
    """Predicts each next token from the sum of those before it, in double precision."""

    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, width).double()
        self.mix = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )
        self.mix.double()
        self.head = nn.Linear(width, VOCABULARY).double()
        self.shapes = []

    def forward(self, input_ids, attention_mask, labels):
        self.shapes.append(tuple(input_ids.shape))
        embedded = self.tokens(input_ids) * attention_mask[..., None]
        logits = self.head(self.mix(embedded.cumsum(1)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss}


def texts(*lengths):
    """One text for each length, all different."""
    chance = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(1, VOCABULARY, (length,), generator=chance) for length in lengths]


def padded(texts, width=None):
    """A batch as Transformers' collators make it."""
    width = width or max(map(len, texts))
    ids, mask = torch.full((len(texts), width), PAD), torch.zeros(len(texts), width, dtype=torch.int64)
    labels = torch.full((len(texts), width), -100)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)], labels[row, : len(text)] = text, 1, text
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def lengths_of(samples, seed=1, most=24):
    """Lengths, most of them short."""
    drawn = torch.empty(samples).log_normal_(1.5, 0.7, generator=torch.Generator().manual_seed(seed))
    return [min(most, 2 + int(one)) for one in drawn]


def loader_of(samples, batch, seed=1, **how):
    """A list of batches, each padded to its longest text."""
    each = texts(*lengths_of(samples, seed))
    return [padded(each[at : at + batch], **how) for at in range(0, samples, batch)]
