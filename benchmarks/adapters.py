"""Measures what each adapter costs beside its framework's own accumulation, with the same cut.

Transformers' `Trainer`, Lightning's `Trainer` and a loop by Accelerate train the same network on the same samples, once
with their own accumulation (a loader of micro-batches) and once by the adapter (a loader of whole batches, and
`micro_batch=`), in blocks of updates in turn in one process, so that a slow moment of the machine affects both. An
update's time is that from the end of the one before, its loading included; the first updates of each block, in which
the adapter checks what it read of the loss, are left out. Times are the process's CPU time: it has one thread and waits
for nothing, and what else runs on the machine disturbs this less than the clock.

    python benchmarks/adapters.py [--quick] [--only transformers lightning accelerate] [--blocks 15] [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from bench import keep, machine
from torch import nn
from torch.utils.data import DataLoader

from autoaccum._system.notices import Notices

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- adapters: begin -->", "<!-- adapters: end -->"
MICRO_BATCHES = 4
MICRO_BATCH = 8  # samples
FEATURES, CLASSES = 64, 10
# Vectors in a sample and hidden width, chosen so that a micro-step takes about 1 and 10 ms on one core.
SIZES = {"1 ms": (16, 256), "10 ms": (16, 768)}
WARM_UP = 4
UPDATES = {"1 ms": 16, "10 ms": 6}  # that count, in each block
TITLES = {
    "transformers": "Transformers, `windowed(Trainer)`",
    "lightning": "Lightning, `Windowed()`",
    "accelerate": "Accelerate, `windowed(...)`",
}
SILENT = Notices(silent=True)


class Network(nn.Module):
    """Returns its loss with its outputs, as Transformers' models do."""

    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
        )

    def forward(self, inputs, labels):
        """Return loss and outputs."""
        outputs = self.layers(inputs).mean(1)
        return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}


@dataclass(frozen=True)
class Job:
    """One training: `updates` updates of `MICRO_BATCHES` micro-batches, by the adapter or by the framework alone."""

    vectors: int
    width: int
    updates: int
    by_adapter: bool

    @property
    def batch(self):
        """Samples of one of the loader's batches."""
        return MICRO_BATCH * (MICRO_BATCHES if self.by_adapter else 1)

    @property
    def samples(self):
        """Samples of all updates."""
        return self.updates * MICRO_BATCHES * MICRO_BATCH

    def collate(self):
        """Return what makes a batch of samples' numbers, so that loading costs next to nothing."""
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(MICRO_BATCHES * MICRO_BATCH, self.vectors, FEATURES, generator=generator)
        labels = torch.randint(CLASSES, (len(inputs),), generator=generator)

        def collate(numbers):
            chosen = torch.tensor(numbers) % len(inputs)
            return {"inputs": inputs[chosen], "labels": labels[chosen]}

        return collate

    def loader(self):
        """Return a loader of all batches."""
        return DataLoader(range(self.samples), batch_size=self.batch, collate_fn=self.collate())


# --- a training by each framework: the network that was trained, and the time after each update -----------------------


def by_transformers(job):
    import transformers  # noqa: PLC0415 - each framework is imported where it is measured

    from autoaccum.integrations.transformers import windowed  # noqa: PLC0415

    ended = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_args, **_kwargs):
            ended.append(time.process_time())

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    trainer = windowed(InOrder, micro_batch=MICRO_BATCH, notices=SILENT) if job.by_adapter else InOrder
    network = Network(job.width)
    with tempfile.TemporaryDirectory() as folder:
        trainer(
            network,
            transformers.TrainingArguments(
                folder,
                per_device_train_batch_size=job.batch,
                gradient_accumulation_steps=1 if job.by_adapter else MICRO_BATCHES,
                max_steps=job.updates,
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
            ),
            train_dataset=range(job.samples),
            data_collator=job.collate(),
            callbacks=[Clock()],
        ).train()
    return network, ended


def by_lightning(job):
    import lightning.pytorch as pl  # noqa: PLC0415

    from autoaccum.integrations.lightning import Windowed  # noqa: PLC0415

    ended = []

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = Network(job.width)

        def training_step(self, batch, _batch_idx):
            return self.network(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class Clock(pl.Callback):
        def on_train_batch_end(self, trainer, *_args, **_kwargs):
            if trainer.global_step > len(ended):
                ended.append(time.process_time())

    module = Module()
    adapter = [Windowed(micro_batch=MICRO_BATCH, notices=SILENT)] if job.by_adapter else []
    pl.Trainer(
        max_steps=job.updates,
        accumulate_grad_batches=1 if job.by_adapter else MICRO_BATCHES,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*adapter, Clock()],
    ).fit(module, job.loader())
    return module.network, ended


def by_accelerate(job):
    from accelerate import Accelerator  # noqa: PLC0415
    from accelerate.state import GradientState  # noqa: PLC0415

    from autoaccum.integrations.accelerate import windowed  # noqa: PLC0415

    ended = []
    GradientState._reset_state()  # kept for the process
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1 if job.by_adapter else MICRO_BATCHES)
    network = Network(job.width)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(network, optimizer, job.loader())
    if job.by_adapter:
        backward = windowed(
            accelerator,
            model,
            closure=lambda batch: model(**batch)["loss"],
            micro_batch=MICRO_BATCH,
            notices=SILENT,
        )
        for batch in loader:
            backward(batch)
            optimizer.step()
            optimizer.zero_grad()
            ended.append(time.process_time())
        return network, ended
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ended.append(time.process_time())
    return network, ended


FRAMEWORKS = {"transformers": by_transformers, "lightning": by_lightning, "accelerate": by_accelerate}


# --- both in turn -----------------------------------------------------------------------------------------------------


def measure(name, size, blocks, updates):
    """Return, for each pair of blocks, the median seconds of an update by the framework alone and by the adapter."""
    pairs = []
    for turn in range(blocks + 1):
        took = {}
        for by_adapter in (False, True) if turn % 2 else (True, False):
            _, ended = FRAMEWORKS[name](Job(*SIZES[size], WARM_UP + updates, by_adapter))
            took[by_adapter] = statistics.median(
                after - before for before, after in zip(ended[WARM_UP - 1 :], ended[WARM_UP:], strict=False)
            )
        if turn:  # the first pair warms the process up
            pairs.append((took[False], took[True]))
    return pairs


def summary(pairs):
    def spread(values):
        low, median, high = statistics.quantiles(values, n=4)
        return {"median": median, "quartiles": [low, high]}

    return {
        "framework_us_per_micro_step": spread([alone / MICRO_BATCHES * 1e6 for alone, _ in pairs]),
        "adapter_us_per_micro_step": spread([adapter / MICRO_BATCHES * 1e6 for _, adapter in pairs]),
        "ratio": spread([adapter / alone for alone, adapter in pairs]),
        "added_us_per_micro_step": spread([(adapter - alone) / MICRO_BATCHES * 1e6 for alone, adapter in pairs]),
        "blocks": len(pairs),
    }


def table(results):
    """Return the results as a table, and the machine below it."""

    def shown(found, form):
        low, high = found["quartiles"]
        return f"{found['median']:{form}} ({low:{form}} to {high:{form}})"

    lines = [
        "| adapter | micro-step | framework alone, µs | with the adapter, µs | ratio | added, µs a micro-step |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {TITLES[row['adapter']]} | {row['size']} | {row['framework_us_per_micro_step']['median']:.0f} "
        f"| {row['adapter_us_per_micro_step']['median']:.0f} | {shown(row['ratio'], '.3f')} "
        f"| {shown(row['added_us_per_micro_step'], '.0f')} |"
        for row in results["adapters"]
    ]
    about = results["machine"]
    wanted = ("torch", "transformers", "lightning", "accelerate", "Python")
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in wanted)
    blocks = " or ".join(str(number) for number in sorted({row["blocks"] for row in results["adapters"]}))
    where = (
        f"({about['cpu']}, 1 thread, {about['cores']} cores shared with other work, load at the start "
        f"{about['load']:.1f}; {versions}; {MICRO_BATCHES} micro-batches of {MICRO_BATCH} samples an update, SGD; "
        f"medians of the CPU time in {blocks} pairs of blocks, quartiles in brackets.)"
    )
    lines += ["", where]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few blocks; nothing is written without --out")
    parser.add_argument("--only", nargs="+", choices=tuple(FRAMEWORKS), default=tuple(FRAMEWORKS))
    parser.add_argument("--blocks", type=int, default=15, help="pairs of blocks in which updates are timed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    is_whole = not options.quick and set(options.only) == set(FRAMEWORKS)
    out = options.out or (ROOT / f"benchmarks/results/adapters-{os.cpu_count()}-cores.json" if is_whole else None)
    page = options.page or (ROOT / "docs/benchmarks.md" if is_whole else None)
    torch.set_num_threads(1)  # small operators on several threads measure the threads
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    results = {"machine": machine(), "adapters": []}
    results["machine"]["versions"]["transformers"] = importlib.metadata.version("transformers")
    for name in options.only:
        for size in SIZES:
            pairs = measure(name, size, 3 if options.quick else options.blocks, UPDATES[size])
            results["adapters"].append({"adapter": name, "size": size} | summary(pairs))
            print(json.dumps(results["adapters"][-1]), flush=True)
            keep(out, results)
    print(table(results))
    if page is not None:
        before, rest = page.read_text().split(BEGIN)
        page.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
