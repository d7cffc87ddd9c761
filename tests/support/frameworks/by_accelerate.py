"""A job in a loop as Accelerate's documentation writes it."""

import contextlib
import itertools
import os
from pathlib import Path
from unittest import mock

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from torch.utils.data import DataLoader

from autoaccum import Accumulator
from autoaccum.integrations.accelerate import auto_accumulate
from support.ranks.sharded import whole

PLACES = {"training": (Accumulator, "backward")}
OF_STATE = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}


@contextlib.contextmanager
def states_of_its_own(job):
    """Let Accelerate take this process for one of several; if the model is spread, also with an accelerator each.

    It gives FSDP to accelerators alone. Tensors stay on the host.
    """
    given = {"ACCELERATE_USE_CPU": "1", "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_IPEX": "false"}
    if job.size > 1:
        given |= {"RANK": f"{job.rank}", "LOCAL_RANK": f"{job.rank}", "WORLD_SIZE": f"{job.size}"}
        given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    forget()  # what an earlier training has left
    with mock.patch.dict(os.environ, given):
        if job.shards:
            PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        try:
            yield
        finally:
            forget()


def forget():
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._shared_state.clear()


def accelerator_of(job):
    if job.shards:
        given = {"fsdp_version": 2, "auto_wrap_policy": "size_based_wrap", "min_num_params": 16}
        given |= {"state_dict_type": OF_STATE[job.shards], "cpu_ram_efficient_loading": False} | job.strategy
        given = {"fsdp_plugin": FullyShardedDataParallelPlugin(**given)}
    else:
        given = {"cpu": True, "mixed_precision": "bf16" if job.half == "bf16" else "no"}
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        gradient_accumulation_steps=job.accumulates,
        **given,
        **({"dynamo_backend": "eager"} if job.compiles == "framework" else {}),
    )
    if job.half == "fp16":
        in_fp16(accelerator, job.scaler())
    return accelerator


def in_fp16(accelerator, scaler):
    """As it is on GPUs, where alone it allows fp16."""
    accelerator.state._mixed_precision, accelerator.native_amp, accelerator.scaler = "fp16", True, scaler


def gradient_of(job, accelerator, model, *, logs):
    """A function that computes a batch's gradient, and returns its loss and how it was cut."""

    def closure(batch):
        loss = job.loss_of(model(batch[0]), batch[1])  # of the prepared model, whose forward would wait for others
        if logs:
            accelerator.log({"loss": loss.item()})
        return loss

    def by_itself(batch):
        loss = closure(batch)
        accelerator.backward(loss)
        return loss.item(), None

    def by_ours(batch):
        try:
            report = backward(batch)
        finally:
            assert "log" not in vars(accelerator)
        return report.loss, report.micro_batches

    if job.ours is None:
        return by_itself
    compiled = getattr(model, "_orig_mod", None)
    try:
        backward = auto_accumulate(accelerator, model, closure=closure, **job.options)
    finally:
        assert getattr(model, "_orig_mod", None) is compiled
    return by_ours


def train(job, refused=None, logs=False):
    with states_of_its_own(job):
        accelerator, model = accelerator_of(job), job.network()
        optimizer = job.optimizer(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        loader = DataLoader(job.data(), batch_size=job.batch)
        if job.strategy.get("fsdp_version") != 1:  # which needs a GPU, but its refusal does not
            model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
        if refused is not None:
            accelerator.state.distributed_type = DistributedType[refused]
        gradient = gradient_of(job, accelerator, model, logs=logs)
        done = 0
        if job.resumes:
            done = max(int(path.name) for path in Path(job.folder).iterdir())
            accelerator.load_state(f"{job.folder}/{done}")
        log, cuts = [], []
        batches = itertools.chain.from_iterable(loader for _ in range(job.epochs))
        for number, batch in itertools.islice(enumerate(batches, 1), done, None):
            job.begin_step(number)
            with accelerator.accumulate(model):
                loss, cut = gradient(batch)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            cuts.append(cut)
            gathered = len(accelerator.gather_for_metrics(batch[1]))
            log.append({"loss": loss, "norm": float(norm), "rate": scheduler.get_last_lr()[0], "gathered": gathered})
            if job.folder is not None:
                accelerator.save_state(f"{job.folder}/{number}")
        scaler = None if accelerator.scaler is None else accelerator.scaler.state_dict()
        state = {name: whole(value).tolist() for name, value in accelerator.get_state_dict(model).items()}
        return job.record(model, log=log, cuts=cuts, steps=number, scaler=scaler, state=state)
