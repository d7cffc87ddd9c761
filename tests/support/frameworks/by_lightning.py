"""A job by Lightning's Trainer, and a module with metrics and outputs of all kinds."""

import logging
from pathlib import Path

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

from autoaccum import Accumulator
from autoaccum.integrations.lightning import AutoAccumulate
from support.data.small_samples import BATCH, CLASSES
from support.frameworks.jobs import Job, flat

VALUE_OF_PARTS = "right"  # a maximum over means, which of parts is not that of the whole
QUIET = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(pl.LightningModule):
    """Trains and evaluates a job's network; it lacks memory after metrics have counted."""

    def __init__(self, most=None, job=Job()):  # noqa: B008 - it never changes
        super().__init__()
        self.job, self.net = job, job.network()
        self.net.most = self.net.most if most is None else most
        self.body = self.net.body
        self.run_out = self.net.run_out

    def configure_model(self):
        if self.job.shards:
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.body[0], mesh=mesh)
            fully_shard(self.body, mesh=mesh)

    def forward(self, inputs):
        return self.body(inputs)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        outputs = self(inputs)
        self.run_out(inputs)
        loss = self.job.loss_of(outputs, labels)
        if isinstance(loss, torch.Tensor) and loss.dim() == 0:
            counted = int((flat(outputs, labels)[1] != -100).sum())
            self.log("mean", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=counted)
        self.log("samples", float(len(inputs)), reduce_fx="sum", sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        outputs, labels = flat(self(batch[0]), batch[1])
        self.run_out(batch[0])
        size = {"batch_size": len(batch[0]), "sync_dist": True}
        self.log("validation right", (outputs.argmax(1) == labels).double().mean(), **size)
        self.log("validation loss", outputs.square().mean(), **size)

    def configure_optimizers(self):
        optimizer = self.job.optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Classifier(Module):
    """Logs metrics and numbers of all kinds."""

    def __init__(self, most=None, job=Job()):  # noqa: B008 - it never changes
        super().__init__(most, job)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.several = torchmetrics.MetricCollection(
            [
                torchmetrics.Precision("multiclass", num_classes=CLASSES, average="macro"),
                torchmetrics.Recall("multiclass", num_classes=CLASSES, average="macro"),
            ]
        )
        self.of_validation = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self(inputs)
        self.accuracy(outputs, targets)
        self.several(outputs, targets)
        self.run_out(inputs)
        loss = functional.cross_entropy(outputs, targets)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict(self.several, on_step=True, on_epoch=True)
        self.log("samples", float(len(inputs)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log_dict(
            {"highest": outputs.max(), "right": (outputs.argmax(1) == targets).double().mean()},
            reduce_fx="max",
            on_step=True,
            on_epoch=False,
        )
        self.log("share", (outputs.argmax(1) == 0).double().mean(), batch_size=len(inputs), on_epoch=True)
        return {"loss": loss, "outputs": outputs.detach(), "mean": outputs.mean()}

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self(inputs)
        self.of_validation(outputs, targets)
        self.run_out(inputs)
        self.log("validation loss", functional.cross_entropy(outputs, targets))
        self.log("validation accuracy", self.of_validation, on_step=True, on_epoch=True)
        return outputs


class Judged(Classifier):
    """Has metrics whose value for a batch is no mean over its parts, some of which need two samples."""

    def __init__(self, most=None, job=Job()):  # noqa: B008 - it never changes
        super().__init__(most, job)
        self.needing_all = nn.ModuleDict(
            {
                "highest logit": torchmetrics.MaxMetric(),
                "lowest logit": torchmetrics.MinMetric(),
                "correlation": torchmetrics.PearsonCorrCoef(),
                "two samples": torchmetrics.R2Score(),
            }
        )

    def training_step(self, batch, batch_idx):
        inputs = batch[0]
        outputs = self(inputs)[:, 0].detach()
        for name, metric in self.needing_all.items():
            metric(outputs) if name.endswith("logit") else metric(outputs, inputs[:, 0])
            self.log(name, metric, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


class OwnLogger(Module):
    def training_step(self, batch, batch_idx):
        self.logger.log_metrics({"batch": batch_idx})
        return super().training_step(batch, batch_idx)


PLACES = {"training": (Accumulator, "backward"), "evaluation": (Judged, "validation_step")}


class Here(LightningEnvironment):
    """Processes that have joined already."""

    creates_processes_externally = True

    def __init__(self, job):
        super().__init__()
        self.job = job

    def world_size(self):
        return self.job.size

    def global_rank(self):
        return self.job.rank

    local_rank = global_rank

    def set_world_size(self, size):
        """Keep it."""

    set_global_rank = set_world_size


class Watch(pl.Callback):
    """Records, ends the job, and saves its state after each epoch."""

    def __init__(self, job, adapter):
        self.job, self.adapter = job, adapter
        self.seen, self.cuts = [], []

    def on_train_batch_start(self, trainer, *_):
        self.job.begin_step(trainer.global_step + 1)

    def on_train_batch_end(self, trainer, module, outputs, *_):
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append({"rate": rate} | ({"returned": float(outputs["loss"])} if self.job.size == 1 else {}))
        names = [name for name in trainer.callback_metrics if not name.endswith("_epoch") and name != VALUE_OF_PARTS]
        self.seen[-1] |= {name: float(trainer.callback_metrics[name]) for name in names}
        if self.adapter is not None:
            self.cuts.append(self.adapter.report.micro_batches)

    def on_train_epoch_end(self, trainer, *_):
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen.append({name: value for name, value in values.items() if name != VALUE_OF_PARTS})
        if self.job.folder is not None:
            trainer.save_checkpoint(f"{self.job.folder}/{trainer.global_step}.ckpt")


def strategy_of(job):
    if job.size == 1:
        return {}
    strategy = "ddp"
    if job.shards:
        shares = {"data_parallel_size": job.size, "tensor_parallel_size": 1} | job.strategy
        strategy = ModelParallelStrategy(**shares, save_distributed_checkpoint=job.shards == "sharded")
    return {"devices": job.size, "plugins": [Here(job)], "strategy": strategy}


def train(job, kind=Module, refused=None, logs=False):
    if job.size > 1:
        logging.disable(logging.CRITICAL)
    adapter = None if job.ours is None else AutoAccumulate(**job.options)
    watch, module, scaler = Watch(job, adapter), (OwnLogger if logs else kind)(None, job), job.scaler()
    if refused is not None:
        trainer = pl.Trainer(**QUIET)
        trainer._accelerator_connector.strategy = object.__new__(getattr(pl.strategies, refused))
        return adapter.setup(trainer, module, "fit")
    options = strategy_of(job)
    if job.half:
        options["plugins"] = [MixedPrecision({"bf16": "bf16-mixed", "fp16": "16-mixed"}[job.half], "cpu", scaler)]
    last = max((int(path.stem) for path in Path(job.folder).glob("*.ckpt")), default=0) if job.resumes else 0
    sampler = DistributedSampler(job.data(), job.size, job.rank, shuffle=False)  # Lightning's own would shuffle
    trainer = fitted(
        torch.compile(module, backend="eager") if job.compiles == "framework" else module,
        DataLoader(job.data(), batch_size=job.own_batch, sampler=sampler),
        *([watch] if adapter is None else [adapter, watch]),
        folder=job.folder if logs else None,
        validates=job.evaluates,
        epochs=job.epochs,
        checkpoint=f"{job.folder}/{last}.ckpt" if last else None,
        accumulate_grad_batches=job.accumulates,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
        **options,
    )
    scaler = None if scaler is None else scaler.state_dict()
    return job.record(module, log=watch.seen, cuts=watch.cuts, steps=trainer.global_step, scaler=scaler)


def fitted(module, data, *callbacks, folder=None, validates=False, epochs=1, checkpoint=None, **options):
    """A trainer that has trained a module by a loader, or by batches of some data."""
    settings = QUIET | {
        "max_epochs": epochs,
        "logger": CSVLogger(folder, version=0) if folder else False,
        "log_every_n_steps": 1,
        "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
        "num_sanity_val_steps": 0,
    }
    trainer = pl.Trainer(callbacks=list(callbacks), **(settings | options))
    loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=BATCH)
    trainer.fit(module, loader, loader if validates else None, ckpt_path=checkpoint)
    return trainer
