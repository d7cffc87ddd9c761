"""A batch of 256 under a limit of 96 MiB."""

import torch
from task import BATCH, loader, model

import autoaccum

result = autoaccum.fit(
    model(),
    loader(),
    target_batch=BATCH,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    epochs=3,
    memory_limit="96MiB",
)
print(f"{result.steps} steps of {BATCH} samples, in {result.plan.micro_batches}")
