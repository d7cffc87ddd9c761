"""What tests start by torchrun: a training of a model that is spread over ranks, and may fail at first."""

import json
import os
import signal
import sys
from pathlib import Path

import torch

import autoaccum
import rank_training
import sharded_training


class Ending(autoaccum.Callback):
    def __init__(self, rank, action, greedy):
        self.rank, self.action, self.greedy = rank, action, greedy

    def on_step(self, report, *, epoch):
        if self.rank != 1 or report.step != 3:
            return
        if self.action == "kill" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "lack":
            self.greedy.most = 3


def train(rank, size, folder, action="nothing"):
    loader = torch.utils.data.DataLoader(
        rank_training.vectors(), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(7)
    )
    rank_training.seeded(rank)
    net = rank_training.net()
    greedy = sharded_training.Greedy(most=1000)
    net.insert(2, greedy)
    model = sharded_training.sharded(net)
    result = autoaccum.fit(
        model,
        loader,
        16,
        optimizer=rank_training.adam,
        micro_batch=6,
        epochs=2,
        shard=True,
        device="cpu",
        checkpoint=folder / "checkpoints",
        checkpoint_every=2,
        callbacks=[Ending(rank, action, greedy)],
    )
    numbers = [value for parameter in model.parameters() for value in parameter.full_tensor().flatten().tolist()]
    return {"numbers": numbers, "from": result.resumed_from, "cuts": [one.micro_batches for one in result.history]}


def main(folder, action):
    torch.set_num_threads(1)
    autoaccum.join_ranks("cpu")
    rank = int(os.environ["RANK"])
    try:
        found = train(rank, int(os.environ["WORLD_SIZE"]), folder, action)
    except autoaccum.StartAgainError as error:
        unfinished = folder / f"exit-code-{rank}"  # a rank may be ended while it writes
        unfinished.write_text(str(error.exit_code))
        unfinished.rename(folder / "exit-code")
        sys.exit(error.exit_code)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
