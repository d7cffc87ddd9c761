"""Compares the gradient of a few samples with that of their parts together.

It runs in float64 where the parameters are few enough for a copy, otherwise in the model's own precision, or in float32
where that is half precision.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from autoaccum._loss.counting import target_tensors
from autoaccum._loss.observation import Mode
from autoaccum._loss.reduction_candidates import Rounding, Split
from autoaccum._loss.stand_ins import doubled, standing_in
from autoaccum._loss.weighting import Over, Weighting, in_full, shares

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._loss.observation import Rows, Run, Way
    from autoaccum._loss.stand_ins import StandIns
    from autoaccum._loss.terms import Term

_BY_SAMPLES = Weighting(Over.SAMPLES)


class _Noise(NamedTuple):
    """The difference that rounding may cause between two gradients.

    Attributes:
        own: Relative to the gradient of the parameter.
        all: Relative to the gradient of all parameters: some are zero but for rounding (a bias before a softmax).
    """

    own: float
    all: float


# A gradient this close is as good as equal, and rounding stays below: kernels depend on the size of a batch, and models
# compute some of their layers in float32 whatever their parameters are.
_IN_DOUBLE = _Noise(1e-3, 1e-7)
_IN_SINGLE = _Noise(1e-3, 1e-5)
_IN_TENSOR_FLOAT = _Noise(2e-2, 1e-3)
_IN_HALF = _Noise(5e-2, 1e-2)
# The same for slopes.
_SLOPE_IN_DOUBLE = Rounding(1e-7, 1e-5)
_SLOPE_IN_SINGLE = Rounding(1e-5, 1e-3)
_SLOPE_IN_HALF = Rounding(1e-2, 5e-2)


class Deviation(NamedTuple):
    """A difference between the gradient of a few samples and that of their parts.

    Attributes:
        error: The largest difference in one parameter, relative to that parameter's gradient.
        parameter: The name of that parameter.
        samples: The sizes of the parts.
        is_random: Whether two runs of the same samples differ as far already.
    """

    error: float
    parameter: str
    samples: tuple[int, ...]
    is_random: bool = False


def deviation(
    run: Run,
    sample: Window,
    split: Rows,
    way: Way,
    known: Mapping[str, Weighting],
    *,
    convert: Callable[[Tensor], Tensor] | None,
    seed: int = 0,
) -> Deviation | None:
    """Return how far the parts of a sample together are from its gradient; None if no further than by rounding.

    In training mode, None also if what runs change cannot be restored; and if the parts are far, the samples are run
    twice more, with other random numbers, to see whether these are why.

    Args:
        run: Runs the objective.
        sample: The samples.
        split: The rows of its parts.
        way: How the objective is run.
        known: The weighting of each loss.
        convert: Makes the parameters, buffers and tensors of a batch to run with; None runs with the model's own.
        seed: Of the random numbers in training mode; the last run has the next one.
    """
    parts, sizes = [sample.chosen(part).cut(0, len(part)) for part in split], tuple(map(len, split))
    modules, is_training = run.objective.modules, run.mode is not Mode.EVALUATION
    with (
        run.without_trace() as attributes,
        torch.enable_grad(),
        standing_in(modules, convert=convert, may_be_written=is_training) as held,
    ):
        if not held.trained or (is_training and not attributes.can_be_put_back):
            return None
        noise = _IN_DOUBLE if convert is doubled else _IN_HALF if way.casts or run.is_in_half else _noise_of_single(run)

        def terms(rows: Sequence[int]) -> list[Term]:
            return _trained(run.terms(rows, sample, way, convert=convert))

        def renew() -> None:
            attributes.put_back()
            held.renew()

        def add_whole(seed: int) -> list[dict[str, float]] | None:
            """Add the gradient of all samples; return the factors of their parts, or None if there is no gradient."""
            if is_training:
                run.seed(seed)
            whole = terms([row for part in split for row in part])
            of_whole, of_parts = _factors(whole, known, parts, sizes)
            return of_parts if _add_gradient(whole, of_whole, held) else None

        of_parts = add_whole(seed)
        if of_parts is None:
            return None
        norms = _norms(held)
        _negate_gradients(held)  # what is added later has its sign: a term may be there by its gradient alone
        for part, factors in zip(split, of_parts, strict=True):
            renew()
            _add_gradient(terms(part), factors, held)
        worst = _worst(_norms(held), norms, noise)
        if worst is None or not is_training:
            return None if worst is None else Deviation(worst[1], worst[0], sizes)
        held.clear_gradients()
        renew()
        add_whole(seed)
        _negate_gradients(held)
        renew()
        add_whole(seed + 1)
        is_random = _worst(_norms(held), norms, noise) is not None
    return Deviation(worst[1], worst[0], sizes, is_random=is_random)


def slopes(
    run: Run, sample: Window, split: Rows, way: Way, name: str, *, convert: Callable[[Tensor], Tensor] | None
) -> Split | None:
    """Return the slope of one loss of a sample in the direction of its gradient, and the slopes of its parts' losses.

    A loss is weighted as its gradient is, so slopes tell what equal losses do not (of a head that is zero).

    Args:
        run: Runs the objective.
        sample: The samples.
        split: The rows of its parts.
        way: How the objective is run.
        name: The loss.
        convert: As for `deviation`.

    Returns:
        The slopes; None if the loss has no gradient, or none that is finite.
    """
    parts = [sample.chosen(part).cut(0, len(part)) for part in split]
    with (
        run.without_trace(),
        torch.enable_grad(),
        standing_in(run.objective.modules, convert=convert, may_be_written=False) as held,
    ):
        in_half = way.casts or run.is_in_half
        rounding = _SLOPE_IN_DOUBLE if convert is doubled else _SLOPE_IN_HALF if in_half else _SLOPE_IN_SINGLE
        trained = list(dict.fromkeys(held.trained.values()))

        def gradient(rows: Sequence[int]) -> list[Tensor]:
            terms = run.terms(rows, sample, way, convert=convert)
            (value,) = (term.value for term in terms if term.name == name)
            return list(torch.autograd.grad(in_full(value), trained, materialize_grads=True))

        direction = gradient([row for part in split for row in part])
        length = math.hypot(*(float(one.norm()) for one in direction))
        if not 0.0 < length < math.inf:
            return None
        of_parts = [
            sum(float((mine * whole).sum()) / length for mine, whole in zip(gradient(part), direction, strict=True))
            for part in split
        ]
    return Split(length, tuple(of_parts), tuple(map(target_tensors, parts)), tuple(map(len, split)), rounding)


def _add_gradient(terms: Sequence[Term], factors: Mapping[str, float], held: StandIns) -> bool:
    """Add the gradient of a loss; return whether it has one that is finite."""
    total = _total(terms, factors)
    if total is None or not math.isfinite(total.item()):
        return False
    # And to no parameters of other modules that the loss uses.
    total.backward(inputs=list(held.trained.values()))  # type: ignore[no-untyped-call]
    return True


def _norms(held: StandIns) -> dict[str, float]:
    return {
        name: 0.0 if parameter.grad is None else float(parameter.grad.norm())
        for name, parameter in held.trained.items()
    }


def _negate_gradients(held: StandIns) -> None:
    for parameter in dict.fromkeys(held.trained.values()):  # once each: a parameter may have two names
        if parameter.grad is not None:
            parameter.grad.neg_()


def _worst(apart: Mapping[str, float], norms: Mapping[str, float], noise: _Noise) -> tuple[str, float] | None:
    """Return the parameter whose gradients differ most, and how far, relative to its own; None if by rounding."""
    least = noise.all * math.hypot(*norms.values())
    errors = {name: apart[name] / norm for name, norm in norms.items() if norm and apart[name] > least}
    name = max(errors, key=errors.__getitem__, default=None)
    return (name, errors[name]) if name is not None and errors[name] > noise.own else None


def _noise_of_single(run: Run) -> _Noise:
    """Return the noise of single precision; on a card, convolutions compute in TF32 unless that is switched off."""
    parts = [part for module in run.objective.modules for part in module.modules()]
    is_on_host = all(parameter.device.type == "cpu" for part in parts for parameter in part.parameters(recurse=False))
    is_full = torch.get_float32_matmul_precision() == "highest" and not any(isinstance(part, _ConvNd) for part in parts)
    return _IN_SINGLE if is_on_host or is_full else _IN_TENSOR_FLOAT


def _trained(terms: Sequence[Term]) -> list[Term]:
    return [term for term in terms if not term.is_reported]


def _factors(
    whole: Sequence[Term], known: Mapping[str, Weighting], parts: Sequence[Any], samples: Sequence[int]
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Return the factor of each loss of a sample, and of each of its parts."""
    named = [target_tensors(part) for part in parts]
    of_whole: dict[str, float] = {}
    of_parts: list[dict[str, float]] = [{} for _ in parts]
    for term in whole:
        how = known.get(term.name, _BY_SAMPLES)
        if term.over is Over.PAIR:
            of_whole[term.name] = 1.0 / float(term.weight or math.nan)
            found = [of_whole[term.name]] * len(parts)
        elif how.over in (Over.SUM, Over.DIVIDED):
            of_whole[term.name], found = 1.0, [1.0] * len(parts)
        else:
            of_whole[term.name] = 1.0
            tallies = [how.tally(count, targets) for count, targets in zip(samples, named, strict=True)]
            total = how.worth(sum(tallies))
            found = shares(how, tallies, sum(samples), total)
        for factors, factor in zip(of_parts, found, strict=True):
            factors[term.name] = factor
    return of_whole, of_parts


def _total(terms: Sequence[Term], factors: Mapping[str, float]) -> Tensor | None:
    values = [term.value * factors[term.name] for term in terms if factors.get(term.name, 0.0) != 0.0]
    values = [value for value in values if value.requires_grad]
    return torch.stack([in_full(value) for value in values]).sum() if values else None
