"""The same training, with checkpoints, evaluations and a log."""

import os
import signal
import sys

import torch
from task import BATCH, accuracy, loader, model

import autoaccum


class PowerCut(autoaccum.Callback):
    """Kills this process after step 8, as a power cut or a cluster would."""

    def on_step(self, report, *, epoch):
        if report.step == 8:
            os.kill(os.getpid(), signal.SIGKILL)


callbacks = [autoaccum.JSONLinesLog("run.jsonl")]
if "--power-cut" in sys.argv:
    callbacks.append(PowerCut())

result = autoaccum.fit(
    model(),
    loader(),
    target_batch=BATCH,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    epochs=3,
    memory_limit="96MiB",
    val_loader=loader(samples=512, seed=2),
    metrics={"accuracy": accuracy},
    checkpoint="runs/tutorial",
    checkpoint_every=3,
    callbacks=callbacks,
)
for evaluation in result.evaluations[-1:]:  # none if the run had ended before
    print(f"{result.steps} steps, accuracy {evaluation.metrics['accuracy']:.3f}")
