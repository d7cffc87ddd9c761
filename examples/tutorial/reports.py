"""What fits, asked before a training."""

import torch
from task import BATCH, loader, model

import autoaccum

report = autoaccum.preflight(
    model(),
    next(iter(loader())),
    BATCH,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    memory_limit="96MiB",
    device="cpu",
)
print(report)
report.save_html("report.html")
