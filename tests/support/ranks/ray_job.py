"""Trainings by Ray Train, one after the other on one Ray of two workers: `python ray_job.py FOLDER RAY_FOLDER`.

Each writes what every worker ends with to FOLDER/NAME/end-RANK.pt, and its steps to FOLDER/NAME/steps-RANK.jsonl.
"""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import autoaccum

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "ray_train.py"
WORKERS = 2
# (rank, step) to be killed at, in the middle of that step's window; each but once.
KILLS = ((1, 7), (0, 13))


def example():
    spec = importlib.util.spec_from_file_location("ray_train", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Log(autoaccum.Callback):
    """Writes down each step, each start, and what memory ran out of."""

    def __init__(self, path):
        self.path = path

    def write(self, **entry):
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def on_resume(self, path, *, step, epoch):
        self.write(resumed_from=step)

    def on_oom(self, event, *, step):
        self.write(oom_at=step)

    def on_step(self, report, *, epoch):
        self.write(
            step=report.step, epoch=epoch, loss=report.loss, micro_batches=report.micro_batches, samples=report.samples
        )


class Kill(autoaccum.Callback):
    """Kills this worker in the second forward pass of a step's window, once in all attempts."""

    def __init__(self, folder, rank):
        self.folder, self.rank = folder, rank

    def on_step(self, report, *, epoch):
        import torch  # noqa: PLC0415

        for rank, step in KILLS:
            marker = self.folder / f"killed-{rank}-{step}"
            if rank == self.rank and report.step == step - 1 and not marker.exists():
                passes = []

                def kill(module, inputs, marker=marker, passes=passes):
                    passes.append(isinstance(module, torch.nn.Sequential))
                    if sum(passes) == 2:  # the first micro-batch is done
                        marker.touch()
                        os.kill(os.getpid(), signal.SIGKILL)

                torch.nn.modules.module.register_module_forward_pre_hook(kill)


def train(config):
    import ray.train  # noqa: PLC0415
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    folder, rank = Path(config["home"]), ray.train.get_context().get_world_rank()
    given = {}

    class KeepOptimizer(torch.optim.AdamW):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.01)
            given["optimizer"] = self

    options = dict(config["options"])
    if rank == config["short_of_memory"]:
        options["memory_limit"] = config["limit"]
    callbacks = [Log(folder / f"steps-{rank}.jsonl"), *([Kill(folder, rank)] if config["kills"] else [])]
    result = example().train(config, optimizer=KeepOptimizer, callbacks=callbacks, **options)
    ends = {
        "parameters": [one.detach() for group in given["optimizer"].param_groups for one in group["params"]],
        "optimizer": given["optimizer"].state_dict(),
        "random": torch.get_rng_state(),
        "steps": result.steps,
        "resumed_from": result.resumed_from,
    }
    torch.save(ends, folder / f"end-{rank}.pt")


def run(home, *, kills=False, short_of_memory=None, limit=None, width=64, **options):
    import ray.train.torch  # noqa: PLC0415

    home.mkdir()
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config={
            "home": str(home),
            "folder": str(home / "checkpoints"),
            "epochs": 2,
            "target_batch": 200,
            "kills": kills,
            "short_of_memory": short_of_memory,
            "limit": limit,
            "width": width,
            "options": options,
        },
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS),
        run_config=ray.train.RunConfig(
            storage_path=str(home / "ray"),
            name="ray",
            failure_config=ray.train.FailureConfig(max_failures=len(KILLS) if kills else 0),
        ),
    ).fit()


def main():
    import ray  # noqa: PLC0415

    folder = Path(sys.argv[1])
    ray.init(num_cpus=WORKERS, include_dashboard=False, _temp_dir=sys.argv[2])
    try:
        run(folder / "undisturbed", micro_batch=40, checkpoint_every=2)
        run(folder / "killed", kills=True, micro_batch=40, checkpoint_every=2)
        run(folder / "short", short_of_memory=1, limit="20MiB", width=16384, micro_batch=100)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
