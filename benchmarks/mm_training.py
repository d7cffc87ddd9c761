"""Traces how mmcv's and mmengine's runners trained on a card in the PyTorch of the time.

They trained:

- with DistributedDataParallel, whose buckets are as large as the gradients, and gradients that are set to zero, not
  freed;
- with optimizers that update parameters one by one;
- in a PyTorch before 1.11: there the gradient of softmax held on to softmax's input, for its type alone
  (`_softmax_backward_data` in its derivatives.yaml), and cuBLAS's workspace did not come from PyTorch's allocator;
- with ReLU6 and HSwish of that time (`of_their_time.py`).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from fake_card import on_fake_card, served, update
from of_their_time import with_former_activations
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum._estimate.cuda_dispatch import autocast
from autoaccum._estimate.fake_backward import loosened

ITERATIONS = 2
_aten = torch.ops.aten
_FORWARD = (_aten._softmax.default, _aten._log_softmax.default)
_BACKWARD = (_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default)


def predicted_bytes(model, batch, batch_of, loss_of, optimizer, *, is_cast=False, tensor_float=False, clipped_to=None):
    """Trace two iterations of a training, and return what its tensors take at most.

    Args:
        model: The model.
        batch: The samples of one iteration.
        batch_of: Makes what of a batch lives on the card until the update.
        loss_of: Returns the loss of such a batch, from the model and the batch.
        optimizer: The optimizer's settings, with its "type".
        is_cast: Whether the loss is computed under autocast.
        tensor_float: Whether the card computes float32 with Tensor Cores.
        clipped_to: The norm to which gradients are clipped; None if they are not.
    """
    chosen = dict(optimizer)
    one_by_one = {"fused": True} if chosen["type"].startswith("Adam") else {"foreach": False}
    with (
        on_fake_card(with_former_activations(model), batch, tensor_float=tensor_float) as (fake, timeline),
        InputsOfSoftmax(),
    ):
        parameters = [parameter for parameter in fake.parameters() if parameter.requires_grad]
        made = getattr(torch.optim, chosen.pop("type"))(parameters, **one_by_one, **chosen)
        buckets = [torch.empty_like(parameter) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        for _ in range(ITERATIONS):
            made.zero_grad(set_to_none=False)
            given = batch_of()
            loss = None
            with autocast(torch.float16) if is_cast else nullcontext():
                loss = loosened(loss_of(fake, *given))
            loss.backward()
            del given
            if clipped_to is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clipped_to, foreach=False)
            update(made)
        del buckets
    return served(timeline).peak_allocated_bytes


class InputsOfSoftmax(TorchDispatchMode):
    """Keeps a softmax's input until its gradient is computed, as PyTorch did before 1.11."""

    def __init__(self):
        super().__init__()
        self.held = {}

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in _FORWARD:
            self.held[made.untyped_storage()._cdata] = args[0]
        elif func in _BACKWARD:
            self.held.pop(args[1].untyped_storage()._cdata, None)
        return made
