"""Traces the trainings of published/peft.csv on fake tensors of the card they ran on.

They are peft's comparison of methods on MetaMathQA: Llama-3.2-3B in bf16 with batches of 4 and without checkpointing,
AdamW and clipped gradients. The number is the largest `torch.cuda.memory_reserved()` after any step, so the segments of
the allocator, of which the loop returns the unused ones every 10 steps. Every 20 steps begin with the longest samples
of 80, right after such a return; the outputs of a step live until the next has its own.

How long the longest batch of a training is, is not published (at most 768 tokens), and is the same in all of them,
since they read the same samples in the same order. The trainings of `FITTED_TO` took what 696 tokens take; it tests
nothing and is left out of the results.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
from pathlib import Path

import torch
from fake_card import CARD, on_fake_card, update

from autoaccum._estimate.cuda_allocator import CachingAllocator, replay
from autoaccum._estimate.cuda_dispatch import cublas_bytes
from autoaccum._estimate.estimate import take_lists
from autoaccum._estimate.fake_backward import loosened

RUNS = Path(__file__).parent / "published" / "peft.csv"
NUMBER = "segments"
CARD_NAME = "l40s"
BATCH = 4
FITTED_TO = "lora-rank32"
# The batch before, of which only the outputs are left, and the longest.
TOKENS = (100, 696)
# The loop subtracts what was reserved as it began: one small segment.
_AT_FIRST_BYTES = 2 * 2**20
_LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


def runs():
    """Yield the runs of the installed version of transformers; those of one method and of equal numbers once."""
    at_hand = importlib.metadata.version("transformers")
    seen = set()
    with RUNS.open() as lines:
        for line in csv.DictReader(lines):
            method = json.loads(line["adapter"]).get("peft_type", "full")
            which = method, line["trainable"], line["peak_bytes"]
            if line["transformers"] == at_hand and line["run"] != FITTED_TO and which not in seen:
                seen.add(which)
                yield {
                    **line,
                    "source": "peft",
                    "of": method,
                    "card": CARD_NAME,
                    "real_bytes": int(line["peak_bytes"]),
                }


def predicted_bytes(run):
    timeline = timeline_of(run)
    allocator, blocks = CachingAllocator(), {}
    for size_bytes in 2 * [cublas_bytes(CARD_NAME)]:
        allocator.allocate(size_bytes)
    begins = 0
    for ends in [index for index, phase in timeline.phases if phase == "returned"]:
        allocator.release_cached()
        replay(allocator, timeline, timeline.events[begins:ends], blocks)
        begins = ends
    return allocator.reserved_bytes - _AT_FIRST_BYTES


def timeline_of(run):
    """Trace two iterations, with a phase "returned" at the end of each."""
    with on_fake_card(_model(run), BATCH) as (model, timeline):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if (size := sum(parameter.numel() for parameter in trained)) != int(run["trainable"]):
            raise ValueError(f"{size} weights are trained here, and {run['trainable']} were")
        optimizer = torch.optim.AdamW(trained)
        take_lists(optimizer)
        held = []
        for tokens in TOKENS:
            ids, labels, mask = (torch.zeros(BATCH, tokens, dtype=torch.long, device=CARD) for _ in range(3))
            optimizer.zero_grad()
            outputs = model(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=BATCH * tokens)
            held[:] = [tensor.detach() for tensor in _tensors_of(outputs)]
            loss = loosened(outputs.loss)
            del outputs
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            update(optimizer)
            timeline.phases.append((len(timeline.events), "returned"))
    return timeline


def _tensors_of(outputs):
    """Return what outlives the step: the logits, and the cache of keys and values."""
    layers = [] if outputs.past_key_values is None else outputs.past_key_values.layers
    return [outputs.logits, *(tensor for layer in layers for tensor in (layer.keys, layer.values))]


def _model(run):
    import transformers  # noqa: PLC0415 - large

    if run["optimizer"] != "AdamW":
        raise ValueError(f"{run['optimizer']} is an optimizer of peft")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**_LLAMA), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    options = json.loads(run["adapter"])
    if not options:
        return model
    import peft  # noqa: PLC0415 - in an environment of `make published` alone

    # On the CPU, since some adapters read values as they are made; peft moves them to the model.
    kind = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[options.pop("peft_type")]
    return peft.get_peft_model(model, kind(**options), autocast_adapter_dtype=run["adapter_in_float32"] == "True")
