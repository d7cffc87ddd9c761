"""What tests start by torchrun: a training of a model that is spread over ranks, and may fail at first."""

import json
import os
import signal
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

import autoaccum  # noqa: E402
import rank_training  # noqa: E402
import sharded_training  # noqa: E402

folder, action = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Ending(autoaccum.Callback):
    def on_step(self, report, *, epoch):
        if action == "kill" and rank == 1 and attempt == 0 and report.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "lack" and rank == 1 and report.step == 3:
            greedy.most = 3


autoaccum.join_ranks("cpu")
loader = torch.utils.data.DataLoader(
    rank_training.vectors(), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(7)
)
rank_training.seeded(rank)
net = rank_training.net()
greedy = sharded_training.Greedy(most=1000)
net.insert(2, greedy)
model = sharded_training.sharded(net)
try:
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
        checkpoint_steps=2,
        callbacks=[Ending()],
    )
except autoaccum.StartAgainError as error:
    (folder / "exit-code").write_text(str(error.exit_code))
    sys.exit(error.exit_code)
numbers = [value for parameter in model.parameters() for value in parameter.full_tensor().flatten().tolist()]
found = {"numbers": numbers, "from": result.resumed_from, "cuts": [one.micro_batches for one in result.history]}
(folder / f"rank-{rank}.json").write_text(json.dumps(found))
