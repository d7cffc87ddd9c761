"""What tests start by torchrun: a training with checkpoints, which may end itself at a step of its first attempt."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

torch.set_num_threads(1)

import autoaccum  # noqa: E402
import rank_training  # noqa: E402

folder, action = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Ending(autoaccum.Callback):
    def on_step(self, report, *, epoch):
        if attempt or report.step != 3:
            return
        if action == "kill" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "wait":  # to be sent a signal from outside
            (folder / f"ready-{rank}").touch()
            time.sleep(1.0)


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
    cache=False,
    checkpoint=folder / "checkpoints",
    checkpoint_steps=2,
    callbacks=[Ending()],
)
numbers = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
(folder / f"rank-{rank}.json").write_text(json.dumps({"numbers": numbers, "from": result.resumed_from}))
