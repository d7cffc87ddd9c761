"""One rank of a torchrun job: trains with `Trainer` as it is and in micro-batches, also where rank 1 lacks memory.

Writes, to the folder given, the parameters and the log of each training.
"""

import gc
import sys
import warnings
from pathlib import Path

import torch

from autoaccum import Accumulator
from autoaccum.integrations._trainer_evaluation import EvaluationInParts
from autoaccum.integrations.transformers import auto_accumulate
from support.faults.modes import FailAt
from support.models.trainers import Trainer, history, trained, weights

SMALLER = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}


def failing(owner, method, points):
    plain = getattr(owner, method)

    def with_faults(*args, **kwargs):
        with FailAt(*points):
            return plain(*args, **kwargs)

    setattr(owner, method, with_faults)
    return plain


def found_in(folder):
    ours = auto_accumulate(Trainer, micro_batch=2)
    whole = {"per_device_train_batch_size": 6, "per_device_eval_batch_size": 6}
    found = {}
    of_ours = {
        "cut": (ours, whole),
        "accumulated": (ours, whole | SMALLER),
        "own tokens": (ours, whole | {"average_tokens_across_devices": False}),
        "failing": (ours, whole),
    }
    runs_of = {"gpt2": {"plain": (Trainer, whole), **of_ours}, "bert": {"failing": (ours, whole)}}
    for name, runs in runs_of.items():
        for run, (trainer, options) in runs.items():
            fails = run == "failing" and torch.distributed.get_rank() == 1
            patched = [(Accumulator, "backward", (700,)), (EvaluationInParts, "run", (20, 60))] if fails else []
            kept = [(owner, method, failing(owner, method, points)) for owner, method, points in patched]
            done = trained(trainer, folder, name, samples=24, eval_strategy="epoch", save_strategy="no", **options)
            for owner, method, plain in kept:
                setattr(owner, method, plain)
            found[name, run] = weights(done), history(done)
    return found


def main(folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = found_in(folder)
    torch.save(found, Path(folder) / f"rank-{torch.distributed.get_rank()}.pt")
    # A trainer's DistributedDataParallel is part of a cycle, and holds the group: a process that ends with it may abort
    # (https://github.com/pytorch/pytorch/issues/190489).
    gc.collect()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
