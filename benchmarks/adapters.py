"""Measures what each adapter costs beside its framework's own accumulation, with the same micro-batches.

A plain loop, Transformers' `Trainer`, Lightning's `Trainer` and a loop by Accelerate train the same network on the same
samples, once with their own accumulation (a loader of micro-batches) and once by autoaccum (a loader of whole batches,
and `micro_batch=`), in blocks of steps in turn in one process, so that a slow moment of the machine affects both. A
step's time is that from the end of the one before, its loading included; the first steps of each block, in which
autoaccum checks what it read of the loss, are left out. Times are the process's CPU time: it has one thread and waits
for nothing, and what else runs on the machine disturbs this less than the clock.

    python benchmarks/adapters.py [--only loop transformers lightning accelerate] [--pairs 20] [--page FILE]
"""

import argparse
import functools
import importlib.metadata
import logging
import statistics
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path

import lightning.pytorch as pl
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import GradientState
from measuring import machine, told, write_into
from torch import nn
from torch.utils.data import DataLoader

import autoaccum
from autoaccum.integrations import accelerate as for_accelerate
from autoaccum.integrations import lightning as for_lightning
from autoaccum.integrations import transformers as for_transformers

MICRO_BATCHES, MICRO_BATCH = 4, 8  # of a step; samples of each
BATCH = MICRO_BATCHES * MICRO_BATCH
# Chosen so that a micro-batch takes 1 to 2 ms on one core.
VECTORS, FEATURES, WIDTH, CLASSES = 16, 64, 256, 10
WARM_UP, STEPS = 4, 16  # of each block; the latter count
SAMPLES = (WARM_UP + STEPS) * BATCH
OPTIONS = {"micro_batch": MICRO_BATCH}


class Network(nn.Module):
    """Returns its loss with its outputs, as Transformers' models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
        )

    def forward(self, inputs, labels):
        """Return loss and outputs."""
        outputs = self.layers(inputs).mean(1)
        return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}


@functools.cache
def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH, VECTORS, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (BATCH,), generator=generator)


def collate(numbers):
    """Return a batch of samples' numbers, so that loading costs next to nothing."""
    inputs, labels = samples()
    chosen = torch.tensor(numbers) % BATCH
    return {"inputs": inputs[chosen], "labels": labels[chosen]}


def loader_of(is_ours):
    return DataLoader(range(SAMPLES), batch_size=BATCH if is_ours else MICRO_BATCH, collate_fn=collate)


def optimizer_of(module):
    return torch.optim.SGD(module.parameters(), lr=1e-3)


# --- a training by each: calls `ended` after each step --------------------------------------------------------------


def loop(is_ours, ended):
    network = Network()
    optimizer = optimizer_of(network)
    if is_ours:
        backward = autoaccum.Accumulator(network, closure=lambda batch: network(**batch)["loss"], **OPTIONS).backward
    for number, batch in enumerate(loader_of(is_ours), 1):
        if is_ours:
            backward(batch)
        else:
            (network(**batch)["loss"] / MICRO_BATCHES).backward()
        if is_ours or number % MICRO_BATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()
            ended()


def by_transformers(is_ours, ended):
    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_args, **_kwargs):
            ended()

    kind = transformers.Trainer
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH if is_ours else MICRO_BATCH,
            gradient_accumulation_steps=1 if is_ours else MICRO_BATCHES,
            max_steps=WARM_UP + STEPS,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        )
        options = {"train_dataset": range(SAMPLES), "data_collator": collate, "callbacks": [Clock()]}
        (for_transformers.auto_accumulate(kind, **OPTIONS) if is_ours else kind)(Network(), args, **options).train()


def by_lightning(is_ours, ended):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = Network()

        def training_step(self, batch):
            return self.network(**batch)["loss"]

        def configure_optimizers(self):
            return optimizer_of(self)

    class Clock(pl.Callback):
        def on_train_batch_end(self, _trainer, _module, _outputs, _batch, number):
            if is_ours or (number + 1) % MICRO_BATCHES == 0:
                ended()

    pl.Trainer(
        max_steps=WARM_UP + STEPS,
        accumulate_grad_batches=1 if is_ours else MICRO_BATCHES,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*([for_lightning.AutoAccumulate(**OPTIONS)] if is_ours else []), Clock()],
    ).fit(Module(), loader_of(is_ours))


def by_accelerate(is_ours, ended):
    GradientState._reset_state()  # kept for the process
    accelerator, network = Accelerator(cpu=True, gradient_accumulation_steps=1 if is_ours else MICRO_BATCHES), Network()
    model, optimizer, loader = accelerator.prepare(network, optimizer_of(network), loader_of(is_ours))
    if is_ours:
        closure = lambda batch: model(**batch)["loss"]  # noqa: E731
        backward = for_accelerate.auto_accumulate(accelerator, model, closure=closure, **OPTIONS)
    for batch in loader:
        with accelerator.accumulate(model):
            if is_ours:
                backward(batch)
            else:
                accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ended()


TRAININGS = {
    "loop": ("Own loop, `Accumulator`", loop),
    "transformers": ("Transformers, `auto_accumulate(Trainer)`", by_transformers),
    "lightning": ("Lightning, `AutoAccumulate()`", by_lightning),
    "accelerate": ("Accelerate, `auto_accumulate(...)`", by_accelerate),
}


# --- both in turn -----------------------------------------------------------------------------------------------------


def seconds_of(training, is_ours):
    """Return the median seconds of a step."""
    ended = []
    training(is_ours, lambda: ended.append(time.process_time()))
    return statistics.median(after - before for before, after in pairwise(ended[WARM_UP - 1 :]))


def row(name, pairs):
    """Return a training's line of the table."""
    title, training = TRAININGS[name]
    found = []
    for turn in range(pairs + 1):
        took = {is_ours: seconds_of(training, is_ours) for is_ours in ((False, True) if turn % 2 else (True, False))}
        found += [(took[False], took[True])] if turn else []  # the first pair warms the process up
    plain, ours = (statistics.median(side) / MICRO_BATCHES * 1e6 for side in zip(*found, strict=True))
    low, ratio, high = statistics.quantiles([mine / theirs for theirs, mine in found], n=4)
    return f"| {title} | {plain:.0f} | {ours:.0f} | {told((low, ratio, high), digits=3)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(TRAININGS), default=tuple(TRAININGS))
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks in which steps are timed")
    parser.add_argument("--page", type=Path, help="a page that gets the table between its markers")
    options = parser.parse_args()
    torch.set_num_threads(1)  # small operators on several threads measure the threads
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    about, versions = machine(), ("torch", "transformers", "lightning", "accelerate")
    lines = ["| adapter | alone, µs a micro-batch | with autoaccum, µs | ratio |", "|---|---|---|---|"]
    lines += [row(name, options.pairs) for name in options.only]
    where = (
        f"({about['cpu']}, 1 thread, {about['cores']} cores shared with other work, load at the start "
        f"{about['load']:.1f}; {', '.join(f'{name} {importlib.metadata.version(name)}' for name in versions)}; "
        f"{MICRO_BATCHES} micro-batches of {MICRO_BATCH} samples an optimizer step, SGD; medians of the CPU time in "
        f"{options.pairs} pairs of blocks, quartiles in brackets.)"
    )
    table = "\n".join([*lines, "", where])
    print(table)
    if options.page is not None:
        write_into(options.page, table, "adapters")


if __name__ == "__main__":
    main()
