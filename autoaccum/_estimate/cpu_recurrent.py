"""Memory of oneDNN's LSTM on the CPU: what it keeps for the backward pass, and the workspaces of both directions.

PyTorch's fake tensors give the kept workspace no bytes, though it is most of an LSTM's memory: oneDNN keeps gates,
hidden and cell states of every step, and room for their gradients. The formulas are those of `set_offsets` and
`get_good_ld` in oneDNN's src/cpu/rnn/rnn_utils, and were compared with the bytes that the real operators allocate
(`tests/estimate/test_cpu_recurrent.py`), which an AVX-512 processor did. Vanilla recurrent layers and GRU do not go to
oneDNN; they are traced operator by operator.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._mode_utils import no_dispatch

from autoaccum._estimate.fake import NoFakesError
from autoaccum._estimate.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_PAGE = 4096
_LINE = 64  # bytes of a cache line, to which rows are rounded up
_FLOAT = 4
_GATES = 4
# The kinds of spaces that `kept_bytes` adds up.
_SPACES = 7
# Rows of a multiple of so many elements would fall on the same cache lines, and get one line more.
_ALIASING = 256
# Blocks of weights in bf16: output channels, and input channels.
_HALF_BLOCK, _HALF_PAIR = 128, 2
# In bf16 a row of gradients has, as measured, three numbers of two bytes for each state.
_HALF_GRADIENTS = 3
# Positions of arguments of mkldnn_rnn_layer and mkldnn_rnn_layer_backward.
_TRAIN = 15
_GRAD_OUTPUT = 10


def _row(elements: int, item: int) -> int:
    """Return the bytes of a row of oneDNN's matrices."""
    line = _LINE // item
    wide = math.ceil(elements / line) * line
    return (wide + line if wide % _ALIASING == 0 else wide) * item


def _paged(size_bytes: int) -> int:
    return math.ceil(size_bytes / _PAGE) * _PAGE


def _sizes(source: Tensor, weight: Tensor) -> tuple[int, int, int, int]:
    """Return the steps, samples, inputs and hidden states of a layer; sources come time first."""
    return source.shape[0], source.shape[1], source.shape[2], weight.shape[0] // _GATES


def kept_bytes(source: Tensor, weight: Tensor) -> int:
    """Return the bytes that a layer keeps for its backward pass, beside its results.

    Args:
        source: Its input, (steps, samples, inputs).
        weight: The weight of its inputs, (4 x hidden, inputs).
    """
    steps, samples, inputs, hidden = _sizes(source, weight)
    item, wide = source.element_size(), max(inputs, hidden)
    states = 2 * (steps + 1) * samples  # of this layer and the one below, with the initial ones
    spaces = (
        steps * samples * _row(_GATES * hidden, item),
        steps * samples * _row(hidden, item),
        # Hidden states for the layer above and for the next step, then the gradients of a layer.
        states * _row(wide, item),
        states * _row(wide, item),
        states * (_row(wide, item) if item == _FLOAT else _row(_HALF_GRADIENTS * wide, item)),
        # Cell states, and their gradients in float32.
        states * hidden * item,
        states * hidden * _FLOAT,
    )
    return sum(map(_paged, spaces))


@functools.cache
def _spaces_here() -> int:
    """Return how many spaces the installed oneDNN keeps: each is a page in a layer of one state.

    oneDNN 3.7, which is PyTorch 2.8's, keeps nine, and its workspaces are larger too.
    """
    with no_dispatch(), torch._C.DisableTorchFunction():
        one, gates = torch.zeros(1, 1, 1), torch.zeros(_GATES, 1)
        bias, state = gates.flatten(), one[0]
        results = torch.ops.aten.mkldnn_rnn_layer(
            one, gates, gates, bias, bias, state, state, False, [], 2, 1, 1, True, False, False, True
        )
    kept: Tensor = results[3]
    return math.ceil(kept.nbytes / _PAGE)


def layer(args: Sequence[Any]) -> tuple[Tensor, ...] | None:
    """Return a layer's fake results with the workspace that it keeps; None if nothing is kept.

    Raises:
        NoFakesError: The installed oneDNN keeps other spaces than those known here.
    """
    source, weight, hidden, cell = args[0], args[1], args[5], args[6]
    if not args[_TRAIN] or source.dim() != 3:  # noqa: PLR2004 - (steps, samples, inputs)
        return None
    if _spaces_here() != _SPACES:
        raise NoFakesError("this PyTorch's oneDNN keeps more for an LSTM than the formulas for oneDNN 3.13 say")
    states = weight.shape[0] // _GATES
    return (
        source.new_empty(*source.shape[:2], states),
        torch.empty_like(hidden),
        torch.empty_like(cell),
        source.new_empty(kept_bytes(source, weight), dtype=torch.uint8),
    )


def _weights(columns: Sequence[int], rows: int, item: int) -> tuple[int, ...]:
    """Return the bytes of weights of so many inputs each, laid out for products with the inputs."""
    if item == _FLOAT:
        return tuple(inputs * _row(rows, item) for inputs in columns)
    wide = math.ceil(rows / _HALF_BLOCK) * _HALF_BLOCK
    return tuple(math.ceil(inputs / _HALF_PAIR) * _HALF_PAIR * wide * item for inputs in columns)


def _scratch(source: Tensor, weight: Tensor) -> int:
    """Return the bytes of the gates before their bias; in float32 of all steps at once."""
    steps, samples, _, hidden = _sizes(source, weight)
    at_once = steps if source.element_size() == _FLOAT else 1
    return at_once * samples * _row(_GATES * hidden, _FLOAT) + 2 * samples * _row(hidden, _FLOAT)


def forward(args: Sequence[Any], _result: Any) -> Workspace | None:
    """A layer copies its weights, and computes the gates of all steps in float32 at once."""
    source, weight = args[0], args[1]
    _, _, inputs, hidden = _sizes(source, weight)
    laid_out = _weights((inputs, hidden), weight.shape[0], source.element_size())
    return Workspace(beside=(*laid_out, _scratch(source, weight)))


def backward(args: Sequence[Any], _result: Any) -> Workspace | None:
    """Its backward pass copies weights and gradients; all gradients are made in float32."""
    source, weight, above = args[0], args[1], args[_GRAD_OUTPUT]
    steps, samples, inputs, hidden = _sizes(source, weight)
    item, rows = source.element_size(), weight.shape[0]
    copied = [0 if above is None or above.is_contiguous() else above.nbytes]
    turned: Sequence[int]
    if item == _FLOAT:
        turned = [rows * _row(one, item) for one in (inputs, hidden) if _row(one, item) != one * item]
    else:
        turned = _weights((rows, rows), inputs, item)[:1] + _weights((rows, rows), hidden, item)[:1]
        copied.append(steps * samples * hidden * _FLOAT)
    gradients = [one * _row(rows, _FLOAT) for one in (inputs, hidden)]
    return Workspace(beside=(*copied, *turned, *gradients, _scratch(source, weight)))
