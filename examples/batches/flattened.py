"""Sequences flattened into one row without padding, as Transformers' DataCollatorWithFlattening makes it.

A flattened row does not say by its shape how many sequences it holds, so the loader yields lists of them, and each
micro-batch is flattened by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

import autoaccum
from autoaccum.records import FitResult

Sample = dict[str, list[int]]


def predicted(samples: list[Sample]) -> float:
    """Return the number of tokens that are predicted: all but each sequence's first."""
    return float(sum(len(sample["input_ids"]) - 1 for sample in samples))


def train(target_batch: int = 8) -> FitResult:
    """Train."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    lengths = [int(torch.randint(3, 12, ())) for _ in range(16)]
    data: Any = [{"input_ids": torch.randint(32, (length,)).tolist()} for length in lengths]
    return autoaccum.fit(
        LlamaForCausalLM(config),
        DataLoader(data, batch_size=4, collate_fn=list),
        target_batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        split=autoaccum.ListOfSamples(DataCollatorWithFlattening(), weight=predicted),
    )


if __name__ == "__main__":
    train()
