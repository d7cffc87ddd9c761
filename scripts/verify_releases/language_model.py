"""A language model on padded sentences with Transformers' Trainer: python language_model.py MICRO_BATCH ACCUM_STEPS."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

micro_batch, accum_steps = map(int, sys.argv[1:])
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2))
tokens, lengths = torch.randint(0, 50, (32, 32)), torch.randint(3, 30, (32, 1))
is_token = torch.arange(32) < lengths
labels = torch.where(is_token, tokens, -100)
rows = zip(tokens, is_token.long(), labels, strict=True)
data = [dict(zip(("input_ids", "attention_mask", "labels"), row, strict=True)) for row in rows]
settings = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size=micro_batch,
    gradient_accumulation_steps=accum_steps,
    max_steps=2,
    report_to=[],
    use_cpu=True,
)
Trainer(model, settings, train_dataset=data).train()
