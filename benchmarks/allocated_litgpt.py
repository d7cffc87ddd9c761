"""Traces the trainings of published/litgpt.csv on fake tensors of the card they ran on.

They are LitGPT's fine-tuning scripts (PyTorch 2.1, an A100) in bf16 without checkpointing; the number is
`torch.cuda.max_memory_allocated()` in thousands of millions of bytes. A training begins with its longest sample, whose
tokens are published too, so its first iteration decides. Models are those of the package litgpt, 0.2.0. Three things
differ from transformers':

- Queries, keys and values are one product, whose memory the values, a part of it, keep until the backward pass: two
  tensors more for each layer.
- RMSNorm keeps its input in float32. That of the commit that the table names computes in bf16, which would be 3 to 5 %
  less for Llama, and does not fit the table.
- Lightning's Fabric returns the scores in float32.
"""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from fake_card import CARD, on_fake_card, served, update
from torch import nn

from autoaccum._estimate.cuda_dispatch import cublas_bytes
from autoaccum._estimate.estimate import take_lists
from autoaccum._estimate.fake_backward import loosened

RUNS = Path(__file__).parent / "published" / "litgpt.csv"
NUMBER = "tensors"
CARD_NAME = "a100-40gb"
_LORA = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "lora_query": True, "lora_value": True}
_CHUNK = 128


def runs():
    with RUNS.open() as lines:
        for line in csv.DictReader(lines):
            yield {
                **line,
                "source": "litgpt",
                "of": line["method"],
                "card": CARD_NAME,
                "real_bytes": int(float(line["gb"]) * 1e9),
            }


def predicted_bytes(run):
    batch, tokens = int(run["batch"]), int(run["tokens"])
    with on_fake_card(_model(run["model"], run["method"]), batch) as (model, timeline):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if (size := sum(parameter.numel() for parameter in trained)) != int(run["trainable"]):
            raise ValueError(f"{size} weights are trained here, and {run['trainable']} were")
        optimizer = torch.optim.AdamW(trained)
        take_lists(optimizer)
        model.max_seq_length = tokens
        ids, targets = (torch.zeros(batch, tokens, dtype=torch.long, device=CARD) for _ in range(2))
        loss = loosened(_loss(model, ids, targets))
        loss.backward()
        update(optimizer)
    return served(timeline, cublas=2 * [cublas_bytes(CARD_NAME)]).peak_allocated_bytes


def _loss(model, ids, targets):
    """Return the loss as the scripts of 2023 computed it, in chunks from the last layer on."""
    logits = [scores.float() for scores in model(ids, lm_head_chunk_size=_CHUNK)]  # as Lightning's Fabric returns them
    logits[-1] = logits[-1][..., :-1, :]
    parts = [
        nn.functional.cross_entropy(scores.reshape(-1, scores.size(-1)), part.reshape(-1), reduction="none")
        for scores, part in zip(logits, targets[..., 1:].split(_CHUNK, dim=1), strict=True)
    ]
    return torch.cat(parts).mean()


def _model(name, method):
    from litgpt import adapter, adapter_v2, lora  # noqa: PLC0415 - in an environment of `make published` alone

    of = {"lora": lora, "adapter": adapter, "adapter_v2": adapter_v2}[method]
    settings = of.Config.from_name(name, **(_LORA if method == "lora" else {}))
    with torch.device("meta"):
        made = of.GPT(settings).to(torch.bfloat16)
    mark = {
        "lora": "mark_only_lora_as_trainable",
        "adapter": "mark_only_adapter_as_trainable",
        "adapter_v2": "mark_only_adapter_v2_as_trainable",
    }
    getattr(of, mark[method])(made)
    return made
