"""Activations as PyTorch and mmcv computed them when others measured: they keep other tensors than today's.

- `hardtanh_`, which is ReLU6 in place, had a gradient by its result: `hardtanh_backward(grad, result, ...)` in
  PyTorch's tools/autograd/derivatives.yaml. Today there is none for the operator in place, and a copy of its input is
  kept.
- mmcv's HSwish, for PyTorch before 1.7, is `x * relu6(x + 3) / 6` (mmcv/cnn/bricks/hswish.py), which keeps x and what
  ReLU6 returns; PyTorch's own operator keeps x alone.
"""

from __future__ import annotations

import torch
from torch import nn


class _OfResult(torch.autograd.Function):
    """ReLU6 in place, whose gradient is computed from its result."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.mark_dirty(inputs)
        torch.ops.aten.hardtanh_(inputs, 0.0, 6.0)
        ctx.save_for_backward(inputs)
        return inputs

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(gradient, result, 0.0, 6.0)


class FormerReLU6(nn.Module):
    """ReLU6 in place, with the gradient of that time."""

    def forward(self, inputs):
        """Return the inputs, clamped to 0 to 6 in place."""
        return _OfResult.apply(inputs)


class FormerHSwish(nn.Module):
    """mmcv's HSwish for PyTorch before 1.7."""

    def forward(self, inputs):
        """Return x * relu6(x + 3) / 6."""
        return inputs * _OfResult.apply(inputs + 3.0) / 6.0


def with_former_activations(model):
    """Replace the activations of a model in place, and return it."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ReLU6) and child.inplace:
                setattr(module, name, FormerReLU6())
            elif isinstance(child, nn.Hardswish):
                setattr(module, name, FormerHSwish())
    return model
