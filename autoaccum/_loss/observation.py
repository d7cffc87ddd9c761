"""One pass of some samples through a loss: its summands with their weights, and each summand's gradient in short.

The gradient of each parameter is multiplied by fixed random numbers, which makes one number of it. Numbers of two
passes add up where the gradients do.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from autoaccum._loss.graph_reader import Summand, dims_of, leaves_of, nodes_of, read, shape_of, stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from autoaccum._data.nesting import Path
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.loss_values import LossValue
    from autoaccum._loss.modes import Clamp

FOUR_BYTES = 4
# The relative difference that rounding may cause, by the lowest precision of the passes.
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 2e-3}
_OF_GPU, _OF_HALF = 5e-3, 4e-2  # with TensorFloat-32, and in half precision
# A gradient is multiplied by one pattern, over and over: a prime length meets every row and column.
_PATTERN = 4099
# Unscaled, gradients in half precision would underflow.
_SCALE = 1024.0
# The nodes of functions that choose elements along a dimension.
_CHOOSING = ("Topk", "Sort", "Kthvalue", "Median", "Max", "Min", "Amax", "Amin")
# Those of functions that divide by a sum over all elements along a dimension.
_NORMALISING = ("Softmax", "LogSoftmax", "Logsumexp")


@dataclass(slots=True)
class Observation:
    """What a loss gave for some samples.

    Attributes:
        samples: Their number.
        value: The loss.
        summands: Its summands, with their weights on the host; None for one that cannot be read.
        gradients: A number for each parameter of each summand, shape (summands, parameters), on the host.
        chosen_from: By summand: from how many elements each function chooses that chooses along a dimension.
        counts: What the batch counts in the samples.
        numbers: Numbers that the batch carries.
        is_stated: Whether the loss is a pair or a vector, which states its weight.
        is_pair: Whether it is a pair.
        clamps: What has clamped the divisor of each summand, or the weight of a pair; None for nothing.
        normalised_over: By summand: over how many elements each softmax is taken.
    """

    samples: int
    value: float
    summands: list[Summand]
    gradients: Tensor
    chosen_from: Sequence[Sequence[int]]
    counts: Mapping[Count, float] = field(default_factory=dict)
    numbers: Mapping[Path, float] = field(default_factory=dict)
    is_stated: bool = False
    is_pair: bool = False
    clamps: Sequence[Clamp | None] = ()
    normalised_over: Sequence[Sequence[int]] = ()

    @property
    def weights(self) -> list[float | None]:
        """The weights of the summands."""
        return [one.weight for one in self.summands]

    def as_one(self, weight: float | None = None) -> Observation:
        """Return the same as a loss of a single summand of this weight."""
        one = replace(self.summands[0], weight=weight, divisor=None)
        return replace(
            self,
            summands=[one],
            gradients=self.gradients.sum(0, keepdim=True),
            chosen_from=[[number for own in self.chosen_from for number in own]],
            normalised_over=[[number for own in self.normalised_over for number in own]],
            clamps=[None],
        )

    def is_dead(self, number: int) -> bool:
        """Whether a summand's gradient says nothing: it is 0, as where nothing counts, or not finite."""
        gradient = self.gradients[number]
        return not bool(gradient.isfinite().all() and gradient.any())


def observe(
    loss: LossValue,
    samples: int,
    parameters: Sequence[nn.Parameter],
    quietly: Callable[[], AbstractContextManager[object]],
    *,
    keep: bool,
) -> Observation:
    """Return what a loss gave; its graph is used up, unless another loss needs it: `keep`.

    Blocks that are checkpointed are computed again `quietly`, as they were before.
    """
    value, summands = loss.value, summands_on_host(loss)
    if loss.is_sum:
        value = value / summands[0].weight if summands[0].weight else value * 0.0
    rows = []
    chosen_from, normalised_over = (
        [_lengths(one.node, names) for one in summands] for names in (_CHOOSING, _NORMALISING)
    )
    for number in range(len(summands)) if parameters else ():
        with only(summands, number):
            with quietly():
                gradients = gradients_of(value, parameters, keep=keep or number + 1 < len(summands))
            rows.append(projected(gradients))
    of_value = value.detach().to("cpu", torch.float64)
    # Where gradients cannot be had, the value of a single summand has to do.
    stand_in = of_value.new_zeros(len(summands), 1) if len(summands) > 1 else of_value.reshape(1, 1)
    return Observation(
        samples,
        float(of_value),
        summands,
        torch.stack(rows) if rows else stand_in,
        chosen_from,
        is_stated=loss.weight is not None,
        is_pair=loss.is_sum,
        normalised_over=normalised_over,
    )


def _lengths(node: Any, names: tuple[str, ...]) -> list[int]:
    """Return along how many elements each function of these names goes whose result a node needs."""
    found = []
    for one in nodes_of(node):
        if one.name().startswith(names) and hasattr(one, "_saved_dim") and one.next_functions[0][0] is not None:
            before, output = one.next_functions[0]
            found.append(math.prod(int(shape_of(before, output)[dim]) for dim in dims_of(one)))
    return found


def summands_on_host(loss: LossValue) -> list[Summand]:
    """Return the summands of a loss, with their weights as numbers: 0 for what is multiplied by 0 and is not there."""
    if loss.weight is not None:
        return [Summand(loss.value.grad_fn, float(loss.weight))]
    summands = read(loss.value)
    for one in summands:
        one.weight = None if one.weight is None else 0.0 if math.isinf(one.weight) else float(one.weight)
        one.divisor = None if one.divisor is None else float(one.divisor)
    return summands


@contextmanager
def only(summands: Sequence[Summand], number: int) -> Iterator[None]:
    """Let the gradient of a single summand pass."""
    handles = [
        handle for place, one in enumerate(summands) if place != number for handle in stop(one, but=summands[number])
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradients_of(loss: Tensor, parameters: Sequence[nn.Parameter], *, keep: bool) -> list[Tensor | None]:
    # By the engine: `torch.autograd.grad` leaves modes of functions, and blocks that the model checkpoints would be
    # computed again with their dropout.
    scale = torch.full_like(loss, 1.0 if loss.dtype is torch.float64 else _SCALE)
    run = partial(_engine_run_backward, (loss,), (scale,), keep, False, allow_unreachable=True)
    if not any(node.name() == "CheckpointFunctionBackward" for node in nodes_of(loss.grad_fn)):
        return list(run(tuple(parameters), accumulate_grad=False))
    # Blocks that are checkpointed with reentry need a whole backward pass, which reaches other tensors too.
    before = [(one, one.grad) for one in (*leaves_of(loss), *parameters)]
    for one, _ in before:
        one.grad = None
    run((), accumulate_grad=True)
    found = [parameter.grad for parameter in parameters]
    for one, gradient in before:
        one.grad = gradient
    return found


def projected(gradients: Sequence[Tensor | None]) -> Tensor:
    """Return the product of each gradient with fixed random numbers, on the host."""
    found: list[Tensor] = []
    patterns: dict[torch.device, Tensor] = {}
    # Complex numbers are two. On a small device a longer pattern than needed would not fit.
    longest = min(_PATTERN, max((2 * one.numel() for one in gradients if one is not None), default=0))
    for gradient in gradients:
        if gradient is None:
            found.append(torch.zeros((), dtype=torch.float64))
            continue
        flat = (gradient.to_dense() if gradient.is_sparse else gradient).detach().flatten()
        flat = torch.view_as_real(flat.resolve_conj()).flatten() if flat.is_complex() else flat
        flat = flat if flat.dtype is torch.float64 else flat.float()
        if flat.device not in patterns:
            # No signs: those of a gradient that is signs itself, as of an L1 penalty, may add up to 0.
            numbers = torch.randn(longest, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
            patterns[flat.device] = numbers.to(flat.device)
        numbers, whole = patterns[flat.device].to(flat.dtype), len(flat) - len(flat) % _PATTERN
        product = flat[whole:] @ numbers[: len(flat) - whole]
        if whole:
            product = product + flat[:whole].view(-1, _PATTERN).sum(0) @ numbers
        found.append(product.to("cpu", torch.float64))
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)


def tolerance_of(loss: Tensor, *, casts: bool, dtypes: Iterator[torch.dtype]) -> float:
    """Return the relative difference that rounding may cause in values and gradients."""
    # Also where a model or a closure enters autocast by itself, or a loss adds up in another type.
    made = (one.dtype for node in nodes_of(loss.grad_fn) for one in node._input_metadata)
    used = {loss.dtype, *(dtype for dtype in (*dtypes, *made) if dtype.is_floating_point)}
    if casts or any(dtype.itemsize < FOUR_BYTES for dtype in used):
        return _OF_HALF
    if loss.device.type != "cpu" and torch.float32 in used:
        return _OF_GPU
    return max(_TOLERANCES.get(dtype, _OF_HALF) for dtype in used)


def differ(one: Observation, other: Observation, tolerance: float) -> bool:
    """Whether two observations of the same samples are of unlike random numbers, or of another state."""
    if not abs(one.value - other.value) <= tolerance * abs(one.value):
        return True
    gradients, others = one.gradients.sum(0), other.gradients.sum(0)
    return float((gradients - others).norm()) > tolerance * float(gradients.norm())
