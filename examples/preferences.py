"""Preferences (DPO) without whole logits: log-probabilities of a policy and of its reference, in chunks of tokens.

    python examples/preferences.py

A sample is a pair of answers, of which the first is preferred. Labels are -100 where a token does not count, and its
log-probability is then 0. The reference computes no gradients.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.records import FitResult


class Language(nn.Module):
    """Makes hidden states, shape (..., tokens, width), of tokens; its head makes logits of them."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(vocabulary, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of rows of tokens."""
        hidden: Tensor = self.mix(self.embed(tokens))[0]
        return hidden

    def answers(self, pairs: Tensor, labels: Tensor) -> Tensor:
        """Return the log-probability of each answer, shape (samples, 2)."""
        hidden = self(pairs[..., :-1].flatten(0, 1))
        found = autoaccum.ChunkedLoss(self.head).log_probs(hidden, labels[..., 1:].flatten(0, 1))
        return found.sum(-1).unflatten(0, pairs.shape[:2])


class Preference(nn.Module):
    """How much more than its reference, a copy that stays as it is, a policy prefers the first answer."""

    def __init__(self, policy: Language) -> None:
        super().__init__()
        self.policy, self.reference = policy, copy.deepcopy(policy).requires_grad_(requires_grad=False)

    def forward(self, pairs: Tensor, labels: Tensor) -> Tensor:
        """Return log-ratios, shape (samples,)."""
        with torch.no_grad():
            before = self.reference.answers(pairs, labels)
        first, second = (self.policy.answers(pairs, labels) - before).unbind(1)
        return first - second


def train(samples: int = 256, target_batch: int = 64, vocabulary: int = 32_000, length: int = 64) -> FitResult:
    """Train."""
    pairs = torch.randint(vocabulary, (samples, 2, length))
    prompt = torch.arange(length) < length // 4
    pairs[..., prompt] = pairs[:, :1, prompt]
    return autoaccum.fit(
        Preference(Language(vocabulary, width=64)),
        DataLoader(TensorDataset(pairs, pairs.masked_fill(prompt, -100)), batch_size=16),
        target_batch,
        forward=lambda model, batch: model(*batch),
        loss=lambda ratios, _: -functional.logsigmoid(0.1 * ratios).mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


if __name__ == "__main__":
    train()
