"""A few samples to classify, and a few sentences with ragged labels."""

import torch
from torch.utils.data import TensorDataset

SAMPLES, BATCH, CLASSES, WORDS = 28, 12, 3, 11  # the last batch has 4


def vectors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def words_and_labels():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (SAMPLES, 6), generator=generator)
    labels = words.clone()
    for row, length in enumerate(torch.randint(2, 7, (SAMPLES,), generator=generator).tolist()):
        labels[row, length:] = -100
    return TensorDataset(words, labels)
