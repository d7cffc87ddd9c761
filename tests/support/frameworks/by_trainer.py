"""A job by Transformers' Trainer; tasks may also be its own models, or trainers of TRL."""

import os
import tempfile

import torch
import transformers
from accelerate.state import DistributedType
from torch import distributed
from torch.utils.data import default_collate
from transformers.trainer_utils import get_last_checkpoint

from autoaccum import Accumulator
from autoaccum._engine.dtensor import fsdp_modules  # whether a framework has sharded a model at all
from autoaccum.integrations._trainer_evaluation import EvaluationInParts
from autoaccum.integrations.transformers import auto_accumulate
from support.frameworks.by_accelerate import OF_STATE, in_fp16, states_of_its_own
from support.frameworks.jobs import TASKS
from support.models import trainers

PLACES = {"training": (Accumulator, "backward"), "evaluation": (EvaluationInParts, "run")}
LAYERS = {"gpt2": "GPT2Block", "sft": "LlamaDecoderLayer"}


class Watch(transformers.TrainerCallback):
    """Ends the job, and keeps how batches were cut."""

    def __init__(self, job, trainer):
        self.job, self.trainer = job, trainer
        self.trainer.cuts = []

    def on_step_begin(self, args, state, control, **_):
        self.job.begin_step(state.global_step + 1)

    def on_step_end(self, *_, **__):
        if self.job.ours is not None:
            self.trainer.cuts.append(self.trainer.autoaccum.last_backward.micro_batches)


def trainer_of(job, base, *, refused=None, logs=False):
    """A class made from another one, with the job's loss."""

    class OfJob(base):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            if job.half == "fp16":
                in_fp16(self.accelerator, job.scaler())
            if refused is not None:
                self.accelerator.state.distributed_type = DistributedType[refused]

        def train(self, *args, **kwargs):
            self.add_callback(Watch(job, self))
            return super().train(*args, **kwargs)

        def compute_loss(self, model, inputs, return_outputs=False, **further):
            if logs:
                self.log({"now": 1.0})
            if "inputs" not in inputs:
                return super().compute_loss(model, inputs, return_outputs, **further)
            outputs = model(inputs["inputs"])
            loss = job.loss_of(outputs, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    return OfJob if job.ours is None else auto_accumulate(OfJob, **job.options)


def settings_of(job):
    own = {"per_device_train_batch_size": job.own_batch, "per_device_eval_batch_size": job.own_batch}
    own |= {"num_train_epochs": job.epochs, "gradient_accumulation_steps": job.accumulates, "max_grad_norm": 0.5}
    own |= {"eval_strategy": "epoch" if job.evaluates else "no", "bf16": job.half == "bf16", "save_steps": 1}
    own |= {
        "save_strategy": "no" if job.folder is None else "steps",
        "optim": "sgd" if job.is_by_sgd else "adamw_torch",
    }
    if job.compiles == "framework":
        own |= {"torch_compile": True, "torch_compile_backend": "eager"}
    if job.shards:
        config = {"version": 2, "state_dict_type": OF_STATE[job.shards], "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        config["transformer_layer_cls_to_wrap"] = [LAYERS.get(job.task, "Linear")]
        own["accelerator_config"] = {"use_configured_state": True}  # or it forgets what it was told
        if transformers.__version__ < "5":  # which leaves FSDP2 to `accelerate launch`, and asks for GPUs otherwise
            os.environ |= {"FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": OF_STATE[job.shards]}
            config["sync_module_states"] = "false"
        own |= {"fsdp": "full_shard auto_wrap", "fsdp_config": config}
    if job.task in TASKS:
        rows = [dict(zip(("inputs", "labels"), row, strict=True)) for row in job.data()]
        own |= {"network": job.network(), "train_dataset": rows, "eval_dataset": rows}
        own |= {"data_collator": default_collate, "remove_unused_columns": False, "label_names": ["labels"]}
    return own


def loaded_in_shards(job, asked):
    """A model that Transformers itself has sharded while it loaded it; `most` fit at once in evaluation."""
    from transformers.distributed import DistributedConfig  # noqa: PLC0415 - of Transformers 5

    kind = transformers.AutoModelForCausalLM
    if job.task == "reward":
        kind = transformers.AutoModelForSequenceClassification
    if job.rank == 0:
        (of_trl().model("reward") if job.task == "reward" else trainers.model_of(job.task)).save_pretrained(job.folder)
    distributed.barrier()
    model = kind.from_pretrained(job.folder, distributed_config=DistributedConfig(**asked), dtype=torch.float64)

    def run_out(module, args, given):
        if job.most and not module.training and len(given["input_ids"]) > job.most.get(job.rank, 99):
            raise torch.OutOfMemoryError("told to")

    model.register_forward_pre_hook(run_out, with_kwargs=True)
    return model


def of_trl():
    from support.models import trl_trainers  # noqa: PLC0415 - slow

    return trl_trainers


def train(job, refused=None, logs=False, loads=None, **further):
    with states_of_its_own(job), tempfile.TemporaryDirectory() as nowhere:
        own = settings_of(job) | {"samples": job.samples} | further
        folder, last = str(job.folder or nowhere), get_last_checkpoint(str(job.folder)) if job.resumes else None
        if loads is not None:
            own |= {"network": loaded_in_shards(job, loads), "save_strategy": "no"}
        if job.task in ("sft", "reward"):
            trl_trainers = of_trl()
            done = trl_trainers.trained(trainer_of(job, trl_trainers.TRAINERS[job.task][0]), job.task, folder, **own)
        else:
            kind = trainer_of(job, transformers.Trainer, refused=refused, logs=logs)
            done = trainers.trained(kind, folder, job.task, resume=last, **own)
        assert fsdp_modules([done.model]) or not (job.shards or loads)
        scaler = done.accelerator.scaler.state_dict() if job.half == "fp16" else None
        log = trainers.history(done)
        return job.record(done.model, log=log, cuts=done.cuts, steps=done.state.global_step, scaler=scaler)
