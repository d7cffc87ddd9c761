"""A fault harness: memory that runs out at the n-th operator of a step, and what must be equal afterwards."""

import random

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FailAt(TorchDispatchMode):
    """Raises torch's out-of-memory error, or another, at given operators, counted from 1; counts them all."""

    def __init__(self, *points, error=None):
        super().__init__()
        self.points = set(points)
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. (injected)")
        self.count = 0
        self.hits = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        if self.count in self.points:
            self.hits += 1
            raise self.error
        return operator(*args, **(kwargs or {}))


def state_of(model, optimizer, scaler=None):
    """Everything that a step may leave behind, as comparable bytes."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, parameter in enumerate(model.parameters()):
        for name, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{number}.{name}"] = torch.as_tensor(value)
    state = {
        name: tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
        if tensor.numel()
    }
    state["gradients"] = tuple(parameter.grad is None for parameter in model.parameters())
    state["groups"] = repr([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
    state["modes"] = tuple(module.training for module in model.modules())
    state["random"] = (torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state()))  # noqa: NPY002
    state["scaler"] = None if scaler is None else repr((scaler.state_dict(), dict(scaler._per_optimizer_states)))
    return state


def differences(one, other):
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
