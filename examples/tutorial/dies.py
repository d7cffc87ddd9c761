"""Trains as most scripts do, on a machine with too little memory."""

import resource

import torch
from task import loader, model


def leave(mebibytes):
    """Let this process take so much more memory, as a small card would."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    limit = (int(status["VmData"].split()[0]) + mebibytes * 1024) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


model, loader = model(), loader()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
leave(96)

for epoch in range(3):
    for pictures, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(pictures), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
