"""What tests start by torchrun: a training with checkpoints, which may end itself at a step of its first attempt.

    torchrun_job.py FOLDER ACTION [spread | loop]

trains by `fit`, a model that is spread over ranks where that is asked for, or that one in a loop with an accumulator.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autoaccum
from support.ranks import loops, sharded, training


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
    def __init__(self, rank, folder, action, greedy):
        self.rank, self.folder, self.action, self.greedy = rank, folder, action, greedy

    def on_step(self, report, *, epoch):
        if report.step != 3:
            return
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.action == "kill" and self.rank == 1 and is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "lack" and self.rank == 1:
            self.greedy.most = 3
        if self.action == "wait" and is_first:  # to be sent a signal from outside
            with told_of(signal.SIGTERM) as has_come:
                (self.folder / f"ready-{self.rank}").touch()
                while not has_come:
                    time.sleep(0.01)


def train(rank, size, folder, action="nothing", *, is_spread=False):
    loader = torch.utils.data.DataLoader(
        training.vectors(), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(7)
    )
    greedy = sharded.Greedy(most=1000)
    model = training.net() if is_spread else training.net(seed=rank, dropout=0.3)
    if is_spread:
        model.insert(2, greedy)
    options = {"target_batch": 16, "micro_batch": 6 if is_spread else 3, "epochs": 2, "shard_data": True}
    options |= {"checkpoint": folder / "checkpoints", "checkpoint_every": 2, "optimizer": training.adam}
    options |= {"callbacks": [Ending(rank, folder, action, greedy)], "make_loader": lambda *_: loader}
    found = training.train(rank, size, model=model, is_spread=is_spread, **options)
    return {"numbers": numbers_of(found["parameters"]), "from": found["resumed from"], "cuts": found["cuts"]}


def numbers_of(parameters):
    return [value for one in parameters for value in sharded.whole(one).flatten().tolist()]


def loop(rank, size, folder, action="nothing"):
    """Train a model that is spread over ranks with an accumulator; PyTorch itself saves each step."""
    training.seeded(rank)
    greedy, (loss, samples) = sharded.Greedy(most=1000), loops.LOSSES["module"]
    model = training.net()
    model.insert(2, greedy)
    model = sharded.spread(model)
    optimizer = training.adam(model.parameters())
    accumulator = autoaccum.Accumulator(model, loss=loss, device="cpu", precision="fp32", micro_batch=6)
    saved = folder / "checkpoints"
    last = max((int(path.parent.name) for path in saved.glob("*/.metadata")), default=0)

    def state():
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    if last:
        found = state()
        distributed.checkpoint.load(found, checkpoint_id=saved / f"{last}")
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    cuts = []
    for step in range(last, 4):
        if step == 2 and rank == 1 and action == "lack":
            greedy.most = 3
        if step == 2 and rank == 1 and action == "kill" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        cuts.append(accumulator.backward(loops.part(samples, rank, size, step)).micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        distributed.checkpoint.save(state(), checkpoint_id=saved / f"{step + 1}")
    return {"numbers": numbers_of(model.parameters()), "from": last, "cuts": cuts}


def main(folder, action, kind=""):
    torch.set_num_threads(1)
    if kind:
        autoaccum.join_ranks("cpu")
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    try:
        if kind == "loop":
            found = loop(rank, size, folder, action)
        else:
            found = train(rank, size, folder, action, is_spread=kind == "spread")
    except autoaccum.StartAgainError as error:
        unfinished = folder / f"exit-code-{rank}"  # a rank may be ended while it writes
        unfinished.write_text(str(error.exit_code))
        unfinished.rename(folder / "exit-code")
        sys.exit(error.exit_code)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
