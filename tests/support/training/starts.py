"""Starts of one job, by a loop of one's own and by each framework, with autoaccum's adapters.

    python tests/support/training/starts.py HOW FOLDER

trains under a real limit of the host's memory, by HOW a method of `Start`, or "plain" for a loop without autoaccum.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._memory.available_devices import backend_for  # a limit around a framework's own loop

LIMIT, LAYERS = 48 << 20, 56


class Wide(nn.Module):
    """A sample takes about a megabyte, with one layer."""

    def __init__(self, layers=1):
        super().__init__()
        torch.manual_seed(0)
        hidden = [one for _ in range(layers) for one in (nn.Linear(64, 64), nn.ReLU())]
        self.body = nn.Sequential(*hidden, nn.Linear(64, 8))

    def forward(self, inputs, targets=None):
        outputs = self.body(inputs.repeat(1, 1, 1)).mean(1)
        return outputs if targets is None else {"loss": functional.mse_loss(outputs, targets)}


def rows(samples):
    return torch.randn(samples, 1024, 64), torch.randn(samples, 8)


class Start:
    """A start of a job, by a loop of one's own or one of a framework; notes the micro-batches of its batches."""

    def __init__(self, how, folder, batches=4, layers=1, **options):
        self.found, self.batches, self.model = [], batches, Wide(layers)
        self.options = options
        getattr(self, how)(folder)

    def loader(self):
        return torch.utils.data.DataLoader(range(64 * self.batches), batch_size=64, collate_fn=self.collate)

    def collate(self, numbers):
        return dict(zip(("inputs", "targets"), rows(len(numbers)), strict=True))

    def loss(self, part):
        return self.model(**part)["loss"]

    def loop(self, _, backward=None):
        backward = backward or autoaccum.Accumulator(self.model, closure=self.loss, **self.options).backward
        for batch in self.loader():
            self.found.append(backward(batch).micro_batches)
            self.model.zero_grad()

    def accelerate(self, folder):
        from accelerate import Accelerator  # noqa: PLC0415

        from autoaccum.integrations.accelerate import auto_accumulate  # noqa: PLC0415

        accelerator = Accelerator(cpu=True)
        self.model = accelerator.prepare(self.model)
        self.loop(folder, auto_accumulate(accelerator, self.model, closure=self.loss, **self.options))

    def transformers(self, folder):
        import transformers as kind  # noqa: PLC0415

        from autoaccum.integrations.transformers import auto_accumulate  # noqa: PLC0415

        noted, args = self.found, {"max_steps": self.batches, "per_device_train_batch_size": 64, "save_strategy": "no"}
        args |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}

        class Noting(kind.TrainerCallback):
            def on_step_end(self, *_, **__):
                noted.append(trainer.autoaccum.last_backward.micro_batches)

        trainer = auto_accumulate(kind.Trainer, **self.options)(
            self.model,
            kind.TrainingArguments(str(folder), dataloader_pin_memory=False, **args),
            train_dataset=range(64 * self.batches),
            data_collator=self.collate,
            callbacks=[Noting()],
        )
        trainer.train()

    def lightning(self, _):
        import lightning.pytorch as pl  # noqa: PLC0415

        from autoaccum.integrations.lightning import AutoAccumulate  # noqa: PLC0415

        callback, start = AutoAccumulate(**self.options), self

        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = start.model

            def training_step(self, batch):
                return start.loss(batch)

            def on_train_batch_end(self, *_):
                start.found.append(callback.report.micro_batches)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback], **options).fit(Module(), self.loader())


def main(how, folder):
    torch.set_num_threads(1)
    if how == "plain":
        with backend_for(torch.device("cpu")).limited(LIMIT):
            Wide(LAYERS)(*rows(64))["loss"].backward()
    sys.stdout.write(f"{len(Start(how, folder, layers=LAYERS, memory_limit=LIMIT).found)} batches\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
