"""Preferences with a trainer of TRL (dpo or cpo): python preferences.py KIND MICRO_BATCH ACCUM_STEPS."""

import random
import sys
import tempfile

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

kind, (micro_batch, accum_steps) = sys.argv[1], map(int, sys.argv[2:])
vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", *(f"w{n}" for n in range(38))])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))  # noqa: S106
words.pre_tokenizer = pre_tokenizers.Whitespace()
special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<eos>"}
names = ["input_ids", "attention_mask"]
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_input_names=names, **special)


def text(most: int) -> str:
    """Return a few words."""
    return " " + " ".join(random.choices(list(vocabulary)[2:], k=random.randint(2, most)))  # noqa: S311


random.seed(0)
torch.manual_seed(0)
data = Dataset.from_list([{"prompt": text(5), "chosen": text(12), "rejected": text(12)} for _ in range(32)])
sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
config = transformers.LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0)
trainer, settings, more = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {}),
    "cpo": (trl.CPOTrainer, trl.CPOConfig, {"cpo_alpha": 0.0}),
}[kind]
arguments = settings(
    tempfile.mkdtemp(),
    per_device_train_batch_size=micro_batch,
    gradient_accumulation_steps=accum_steps,
    max_steps=2,
    report_to=[],
    use_cpu=True,
    bf16=False,
    **more,
)
model = transformers.LlamaForCausalLM(config)
trainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer).train()
