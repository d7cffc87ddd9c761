"""cuDNN's recurrent layers (LSTM, GRU, RNN) on fake tensors: what a call allocates and keeps, forward and backward.

Without a driver PyTorch would not choose cuDNN, and its fake implementation keeps nothing for the backward pass. What
is allocated follows aten/src/ATen/native/cudnn/RNN.cpp: the output, the last states, a workspace, and the reserve space
that cuDNN keeps for the backward pass; there the gradients of the input and the states, and one buffer for those of all
weights.

cuDNN publishes no formulas. The reserve space counts what the backward pass needs of every time step: for each layer
and direction the gates and the cell, and what a layer hands to the next. For an LSTM of 4 layers of 1024 on an H200 it
is right but for 256 bytes of 1.44 GiB (benchmarks/results/gpu-h200.json); for a GRU it follows from the ratio to an
LSTM in https://github.com/pytorch/pytorch/issues/2895, which no GPU has confirmed. The workspace of that LSTM, 554 MiB,
is 8.66 times all hidden states of one layer; how it grows with layers and weights is not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

NOTE = (
    "recurrent layers: cuDNN's memory has no published formula; it was confirmed on a GPU for one LSTM, and for no GRU"
)
# Numbers kept by layer, direction and time step, in units of the hidden size. LSTM: four gates and the cell. GRU:
# three gates and three more (the ratio above is 23 to 27, of which 3 are between the 4 layers).
_KEPT = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
_WORKSPACE_OF_STATES = 8.66


class _Form(NamedTuple):
    """What a call needs beside its tensors."""

    kept: int
    layers: int
    directions: int
    batch_first: bool
    trains: bool


def is_recurrent(func: Any) -> bool:
    """Whether a function of PyTorch is a recurrent layer that cuDNN would run."""
    return getattr(func, "__name__", "") in _KEPT and torch.backends.cudnn.enabled


def recurrent(func: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return what `torch.lstm`, `torch.gru` or one of the others returns, for fake tensors of a GPU."""
    is_packed = isinstance(args[3], list | tuple)
    source, states, weights = args[0], args[2] if is_packed else args[1], args[3] if is_packed else args[2]
    _, layers, _, trains, bidirectional = args[4 if is_packed else 3 :][:5]
    batch_first = False if is_packed else bool(args[8])
    states = (states,) if isinstance(states, Tensor) else tuple(states)
    tensors = [source, *states, *weights]
    if torch.is_autocast_enabled("cuda"):
        tensors = [tensor.to(torch.get_autocast_dtype("cuda")) for tensor in tensors]
    form = _Form(_KEPT[func.__name__], layers, 2 if bidirectional else 1, batch_first, trains)
    return tuple(_Recurrent.apply(form, len(states), *tensors))


class _Recurrent(torch.autograd.Function):
    """Allocates as cuDNN does, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, form: _Form, number_of_states: int, source: Tensor, *rest: Tensor) -> Any:
        """Return the output and the last states."""
        states, weights = rest[:number_of_states], rest[number_of_states:]
        runs = source.transpose(0, 1).contiguous() if form.batch_first else source.contiguous()
        width = states[0].shape[-1] * form.directions
        output = runs.new_empty(*runs.shape[:-1], width)
        last = tuple(torch.empty_like(state, memory_format=torch.contiguous_format) for state in states)
        _workspace(runs, states[-1])
        # The cell may be wider than the output (proj_size).
        steps, hidden = runs.shape[:-1].numel(), states[-1].shape[-1]
        kept = steps * form.directions * (form.layers * form.kept * hidden + (form.layers - 1) * states[0].shape[-1])
        reserve = _bytes(source, kept * source.element_size() if form.trains else 0)
        ctx.form, ctx.number_of_states = form, number_of_states
        ctx.save_for_backward(source, *states, *weights, output, reserve)
        return (output.transpose(0, 1) if form.batch_first else output, *last)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of input, states and weights; those of the weights share one buffer."""
        form, (source, *rest) = ctx.form, ctx.saved_tensors
        states, weights = rest[: ctx.number_of_states], rest[ctx.number_of_states : -2]
        gradient = gradients[0].transpose(0, 1) if form.batch_first else gradients[0]
        runs = source.transpose(0, 1).contiguous() if form.batch_first else source.contiguous()
        gradient = gradient.contiguous()
        of_source = torch.empty_like(runs)
        of_states = [torch.empty_like(state) for state in states]
        _workspace(runs, states[-1])
        numbers = [weight.numel() for weight in weights]
        buffer = source.new_zeros(sum(numbers))
        _workspace(runs, states[-1])
        of_weights = [part.view_as(one) for part, one in zip(buffer.split(numbers), weights, strict=True)]
        if form.batch_first:
            of_source = of_source.transpose(0, 1)
        return (None, None, of_source, *of_states, *of_weights)


def _workspace(runs: Tensor, state: Tensor) -> None:
    """Allocate and free the workspace of one call."""
    each_bytes = int(_WORKSPACE_OF_STATES * state.shape[-1] * runs.element_size())
    _bytes(runs, runs.shape[:-1].numel() * each_bytes)


def _bytes(like: Tensor, size_bytes: int) -> Tensor:
    return like.new_empty(size_bytes, dtype=torch.uint8)
