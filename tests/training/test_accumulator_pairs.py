"""A loop that trains on what its policy generated: rows of unlike length, advantages, and its own count of tokens."""

import copy

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._system.notices import Notices

ROWS, LONGEST, WORDS = 11, 9, 13


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)
        self.double()

    def forward(self, tokens):
        return self.head(self.words(tokens).cumsum(1)).log_softmax(-1)


def generated(policy, seed):
    """What a step of generation and scoring leaves: tokens, their mask, log-probabilities and advantages."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (ROWS, LONGEST), generator=generator)
    mask = torch.arange(LONGEST) < torch.randint(1, LONGEST, (ROWS, 1), generator=generator)
    rewards = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        old = logps_of(policy, tokens) + 0.3 * torch.randn(ROWS, LONGEST - 1, generator=generator)
    return {"tokens": tokens, "mask": mask[:, 1:], "old": old, "advantages": (rewards - rewards.mean()) / rewards.std()}


def logps_of(policy, tokens):
    return policy(tokens[:, :-1]).gather(-1, tokens[:, 1:, None])[..., 0]


def objective(policy, batch):
    """The clipped objective as the sum over tokens and their number."""
    ratios, advantages = (logps_of(policy, batch["tokens"]) - batch["old"]).exp(), batch["advantages"][:, None]
    losses = -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


@pytest.mark.parametrize("memory_runs_out", [False, True])
def test_loop_with_its_own_count_of_tokens_has_the_gradient_of_the_whole_batch(memory_runs_out):
    whole, ours = Policy(), Policy()
    reference = copy.deepcopy(ours)
    most = 4 if memory_runs_out else ROWS

    def loss(batch):
        if len(batch["tokens"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return objective(ours, batch)

    size = "auto" if memory_runs_out else 4
    accumulator = autoaccum.Accumulator(
        ours, closure=loss, device="cpu", micro_batch=size, notices=Notices(silent=True)
    )
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (whole, ours)]
    for seed in range(4):
        batch = generated(reference, seed)
        total, tokens = objective(whole, batch)
        (total / tokens).backward()
        report = accumulator.backward(batch)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

        assert max(report.micro_batches) <= 4
        assert report.loss == pytest.approx(float(total.detach() / tokens), rel=1e-12)
    for mine, other in zip(ours.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0.0, atol=1e-12)
