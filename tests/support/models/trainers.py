"""Small models of Transformers with ragged data in float64, and trainers of them that write nothing."""

import copy

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.models.t5.modeling_t5 import T5LayerNorm

from support.models.tiny_transformers import tiny

VOCABULARY, CLASSES = 40, 3
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
WIDTH = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_OF_TRAINER = "compute_loss_func", "compute_metrics", "train_dataset", "eval_dataset", "data_collator"
# 3 updates of 12, 12 and 2 samples, where nothing else is asked for.
SETTINGS = {
    "per_device_train_batch_size": 12,
    "per_device_eval_batch_size": 12,
    "num_train_epochs": 1,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 3,
}


# By these names of their own; those with CLASSES take no `num_items_in_batch`.
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {}),
    "llama": ("LlamaForCausalLM", {}),
    "t5": ("T5ForConditionalGeneration", {}),
    "bert": ("BertForTokenClassification", {"num_labels": CLASSES}),
    "bert for rows": ("BertForSequenceClassification", {"num_labels": CLASSES}),
    "vit": ("ViTForImageClassification", {"num_labels": CLASSES, "image_size": 8, "patch_size": 4}),
}


def model_of(name):
    kind, options = MODELS[name]
    model = tiny(kind, VOCABULARY, 32, bos_token_id=1, eos_token_id=1, pad_token_id=0, **options)
    # T5's own norms compute in single precision, whatever their parameters are.
    for module in [*model.modules()]:
        for place, norm in module.named_children():
            if isinstance(norm, T5LayerNorm):
                setattr(module, place, nn.RMSNorm(norm.weight.shape, norm.variance_epsilon))
    return model.double()


def rows_of(name, samples, seed=0):
    """Samples of different lengths; of some tokens no loss is taken."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length, most=VOCABULARY):
        return torch.randint(2, most, (length,), generator=generator)

    rows = []
    for length in torch.randint(3, 16, (samples,), generator=generator).tolist():
        if name == "vit":
            image = torch.randn(3, 8, 8, generator=generator, dtype=torch.float64)
            rows.append({"pixel_values": image, "labels": tokens(1, CLASSES)[0]})
            continue
        row = {"input_ids": tokens(length)}
        labels = row["input_ids"].clone()
        if name == "t5":
            labels = tokens(2 + length // 2)
        elif name == "bert":
            labels = torch.randint(CLASSES, (length,), generator=generator)
        labels[: length // 3] = -100
        row["labels"] = torch.randint(CLASSES, (), generator=generator) if name == "bert for rows" else labels
        rows.append(row)
    return rows


def collated(rows):
    if "pixel_values" in rows[0]:
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    batch = {"input_ids": padded([row["input_ids"] for row in rows], 0)}
    batch["attention_mask"] = padded([torch.ones_like(row["input_ids"]) for row in rows], 0)
    labels = [row["labels"] for row in rows]
    batch["labels"] = padded(labels, -100) if labels[0].dim() else torch.stack(labels)
    return batch


def padded(sequences, value):
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)


def trained(trainer, folder, name="gpt2", *, model=None, network=None, samples=26, resume=None, **options):
    """A trainer that has trained a network, or a copy of a model.

    It makes 3 updates of 12, 12 and 2 samples, if not told otherwise.
    """
    rows = rows_of(name, samples)
    given = {key: options.pop(key) for key in _OF_TRAINER if key in options}
    made = trainer(
        model=network or copy.deepcopy(model or model_of(name)),
        args=TrainingArguments(str(folder), **(SETTINGS | options)),
        **({"train_dataset": rows, "eval_dataset": rows[:13], "data_collator": collated} | given),
    )
    made.train(resume_from_checkpoint=resume)
    return made


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def history(trainer):
    """The log, without what depends on the clock."""
    clocks = ("runtime", "per_second")
    return [
        {key: value for key, value in entry.items() if not key.endswith(clocks)} for entry in trainer.state.log_history
    ]


__all__ = ["MODELS", "Trainer", "collated", "history", "model_of", "rows_of", "trained", "weights"]
