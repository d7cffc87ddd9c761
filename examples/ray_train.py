"""Ray Train: two workers on the CPU of this machine, restarted from the last checkpoint whenever one dies.

    pip install 'ray[train]'
    python examples/ray_train.py runs/ray

For GPUs, pass `use_gpu=True` to `ScalingConfig`; for more machines, a larger `num_workers=`, `ray.init()` without
`num_cpus=`, and a folder that all of them see.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoaccum


class Report(autoaccum.Callback):
    """Reports to Ray after each epoch, on every worker, as `ray.train.report` requires."""

    _last: autoaccum.records.StepReport | None = None

    def on_step(self, report: autoaccum.records.StepReport, **_: int) -> None:
        """Keep the newest report."""
        self._last = report

    def on_epoch_end(self, epoch: int) -> None:
        """Send it; there is none where training resumes after an epoch's last step."""
        last = self._last
        ray.train.report({"epoch": epoch} | ({} if last is None else {"step": last.step, "loss": last.loss}))


def train(config: dict[str, Any], **options: Any) -> autoaccum.records.FitResult:
    """Train on one worker; Ray calls this on each, again after a failure."""
    torch.manual_seed(0)
    inputs = torch.randn(2000, 16)
    loader = DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=50, shuffle=True)
    width = config["width"]
    model = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))
    arguments: dict[str, Any] = {
        "device": ray.train.torch.get_device(),
        "shard_data": True,  # each worker takes its part of every window
        "epochs": config["epochs"],
        "checkpoint": config["folder"],
        "checkpoint_every": "5min",
        "callbacks": [Report()],
    }
    return autoaccum.fit(model, loader, config["target_batch"], **(arguments | options))


def main() -> None:
    """Train on two workers, which may die three times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers share this machine's cores
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        ray.train.torch.TorchTrainer(
            train,
            train_loop_config={"epochs": 3, "target_batch": 200, "width": 64, "folder": str(folder / "checkpoints")},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(
                storage_path=str(folder),
                name="ray",
                failure_config=ray.train.FailureConfig(max_failures=3),
            ),
        ).fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
