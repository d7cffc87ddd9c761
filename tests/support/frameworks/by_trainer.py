"""A job by Transformers' Trainer: also with its own models, or TRL's, which the job names as its task."""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # of ranks
import transformers  # noqa: E402
from accelerate.state import DistributedType
from torch.utils.data import default_collate
from transformers.trainer_utils import get_last_checkpoint

from autoaccum import Accumulator
from autoaccum._engine.dtensor import fsdp_modules  # whether a framework has sharded a model at all
from autoaccum.integrations._trainer_evaluation import EvaluationInParts
from autoaccum.integrations.transformers import auto_accumulate
from support.frameworks.by_accelerate import OF_STATE, in_fp16, states_of_its_own
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
    own |= {"save_strategy": "no" if job.folder is None else "steps", "optim": "sgd" if job.is_by_sgd else "adamw_torch"}
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
    if job.task not in (*trainers.MODELS, "sft"):
        rows = [dict(zip(("inputs", "labels"), row, strict=True)) for row in job.data()]
        own |= {"model": job.network(), "train_dataset": rows, "eval_dataset": rows, "data_collator": default_collate}
        own |= {"remove_unused_columns": False, "label_names": ["labels"]}
    return own


def train(job, refused=None, logs=False, **further):
    with states_of_its_own(job), tempfile.TemporaryDirectory() as nowhere:
        folder, own = str(job.folder or nowhere), settings_of(job) | {"samples": job.samples} | further
        if job.task == "sft":
            import trl  # noqa: PLC0415 - slow

            from support.models import trl_trainers  # noqa: PLC0415

            done = trl_trainers.trained(trainer_of(job, trl.SFTTrainer), "sft", folder, **own)
        else:
            kind = trainer_of(job, transformers.Trainer, refused=refused, logs=logs)
            last = get_last_checkpoint(folder) if job.resumes else None
            done = trainers.trained(kind, folder, job.task, resume=last, **own)
        assert not job.shards or fsdp_modules([done.model])
        scaler = done.accelerator.scaler.state_dict() if job.half == "fp16" else None
        log = trainers.history(done)
        return job.record(done.model, log=log, cuts=done.cuts, steps=done.state.global_step, scaler=scaler)
