"""TRL's trainers with a small Llama in float64, a tokenizer of words, and data of different lengths."""

import copy
import random

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from support.models.trainers import SETTINGS, TEXT, WIDTH

# Kinds that generate, with their types of loss.
GENERATING = [*(("grpo", kind) for kind in ("grpo", "bnpo", "dr_grpo", "dapo")), ("rloo", None)]
WORDS = [f"w{number}" for number in range(37)]
TRAINERS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
}


def tokenizer():
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{word: number + 3 for number, word in enumerate(WORDS)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    names = ["input_ids", "attention_mask"]  # without token types, which Transformers 4 makes and models refuse
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=names, **special)


def data(kind, samples):
    chance = random.Random(0)  # noqa: S311

    def text(most):
        return " " + " ".join(chance.choice(WORDS) for _ in range(chance.randint(2, most)))

    answers = ["completion"] if kind == "sft" else ["chosen", "rejected"]
    return Dataset.from_list([{"prompt": text(5), **{key: text(12) for key in answers}} for _ in range(samples)])


def model(kind):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_key_value_heads=1, num_labels=1, **TEXT, **WIDTH)
    family = transformers.LlamaForSequenceClassification if kind == "reward" else transformers.LlamaForCausalLM
    return family(config).double()


def mixture():
    """Qwen3-MoE, with a router's balancing loss."""
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.05}
    experts |= {"experts_implementation": "eager", "head_dim": 8}  # others cannot compute in float64
    config = transformers.Qwen3MoeConfig(num_key_value_heads=1, **experts, **TEXT, **WIDTH)
    return transformers.Qwen3MoeForCausalLM(config).double()


def trained(trainer, kind, folder, *, network=None, rows=None, samples=26, evaluated=13, train=True, **options):
    """A trainer that has trained: 3 updates of 12, 12 and 2 samples, if not told otherwise."""
    if kind == "dpo" and hasattr(trl.DPOTrainer, "concatenated_inputs"):
        pytest.skip(f"TRL {trl.__version__} makes batches of preferences of another form, which are refused")
    settings = SETTINGS | {"eval_strategy": "epoch", "bf16": False, "gradient_checkpointing": False}
    rows, network = rows or data(kind, samples), network or model(kind)
    reference = {"ref_model": copy.deepcopy(network)} if kind == "dpo" else {}
    made = trainer(
        model=network,
        args=TRAINERS[kind][1](str(folder), **(settings | options)),
        train_dataset=rows,
        eval_dataset=rows.select(range(evaluated)),
        processing_class=tokenizer(),
        **reference,
    )
    if train:
        made.train()
    return made


def generated(wrap, kind, folder, loss_type, *, network=None, **options):
    """A trainer that has trained on what it generated: 3 updates of 2 batches of 8."""
    base, config = {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig)}[kind]
    settings = {key: value for key, value in SETTINGS.items() if key != "per_device_eval_batch_size"}
    settings |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 3, "beta": 0.0}
    settings |= {"num_generations": 4, "max_completion_length": 6, "bf16": False, "gradient_checkpointing": False}
    made = wrap(base)(
        model=network or model("sft"),
        args=config(str(folder), **(settings | ({} if loss_type is None else {"loss_type": loss_type}) | options)),
        train_dataset=data("sft", 26).remove_columns(["completion"]),
        processing_class=tokenizer(),
        reward_funcs=lambda completions, **_: [float(len(one) + one.count("w1")) for one in completions],
    )
    made.train()
    return made
