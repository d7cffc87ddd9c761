"""Trainings of Accelerate, Lightning and Transformers with autoaccum's adapters, on several ranks and alone to compare.

By DistributedDataParallel, or spread by FSDP2 (`is_spread`); one may be killed, and go on. Accelerate gives FSDP to
accelerators alone; on a machine without one it is told that its processes have some.
"""

import contextlib
import logging
import os
import signal
import warnings
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autoaccum
from autoaccum._engine.dtensor import fsdp_modules  # whether a framework has sharded a model at all
from support.ranks.sharded import whole

SAMPLES, BATCH = 36, 12  # a batch of all ranks together
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_USE_CPU", "MASTER_ADDR", "MASTER_PORT")
OF_STATE = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


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


def options(is_spread):
    return {"micro_batch": 4} if is_spread else {"device": autoaccum.Simulated("1GiB")}


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


# --- Accelerate -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def told_of_ranks(rank, size, *, have_devices=True):
    """Let Accelerate take this process for one of several, also with an accelerator each (tensors stay on the host)."""
    os.environ |= dict(zip(VARIABLES, (f"{rank}", f"{rank}", f"{size}", "1", "localhost", "1"), strict=True))
    warnings.simplefilter("ignore")
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState  # noqa: PLC0415

    def forget():
        for kind in (AcceleratorState, GradientState, PartialState):
            kind._shared_state.clear()

    forget()  # what a training of one process has left
    try:
        if have_devices:
            state = PartialState(cpu=True)
            state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        yield
    finally:
        forget()
        for name in list(os.environ):
            if name in VARIABLES or name.startswith(("FSDP_", "ACCELERATE_")):
                del os.environ[name]


def accelerator_of(*, is_spread, state="full", version=2, **given):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin  # noqa: PLC0415 - only some ranks need it

    if not is_spread:
        return Accelerator(cpu=True, **given)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="size_based_wrap",
        min_num_params=16,
        state_dict_type=OF_STATE[state],
        cpu_ram_efficient_loading=False,
    )
    return Accelerator(fsdp_plugin=plugin)


def compiled(rank, size):
    """Return what is said of a model that Accelerate compiles around DistributedDataParallel, and if that is left."""
    from autoaccum.integrations import accelerate as adapter  # noqa: PLC0415 - only some ranks need it

    with told_of_ranks(rank, size, have_devices=False):
        accelerator = accelerator_of(is_spread=False, dynamo_backend="eager")
        model = accelerator.prepare(Tight(None))
        inner = model._orig_mod
        try:
            adapter.auto_accumulate(accelerator, model, loss=nn.CrossEntropyLoss(), **options(is_spread=False))
        except autoaccum.InvalidInputError as error:
            return str(error), isinstance(inner, nn.parallel.DistributedDataParallel) and model._orig_mod is inner
    return "", False


def accelerate(
    rank,
    size,
    folder=None,
    *,
    is_spread=False,
    is_ours=True,
    compiles=False,
    state="full",
    kill_at=None,
    resumes=False,
    most=(),
    version=2,
):
    """Train two epochs; return parameters, losses and what was gathered; saves after each batch, to a folder."""
    from autoaccum.integrations import accelerate as adapter  # noqa: PLC0415 - only some ranks need it

    with told_of_ranks(rank, size, have_devices=is_spread):
        accelerator = accelerator_of(is_spread=is_spread, state=state, version=version)
        assert accelerator.num_processes == size
        model, loss = Tight(dict(most).get(rank)), nn.CrossEntropyLoss()
        if compiles:
            model.compile(backend="eager")
        optimizer = adam(model.parameters())
        if version != 1:  # which needs a GPU, but its refusal does not
            model, optimizer = accelerator.prepare(model, optimizer)

        def closure(batch):  # of the prepared model, whose forward would wait for the other ranks
            return loss(model(batch[0]), batch[1])

        if is_ours:
            backward = adapter.auto_accumulate(accelerator, model, closure=closure, **options(is_spread))
        found = {"losses": [], "gathered": [], "cuts": []}
        done = 0
        if resumes:
            done = max(int(path.name) for path in Path(folder).iterdir())
            accelerator.load_state(f"{folder}/{done}")
        batches = [*part_of_samples(rank, size), *part_of_samples(rank, size)]
        for number, batch in enumerate(batches[done:], done + 1):
            if number == kill_at:
                killed()
            if is_ours:
                report = backward(batch)
                found["losses"].append(report.loss)
                found["cuts"].append(report.micro_batches)
            else:
                value = closure(batch)
                accelerator.backward(value)
                found["losses"].append(value.item())
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found["gathered"].append(len(accelerator.gather_for_metrics(batch[1])))
            if folder is not None:
                accelerator.save_state(f"{folder}/{number}")
        state_dict = accelerator.get_state_dict(model)  # whole, on rank 0
        kept = {name: whole(value).tolist() for name, value in state_dict.items()}
        return {"parameters": [whole(one).clone() for one in model.parameters()], "state": kept, **found}


# --- Lightning --------------------------------------------------------------------------------------------------------


def already_here(rank, size):
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


def lightning(  # noqa: C901 - a module and its callbacks
    rank,
    size,
    folder=None,
    *,
    is_spread=False,
    is_ours=True,
    state="full",
    kill_at=None,
    resumes=False,
    most=(),
    tensors=1,
):
    """Train two epochs; return parameters, what was logged and the sizes; saves after each epoch, to a folder."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import lightning.pytorch as pl  # noqa: PLC0415 - only some ranks need it
    from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: PLC0415

    from autoaccum.integrations.lightning import AutoAccumulate  # noqa: PLC0415

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Tight(dict(most).get(rank))

        def configure_model(self):
            if is_spread:
                mesh = self.device_mesh["data_parallel"]
                fully_shard(self.net.body[0], mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch):
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
            return loss

        def validation_step(self, batch):
            outputs = self.net(batch[0])
            self.log("right", (outputs.argmax(1) == batch[1]).double().mean(), sync_dist=True, batch_size=len(batch[0]))

        def configure_optimizers(self):
            return adam(self.parameters())

    class Watch(pl.Callback):
        found = ()

        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step + 1 == kill_at:
                killed()

        def on_train_batch_end(self, trainer, *_):
            self.found = (*self.found, *((callback.report.micro_batches,) if is_ours else ()))

        def on_train_epoch_end(self, trainer, *_):
            if folder is not None:
                trainer.save_checkpoint(f"{folder}/{trainer.global_step}.ckpt")

    callback, watch, module = AutoAccumulate(**options(is_spread)), Watch(), Module()
    strategy = {"devices": size, "plugins": [already_here(rank, size)()], "strategy": "ddp"} if size > 1 else {}
    if is_spread:
        strategy["strategy"] = ModelParallelStrategy(
            data_parallel_size=size // tensors,
            tensor_parallel_size=tensors,
            save_distributed_checkpoint=state == "sharded",
        )
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[callback, watch] if is_ours else [watch],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        gradient_clip_val=0.5,
        **strategy,
    )
    loader = part_of_samples(rank, size)
    last = max((int(path.stem) for path in Path(folder).glob("*.ckpt")), default=0) if resumes else 0
    trainer.fit(module, loader, loader, ckpt_path=f"{folder}/{last}.ckpt" if resumes else None)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    parameters = [whole(one).clone() for one in module.parameters()]
    return {"parameters": parameters, "logged": logged, "sizes": watch.found, "steps": trainer.global_step}


# --- Transformers and TRL ---------------------------------------------------------------------------------------------


def trainer(rank, size, folder, *, kind="gpt2", state="full", kill_at=None, resumes=False):
    """Train with `Trainer` or SFTTrainer; return parameters and the log. On one process, as it is."""
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers  # noqa: PLC0415 - slow
    from transformers.trainer_utils import get_last_checkpoint  # noqa: PLC0415

    from autoaccum.integrations.transformers import auto_accumulate  # noqa: PLC0415
    from support.models import trainers  # noqa: PLC0415

    class Killing(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step + 1 == kill_at:
                killed()

    own = {"per_device_train_batch_size": 12 // size, "per_device_eval_batch_size": 12 // size, "max_grad_norm": 0.5}
    own |= {"eval_strategy": "epoch", "num_train_epochs": 2, "lr_scheduler_type": "constant", "save_strategy": "steps"}
    own |= {"save_steps": 1 if size > 1 else 100}
    with told_of_ranks(rank, size) if size > 1 else contextlib.nullcontext():
        if size > 1:
            layer = "GPT2Block" if kind == "gpt2" else "LlamaDecoderLayer"
            config = {"version": 2, "state_dict_type": OF_STATE[state], "transformer_layer_cls_to_wrap": [layer]}
            config |= {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
            own["accelerator_config"] = {"use_configured_state": True}  # or it forgets what it was told
            if transformers.__version__ < "5":  # which leaves FSDP2 to `accelerate launch`, and asks for GPUs otherwise
                os.environ |= {"FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": OF_STATE[state]}
                config["sync_module_states"] = "false"
            own |= {"fsdp": "full_shard auto_wrap", "fsdp_config": config}
        given = {"resume": get_last_checkpoint(str(folder))} if resumes else {}
        if kind == "gpt2":
            made = auto_accumulate(transformers.Trainer, micro_batch=4) if size > 1 else transformers.Trainer
            done = trainers.trained(made, folder, kind, samples=24, callbacks=[Killing()], **own, **given)
        else:
            import trl  # noqa: PLC0415

            from support.models import trl_trainers  # noqa: PLC0415

            made = auto_accumulate(trl.SFTTrainer, micro_batch=4) if size > 1 else trl.SFTTrainer
            done = trl_trainers.trained(made, "sft", folder, samples=24, **own)
        assert size == 1 or fsdp_modules([done.model])
        parameters = [whole(one).clone() for one in done.model.parameters()]
        return {"parameters": parameters, "log": trainers.history(done)}


def loaded_in_shards(rank, size, folder, *, kind="llama", most=None, **sizes):
    """Train a model that Transformers itself has sharded while it loaded it; on one process, as it is.

    Returns parameters and the log. `most` is of each rank: more samples at once lack memory in evaluation.
    """
    warnings.simplefilter("ignore")
    os.environ |= {"HF_HUB_OFFLINE": "1", "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
    import transformers  # noqa: PLC0415 - slow
    from transformers.distributed import DistributedConfig  # noqa: PLC0415

    from autoaccum.integrations.transformers import auto_accumulate  # noqa: PLC0415
    from support.models import trainers  # noqa: PLC0415

    own = {"per_device_train_batch_size": 12 // size, "per_device_eval_batch_size": 12 // size, "max_grad_norm": 0.5}
    own |= {"eval_strategy": "epoch", "num_train_epochs": 2, "lr_scheduler_type": "constant"}

    def made(base, model):
        rows = trainers.rows_of("llama", 24)
        args = transformers.TrainingArguments(str(folder), **(trainers.SETTINGS | own))
        given = {"train_dataset": rows, "eval_dataset": rows[:13], "data_collator": trainers.collated}
        return base(model=model, args=args, **given)

    if size == 1:
        trainer = made(transformers.Trainer, trainers.model_of("llama"))
        trainer.train()
        return {"parameters": [one.detach() for one in trainer.model.parameters()], "log": trainers.history(trainer)}
    if kind == "reward":
        import trl  # noqa: PLC0415

        from support.models import trl_trainers  # noqa: PLC0415

        whole_model, loads = trl_trainers.model(kind), transformers.AutoModelForSequenceClassification
    else:
        whole_model, loads = trainers.model_of(kind), transformers.AutoModelForCausalLM
    if rank == 0:
        whole_model.save_pretrained(folder / "model")
    distributed.barrier()
    with told_of_ranks(rank, size):
        asked = DistributedConfig(**(sizes or {"fsdp_size": size}))
        model = loads.from_pretrained(folder / "model", distributed_config=asked, dtype=torch.float64)
        assert fsdp_modules([model]) or sizes
        if kind == "reward":
            trl_trainers.trained(auto_accumulate(trl.RewardTrainer), kind, folder, network=model)
        trainer = made(auto_accumulate(transformers.Trainer, micro_batch=4), model)
        if most is not None:

            def hook(module, args, kwargs):
                if not module.training and len(kwargs["input_ids"]) > most[rank]:
                    raise torch.OutOfMemoryError("told to")

            model.register_forward_pre_hook(hook, with_kwargs=True)
        trainer.train()
        parameters = [whole(one).clone() for one in model.parameters()]
        return {"parameters": parameters, "log": trainers.history(trainer)}
