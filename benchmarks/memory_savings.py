"""Compares what saves memory: the largest micro-batch under a limit, and samples a second, on the CPU.

For each model, `fit` finds the largest micro-batch under a real limit without anything and with each of
`memory="chunked_loss"`, `"checkpoint"` and both, and then trains windows with it. Runs take turns over several rounds,
so that a slow moment of the machine affects all.

    python benchmarks/memory_savings.py [--rounds 3] [--out benchmarks/results/memory_savings.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
from pathlib import Path

import torch
from overhead import processor
from torch import nn

import autoaccum

LENGTH = 256
SAVINGS = {"none": None, "chunked_loss": "chunked_loss", "checkpoint": "checkpoint"}
SAVINGS["both"] = ["chunked_loss", "checkpoint"]


def gpt2(vocabulary):
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - takes seconds

    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_embd=192, n_layer=6, n_head=4, **tokens))


def llama(vocabulary):
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - takes seconds

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def vit(_classes):
    from torchvision.models import VisionTransformer  # noqa: PLC0415 - takes seconds

    return VisionTransformer(64, 8, num_layers=6, num_heads=4, hidden_dim=192, mlp_dim=768, num_classes=100)


# Name: what makes it, its vocabulary, the limit and the target batch.
MODELS = {
    "GPT-2, 32k": (gpt2, 32_000, "1200MiB", 16),
    "Llama, 128k": (llama, 128_000, "2600MiB", 16),
    "ViT": (vit, None, "300MiB", 128),
}


def run(name, saving, windows):
    """Return the largest micro-batch that `fit` finds under the limit, and samples a second after that."""
    make, vocabulary, limit, target = MODELS[name]
    torch.manual_seed(0)
    model = make(vocabulary)
    if vocabulary is None:
        batch = torch.randn(target, 3, 64, 64), torch.randint(100, (target,))
    else:
        tokens = torch.randint(vocabulary, (target, LENGTH))
        batch = {"input_ids": tokens, "labels": tokens}
    try:
        result = autoaccum.fit(
            model,
            [batch] * (windows + 3),
            target,
            loss=nn.CrossEntropyLoss() if vocabulary is None else None,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
            memory=saving,
            memory_limit=limit,
            strategy="balanced",
            precision="fp32",
            device="cpu",
            cache=False,
            progress=False,
        )
    except (autoaccum.DoesNotFitError, autoaccum.InvalidInputError) as error:
        return None, f"{type(error).__name__}: {error}"
    finally:
        del model
        gc.collect()
    times = [report.elapsed_s for report in result.history[-windows:]]
    return result.plan.micro_batch, target / statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    results = {}
    print("| model, vocabulary | limit | saving | largest micro-batch | samples/s beside none (range) |")
    print("|---|---|---|---|---|")
    for name, (_, _, limit, _) in MODELS.items():
        found = {key: [] for key in SAVINGS}
        for _ in range(options.rounds):
            for key, saving in SAVINGS.items():
                found[key].append(run(name, saving, options.windows))
        results[name] = found
        for key, runs in found.items():
            if runs[0][0] is None:
                print(f"| {name} | {limit} | {key} | - | {runs[0][1][:80]} |", flush=True)
                continue
            speeds = sorted(
                speed / plain for (_, speed), (size, plain) in zip(runs, found["none"], strict=True) if size
            )
            ratio = f"{statistics.median(speeds):.2f} ({speeds[0]:.2f} to {speeds[-1]:.2f})" if speeds else "-"
            sizes = sorted({size for size, _ in runs})
            print(f"| {name} | {limit} | {key} | {' or '.join(map(str, sizes))} | {ratio} |", flush=True)
    machine = f"{processor()}, {torch.get_num_threads()} threads"
    print(f"\n{machine}, torch {torch.__version__}, Python {platform.python_version()}, {LENGTH} tokens a sample")
    if options.out is not None:
        record = {"machine": machine, "torch": torch.__version__, "results": results}
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
