"""What tests start by torchrun: a training with checkpoints, which may end itself at a step of its first attempt."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import autoaccum
import rank_training


@contextlib.contextmanager
def told_of(number):
    """A list that is no longer empty when a signal has come, and had the effect that it has."""
    come, handler = [], signal.getsignal(number)

    def handle(*arguments):
        come.append(number)
        handler(*arguments)

    signal.signal(number, handle)
    try:
        yield come
    finally:
        signal.signal(number, handler)


class Ending(autoaccum.Callback):
    def __init__(self, rank, folder, action):
        self.rank, self.folder, self.action = rank, folder, action

    def on_step(self, report, *, epoch):
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) or report.step != 3:
            return
        if self.action == "kill" and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "wait":  # to be sent a signal from outside
            with told_of(signal.SIGTERM) as has_come:
                (self.folder / f"ready-{self.rank}").touch()
                while not has_come:
                    time.sleep(0.01)


def train(rank, size, folder, action="nothing"):
    loader = torch.utils.data.DataLoader(
        rank_training.vectors(), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(7)
    )
    rank_training.seeded(rank)
    model = rank_training.net(seed=rank, dropout=0.3)
    result = autoaccum.fit(
        model,
        loader,
        16,
        optimizer=rank_training.adam,
        micro_batch=3,
        epochs=2,
        shard=True,
        device="cpu",
        checkpoint=folder / "checkpoints",
        checkpoint_every=2,
        callbacks=[Ending(rank, folder, action)],
    )
    numbers = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    return {"numbers": numbers, "from": result.resumed_from}


def main(folder, action):
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    found = train(rank, int(os.environ["WORLD_SIZE"]), folder, action)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
