"""Windows of samples of unlike width are cut by what is known of such samples: whole where they fit, few failures."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import autoaccum
from support.data.ragged import Causal, padded

MIB = 2**20


def of_attention(width):
    """Bytes that a sample takes in a transformer with eager attention, as measured: 1,024 tokens take 23 to 117 MiB."""
    return int(MIB * width * (23 / 1024 + (117 - 23) / (1024 * 992) * max(0, width - 32)))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

    def forward(self, tokens):
        return self.head(self.embed(tokens)).transpose(1, 2)


class Sixty(Tokens):
    def forward(self, tokens):
        if tokens.numel() > 60:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {tuple(tokens.shape)}")
        return super().forward(tokens)


class Attention(nn.Module):
    """Takes memory with the square of the length, as eager attention does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        rows, length = tokens.shape
        torch.empty(rows, of_attention(length), dtype=torch.uint8)
        return self.weight * tokens.float().sum(1)  # of which padding is no part


def cut(widths, batch, *, model=None, device="15GiB", **options):
    """Train on a batch of each width, a window each; return the result."""
    generator = torch.Generator().manual_seed(1)
    loader = [torch.randint(0, 31, (2, batch, width), generator=generator).unbind() for width in widths]
    return autoaccum.fit(
        model or Tokens(),
        loader,
        batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        device=device if isinstance(device, Caches) else autoaccum.Simulated(device),
        **{"loss": nn.CrossEntropyLoss(), "progress": False} | options,
    )


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Every window is cut as large as it can be."""
    monkeypatch.setattr("autoaccum._training.plan_lifecycle._WINDOWS_WORTH_TIMING", 10**9)
    monkeypatch.setattr("autoaccum._training.plan_lifecycle._WINDOWS_BEFORE_TIMING", 10**9)


def steps_of(result):
    return [len(report.micro_batches) for report in result.history]


def recomputed(result):
    return sum(report.recomputed_samples > 0 for report in result.history)


class Caches(autoaccum.Simulated):
    """Counts what its cache holds as used until that is given back, as the allocator of CUDA and the heap do."""

    is_trimmed = False

    def trim(self):
        self.is_trimmed = True

    def reading(self):
        found = super().reading()
        found = found if self.is_trimmed else replace(found, free_bytes=0)
        self.is_trimmed = False
        return found


def test_what_a_cache_holds_makes_no_micro_batches_smaller():
    result = cut([*[20] * 8, *range(21, 41)], 32, device=Caches("15GiB"))

    assert steps_of(result)[8:] == [1] * 20


def test_windows_of_any_width_that_fit_are_never_cut_once_the_search_has_ended():
    chance = random.Random(0)  # noqa: S311 - a simulation

    result = cut([chance.randint(20, 40) for _ in range(60)], 32)

    assert set(steps_of(result)[1:]) == {1}
    assert result.oom_events == 0


def test_narrow_first_batch_does_not_make_later_micro_batches_small():
    result = cut([5, 6, 6, 6, 6], 8)

    assert steps_of(result)[1:] == [1, 1, 1, 1]


@pytest.mark.parametrize("at", [0, 20])
def test_one_wide_batch_among_narrow_ones_costs_them_nothing(at):
    widths = [5, 6, 7] * 15
    widths.insert(at, 50)

    result = cut(widths, 8, model=Sixty())

    assert sum(steps_of(result)) <= 60
    assert result.oom_events <= 5


def test_window_of_tokens_in_lists_takes_two_micro_batches_at_most():
    loader = [[torch.ones(length, dtype=torch.long) for length in (8, 7, 5, 3, 1)]]

    result = autoaccum.fit(
        Causal(),
        loader,
        target_tokens=24,
        micro_batch=16,
        split=autoaccum.ListOfSamples(padded),
        device="cpu",
        precision="fp32",
        progress=False,
    )

    assert sum(steps_of(result)) <= 2


def lognormal(windows):
    chance = random.Random(0)  # noqa: S311 - a simulation
    return [min(1024, max(16, int(chance.lognormvariate(4.8, 0.9)))) for _ in range(windows)]


def test_texts_of_unlike_length_hardly_ever_fail_and_fill_the_memory():
    batch, capacity, widths = 64, 120 * MIB, lognormal(300)
    most = [capacity // of_attention(width) for width in widths]

    result = cut(widths, batch, model=Attention(), device=capacity, loss=lambda outputs, _: outputs.mean())

    failures = result.oom_events + recomputed(result)
    assert failures <= 1
    assert sum(steps_of(result)) <= 1.10 * sum(math.ceil(batch / size) for size in most)


def test_lists_are_cut_by_the_width_of_their_longest_sample():
    """Long texts in small micro-batches, short ones of the same window in large ones."""
    seen = []

    def collate(samples):
        ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        return ids, torch.zeros(len(samples))

    class Counts(Attention):
        def forward(self, tokens):
            seen.append(tuple(tokens.shape))
            return super().forward(tokens)

    texts = [torch.ones(length, dtype=torch.long) for length in [200] * 4 + [20] * 60]
    autoaccum.fit(
        Counts(),
        [texts] * 6,
        64,
        loss=lambda outputs, _: outputs.mean(),
        split=autoaccum.ListOfSamples(collate),
        device=autoaccum.Simulated(40 * MIB),
        progress=False,
    )

    window = seen[-1:]
    while sum(rows for rows, _ in window) < 64:
        window.insert(0, seen[len(seen) - len(window) - 1])
    assert {length for _, length in window} == {200, 20}
    assert max(rows for rows, length in window if length == 20) >= 2 * max(
        rows for rows, length in window if length == 200
    )


def test_cost_of_a_split_replaces_the_widths():
    """Memory does not go with the elements here, but with a number that only the split knows."""

    class Costly(autoaccum.ListOfSamples):
        def cost(self, batch):
            return max(sample["cost"] for sample in batch)

    def collate(samples):
        return {"costs": [sample["cost"] for sample in samples], "targets": torch.zeros(len(samples))}

    class Bears(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, costs, targets):
            if len(costs) * max(costs) > 64:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return {"loss": (self.weight * len(costs) - targets).square().mean()}

    loader = [[{"cost": cost} for _ in range(16)] for cost in [4, 4, 4, 32, 32, 4, 4]]
    result = autoaccum.fit(
        Bears(), loader, 16, loss_reduction="mean", split=Costly(collate), device="cpu", progress=False
    )

    costly, cheap = result.history[3:5], result.history[5:]
    assert all(max(report.micro_batches) <= 2 for report in costly)
    assert all(report.micro_batches == (16,) for report in cheap)


def test_width_whose_prediction_is_far_too_high_is_tried_with_one_sample():
    result = cut([16] * 5 + [200], 32, device="300KiB")

    assert result.steps == 6
    assert result.oom_events == 0
