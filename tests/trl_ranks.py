"""One rank of a torchrun job: trains with TRL's trainers in micro-batches, where rank 1 lacks memory in each update.

Writes, to the folder given, the parameters and the log of each training.
"""

import sys
import warnings
from pathlib import Path

import torch

from autoaccum._system.notices import Notices
from autoaccum._training.accumulator import Accumulator
from autoaccum.integrations.transformers import windowed
from faults import FailAt
from trainers import history, weights
from trl_trainers import TRAINERS, trained

SETTINGS = {"samples": 24, "eval_strategy": "no", "per_device_train_batch_size": 6}


def main(folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for kind, (trainer, _) in TRAINERS.items():
        ours = windowed(trainer, micro_batch=2, notices=Notices(silent=True))
        made = trained(ours, kind, folder, train=False, **SETTINGS)
        plain = Accumulator.backward
        modes = []

        def with_faults(*args, modes=modes, plain=plain, **kwargs):
            modes.append(FailAt(100))
            with modes[-1]:
                return plain(*args, **kwargs)

        if torch.distributed.get_rank() == 1:
            Accumulator.backward = with_faults
        made.train()
        Accumulator.backward = plain
        found[kind] = weights(made), history(made), sum(mode.hits for mode in modes)
    torch.save(found, Path(folder) / f"rank-{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
