"""Trainings of Lightning and of Accelerate with autoaccum's adapters, on several ranks and alone to compare."""

import logging
import os
import warnings
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autoaccum

SAMPLES, BATCH = 36, 12  # a batch of all ranks together


class Tight(nn.Module):
    """Lacks memory for more samples at once than `most`, in training and in evaluation."""

    def __init__(self, most):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double()
        self.body[1].eval()
        self.body[1].train = lambda _=True: self.body[1]
        self.most = most

    @property
    def is_limited(self):
        """Not where a few samples show what the loss runs over."""
        return self.training or torch.is_inference_mode_enabled()

    def forward(self, inputs):
        outputs = self.body(inputs)
        if self.most is not None and self.is_limited and len(inputs) > self.most:
            raise torch.OutOfMemoryError("told to")
        return outputs


def samples():
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(3, (SAMPLES,), generator=generator)
    targets[::3] = -100  # so that the ranks' parts weigh differently
    return TensorDataset(torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64), targets)


def part_of_samples(rank, size):
    sampler = DistributedSampler(samples(), size, rank, shuffle=False)
    return DataLoader(samples(), batch_size=BATCH // size, sampler=sampler)


def options():
    return {"device": autoaccum.Simulated("1GiB")}


def parameters(module):
    return [parameter.detach().tolist() for parameter in module.parameters()]


def here(rank, size):
    """Return an environment of Lightning whose processes have joined already."""
    from lightning.pytorch.plugins.environments import LightningEnvironment  # noqa: PLC0415 - only some ranks need it

    class Here(LightningEnvironment):
        """Processes that have joined already."""

        creates_processes_externally = True

        def world_size(self):
            return size

        def global_rank(self):
            return rank

        def local_rank(self):
            return rank

        def set_world_size(self, size):
            """Keep it."""

        def set_global_rank(self, rank):
            """Keep it."""

    return Here


def lightning(rank, size, *, most=(), is_ours=True):
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import lightning.pytorch as pl  # noqa: PLC0415 - only some ranks need it

    from autoaccum.integrations.lightning import AutoAccumulate  # noqa: PLC0415

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Tight(dict(most).get(rank))

        def training_step(self, batch):
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
            return loss

        def validation_step(self, batch):
            outputs = self.net(batch[0])
            right = (outputs.argmax(1) == batch[1]).double().mean()
            self.log("right", right, sync_dist=True, batch_size=len(batch[0]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Sizes(pl.Callback):
        found = ()

        def on_train_batch_end(self, trainer, *_):
            self.found = (*self.found, *((callback.report.micro_batches,) if is_ours else ()))

    callback, sizes, module = AutoAccumulate(**options()), Sizes(), Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[callback, sizes] if is_ours else [],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **({"strategy": "ddp", "devices": size, "plugins": [here(rank, size)()]} if size > 1 else {}),
    )
    loader = part_of_samples(rank, size)
    trainer.fit(module, loader, loader)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"parameters": parameters(module), "logged": logged, "sizes": sizes.found, "steps": trainer.global_step}


@contextmanager
def accelerator_of(rank, size, **options):
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}", "ACCELERATE_USE_CPU": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # which are looked at, and not used
    warnings.simplefilter("ignore")
    from accelerate import Accelerator  # noqa: PLC0415 - only some ranks need it
    from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: PLC0415

    try:
        accelerator = Accelerator(cpu=True, **options)
        assert accelerator.num_processes == size
        yield accelerator
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_USE_CPU", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]


def compiled(rank, size):
    """Return what is said of a model that Accelerate compiles around DistributedDataParallel, and if that is left."""
    from autoaccum.integrations import accelerate as adapter  # noqa: PLC0415 - only some ranks need it

    with accelerator_of(rank, size, dynamo_backend="eager") as accelerator:
        model = accelerator.prepare(Tight(None))
        inner = model._orig_mod
        try:
            adapter.auto_accumulate(accelerator, model, loss=nn.CrossEntropyLoss(), **options())
        except autoaccum.InvalidInputError as error:
            return str(error), isinstance(inner, nn.parallel.DistributedDataParallel) and model._orig_mod is inner
    return "", False


def accelerate(rank, size, *, most=(), is_ours=True, compiles=False):
    from autoaccum.integrations import accelerate as adapter  # noqa: PLC0415 - only some ranks need it

    with accelerator_of(rank, size) as accelerator:
        model, loss = Tight(dict(most).get(rank)), nn.CrossEntropyLoss()
        if compiles:
            model.compile(backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = part_of_samples(rank, size)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses, gathered = [], []
        if is_ours:
            # A closure of the prepared model, whose forward would wait for the other ranks.
            backward = adapter.auto_accumulate(
                accelerator, model, closure=lambda b: loss(model(b[0]), b[1]), **options()
            )
        for batch in loader:
            if is_ours:
                losses.append(backward(batch).loss)
            else:
                value = loss(model(batch[0]), batch[1])
                accelerator.backward(value)
                losses.append(value.item())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            gathered.append(len(accelerator.gather_for_metrics(batch[1])))
        return {"parameters": parameters(model), "losses": losses, "gathered": gathered}
