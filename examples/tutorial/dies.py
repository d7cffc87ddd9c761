"""Trains as most scripts do, on a machine with too little memory."""

import torch
from task import limit_memory, loader, model

model, loader = model(), loader()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
limit_memory(96)

for epoch in range(3):
    for pictures, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(pictures), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
