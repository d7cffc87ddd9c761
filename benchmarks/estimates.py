"""Compares estimates of a training step's memory with the real step, on the CPU.

    python benchmarks/estimates.py [--models resnet18 gpt2] [--precisions fp32] [--out FILE]

The truth is the memory that PyTorch's CPU allocator hands out, from the profiler's memory events, during a step with
AdamW in the middle of training (gradients and optimizer state exist); `gpu.py` does the same on a GPU. Seconds are for
all sizes, including the model's construction.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from measuring import keep, machine

from autoaccum._estimate.estimate import estimate_step
from support.processes.allocations import real_peak

TORCHVISION = [
    "resnet18",
    "resnet50",
    "vgg11",
    "squeezenet1_1",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "shufflenet_v2_x1_0",
    "regnet_y_400mf",  # its constructor reads values, so it is made on the CPU
    "convnext_tiny",
    "vit_b_32",
    "swin_t",
]
IMAGE, SAMPLES, LENGTH, VOCABULARY = 224, 4, 64, 500
NARROW = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
SEQ2SEQ = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
}
# By name: class of the model and of its configuration, and what the configuration is given beside a small vocabulary.
LANGUAGE = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 128, "n_layer": 4, "n_head": 4}),
    "bert": ("BertForMaskedLM", "BertConfig", NARROW),
    "llama": ("LlamaForCausalLM", "LlamaConfig", NARROW | {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", NARROW | {"num_key_value_heads": 2}),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", NARROW | {"embedding_size": 128}),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", {"dim": 128, "n_layers": 4, "n_heads": 4}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "ffn_dim": 512,
            "word_embed_proj_dim": 128,
        },
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ),
}
MODELS = (*LANGUAGE, *TORCHVISION)


def make(name):
    """Make a model in training mode."""
    if name in TORCHVISION:
        from torchvision import models  # noqa: PLC0415 - each is large

        return getattr(models, name)()
    import transformers  # noqa: PLC0415 - as above

    kind, configuration, options = LANGUAGE[name]
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return getattr(transformers, kind)(
        getattr(transformers, configuration)(vocab_size=VOCABULARY, **tokens, **options)
    ).train()


def batch_for(name):
    torch.manual_seed(0)
    if name in TORCHVISION:
        return (
            torch.randn(SAMPLES, 3, IMAGE, IMAGE),
            torch.randint(1000, (SAMPLES,)),
        )
    tokens = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def measure(name, precision):
    batch = batch_for(name)
    make(name)  # its import is not part of the estimate's time
    began_s = time.perf_counter()
    estimate = estimate_step(functools.partial(make, name), batch, precision=precision)
    row = {"model": name, "precision": precision, "seconds": time.perf_counter() - began_s}
    predicted = estimate.footprints[-1]
    row |= {"predicted_bytes": predicted.peak_bytes, "predicted_reserved_bytes": predicted.reserved_bytes}
    row["real_bytes"] = real_peak(make(name), batch, precision=precision)
    return row


def error_of(row):
    return row["predicted_bytes"] / row["real_bytes"] - 1


def markdown(rows):
    lines = ["| model | precision | real MiB | error | seconds |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['model']} | {row['precision']} | {row['real_bytes'] / 2**20:.1f} | {error_of(row):+.2%} | "
        f"{row['seconds']:.2f} |"
        for row in rows
    ]
    errors = [abs(error_of(row)) for row in rows]
    return "\n".join([*lines, "", f"Median error {statistics.median(errors):.2%}, worst {max(errors):.2%}."])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--precisions", nargs="+", default=("fp32", "bf16"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = {"machine": machine(), "threads": torch.get_num_threads(), "rows": []}
    # Imports of the first estimate are not part of any model's time.
    estimate_step(torch.nn.Linear(2, 2), (torch.zeros(2, 2), torch.zeros(2, dtype=torch.long)))
    for name, precision in itertools.product(options.models, options.precisions):
        row = measure(name, precision)
        results["rows"].append(row)
        print(f"{name} {precision}: {error_of(row):+.2%} in {row['seconds']:.2f} s", file=sys.stderr, flush=True)
        keep(options.out, results)
    print(markdown(results["rows"]))


if __name__ == "__main__":
    main()
