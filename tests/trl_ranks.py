"""One rank of a torchrun job: trains with TRL's trainers in micro-batches, where rank 1 lacks memory in each update.

Writes, to the folder given, the parameters and the log of each training.
"""

import contextlib
import sys
import warnings
from pathlib import Path

import torch

from autoaccum._system.notices import Notices
from autoaccum._training.accumulator import Accumulator
from autoaccum.integrations._trainer_evaluation import EvaluationInParts
from autoaccum.integrations.transformers import windowed
from faults import FailAt
from trainers import history, weights
from trl_trainers import TRAINERS, mixture, trained

SETTINGS = {"samples": 24, "evaluated": 12, "per_device_train_batch_size": 6, "per_device_eval_batch_size": 6}
PATCHED = [(Accumulator, "backward", 100), (EvaluationInParts, "run", 30)]


@contextlib.contextmanager
def failing(owner, method, point):
    """Let an operator of each call of a method fail; yields the modes."""
    plain, modes = getattr(owner, method), []

    def with_faults(*args, **kwargs):
        modes.append(FailAt(point))
        with modes[-1]:
            return plain(*args, **kwargs)

    setattr(owner, method, with_faults)
    try:
        yield modes
    finally:
        setattr(owner, method, plain)


def main(folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for kind, (trainer, _) in TRAINERS.items():
        found[kind, "plain"] = history(trained(trainer, kind, folder, **SETTINGS))
        ours = windowed(trainer, micro_batch=2, notices=Notices(silent=True))
        made = trained(ours, kind, folder, train=False, **SETTINGS)
        with contextlib.ExitStack() as stack:
            patched = PATCHED if torch.distributed.get_rank() == 1 else []
            modes = [stack.enter_context(failing(*one)) for one in patched]
            made.train()
        hits = [sum(mode.hits for mode in each) for each in modes]
        found[kind, "ours"] = weights(made), history(made), hits
    ours = windowed(TRAINERS["sft"][0], micro_batch=2, notices=Notices(silent=True))
    made = trained(ours, "sft", folder, network=mixture(), **SETTINGS)
    found["experts"] = weights(made), [entry["loss"] for entry in history(made) if "loss" in entry]
    torch.save(found, Path(folder) / f"rank-{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
