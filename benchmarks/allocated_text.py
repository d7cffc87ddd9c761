"""Traces the trainings of published/allocated_text.csv on fake tensors of the card they ran on.

They use transformers' Trainer with the settings in the file's columns: bf16 weights, every block checkpointed
(reentrant), PyTorch's AdamW, gradients clipped, batches of one length without padding. What its models keep differs
between versions, so only the runs of the installed version are traced. Flash attention is replaced by PyTorch's
attention, which calls the same kernel, without the copies of shared keys that transformers makes for it.
"""

from __future__ import annotations

import csv
import importlib.metadata
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from fake_card import CARD, on_fake_card, served, update

from autoaccum._estimate.cuda_dispatch import autocast, cublas_bytes
from autoaccum._estimate.estimate import take_lists
from autoaccum._estimate.fake_backward import loosened

NUMBER = "tensors"
RUNS = Path(__file__).parent / "published" / "allocated_text.csv"
ITERATIONS = 2
_ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
# Configurations as published, because nothing is downloaded.
MODELS = {
    "bigcode/gpt_bigcode-santacoder": (
        "GPTBigCodeConfig",
        {
            "vocab_size": 49280,
            "n_positions": 2048,
            "n_embd": 2048,
            "n_layer": 24,
            "n_head": 16,
            "n_inner": 8192,
            "activation_function": "gelu_pytorch_tanh",
        },
    ),
    "mistralai/Mistral-7B-v0.1": ("MistralConfig", {"sliding_window": None}),
    "ibm/PowerLM-3b": (
        "GraniteConfig",
        {
            "vocab_size": 49152,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 40,
            "num_attention_heads": 36,
            "num_key_value_heads": 36,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    ),
}


def published_runs():
    with RUNS.open() as lines:
        for line in csv.DictReader(lines):
            yield {
                **line,
                "source": "fms-acceleration",
                "run": f"{line['model']} {line['method']} {line['batch']}",
                "of": f"transformers {line['transformers']}",
                "real_bytes": int(line["peak_bytes"]),
            }


def runs():
    at_hand = importlib.metadata.version("transformers")
    return [run for run in published_runs() if run["transformers"] == at_hand]


def predicted_bytes(run):
    """Trace two iterations of a training, and return what its tensors and cuBLAS's workspaces take at most."""
    batch, tokens = int(run["batch"]), int(run["tokens"])
    with _shared_keys(), on_fake_card(_model(run["model"], run["method"]), batch) as (model, timeline):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters)
        take_lists(optimizer)
        for _ in range(ITERATIONS):
            # A batch has tokens, labels, and a mask without padding.
            ids, labels, _mask = (torch.zeros(batch, tokens, dtype=torch.long, device=CARD) for _ in range(3))
            with autocast(torch.bfloat16) if run["autocast"] == "true" else nullcontext():
                loss = loosened(model(input_ids=ids, labels=labels)["loss"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            update(optimizer)
            optimizer.zero_grad()
            del loss
    return served(timeline, cublas=2 * [cublas_bytes(run["card"])]).peak_allocated_bytes


def _model(name, method):
    import transformers  # noqa: PLC0415 - large

    configuration, options = MODELS[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, configuration)(use_cache=False, **options),
            torch_dtype=torch.bfloat16,
            attn_implementation="sdpa",
        )
        if method == "lora":
            import peft  # noqa: PLC0415 - in the environments of `make published` alone

            adapted = peft.LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules=list(_ADAPTED))
            model = peft.get_peft_model(model, adapted)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    if method == "lora":
        model.enable_input_require_grads()
    return model


@contextmanager
def _shared_keys():
    """Do not copy keys and values that heads share, as for flash attention."""
    from transformers.models.granite import modeling_granite  # noqa: PLC0415 - large
    from transformers.models.mistral import modeling_mistral  # noqa: PLC0415 - large

    modules = [modeling_granite, modeling_mistral]
    try:
        from transformers.integrations import sdpa_attention  # noqa: PLC0415 - not in every version
    except ImportError:
        pass
    else:
        modules.append(sdpa_attention)
    asked = [(module, module.repeat_kv) for module in modules if hasattr(module, "repeat_kv")]
    for module, _ in asked:
        module.repeat_kv = lambda keys, _times: keys
    try:
        yield
    finally:
        for module, function in asked:
            module.repeat_kv = function
