"""A classifier of sentences with Transformers' Trainer: python classifier.py MICRO_BATCH ACCUM_STEPS."""

import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

micro_batch, accum_steps = map(int, sys.argv[1:])
torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
model = BertForSequenceClassification(BertConfig(num_labels=3, **sizes))
data = [{"input_ids": torch.randint(0, 50, (12,)), "labels": torch.randint(0, 3, ()).item()} for _ in range(32)]
settings = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size=micro_batch,
    gradient_accumulation_steps=accum_steps,
    max_steps=2,
    report_to=[],
    use_cpu=True,
)
Trainer(model, settings, train_dataset=data).train()
