"""Measures how far the gradient of a few samples is from that of their parts together.

A term of a loss that is not a mean or a sum over the samples (a router's load-balancing loss) can be invisible in the
loss's value, which it hardly changes near its minimum, and yet bend the gradient. So can a model whose outputs for one
sample depend on the others, and a gradient that is detached, clipped or scaled by a norm. The comparison runs in
float64 where the parameters are few enough for a copy, and otherwise in the model's own precision.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from autoaccum import _oom
from autoaccum._data.splits import FIRST
from autoaccum._loss.counting import target_tensors
from autoaccum._loss.nonlinear_terms import bent_entries
from autoaccum._loss.unknown_loss import randomness, window_scope
from autoaccum._loss.weighting import Over, Weighting, in_full, shares
from autoaccum._system.exceptions import contextmanager
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._loss.observation import Attempt, Rows, Run, Way
    from autoaccum._loss.terms import Term

# The most elements of all parameters together that are copied in float64: 32 MiB.
_COPIED = 2**22


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


# Windows in which memory may be lacking.
_TRIES = 3
_ROUGHLY = 0.1  # errors that are given without decimals
_BY_SAMPLES = Weighting(Over.SAMPLES)


class Deviation(NamedTuple):
    """A difference between the gradient of a few samples and that of their parts.

    Attributes:
        error: The largest difference in one parameter, relative to that parameter's gradient.
        parameter: The name of that parameter.
        samples: The sizes of the parts.
    """

    error: float
    parameter: str
    samples: tuple[int, ...]


class Bends:
    """Measures once whether an objective is linear in its samples, and says so if it is not.

    Args:
        say: Called with what is to be said.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._tell = say
        self._tries = _TRIES

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to compare."""
        return not self._tries

    def look(self, attempt: Attempt, known: Mapping[str, Weighting], rows: int) -> None:
        """Compare the gradient of a few samples with that of their parts, if that has not been done.

        Args:
            attempt: The samples; their losses, too, if they were asked for.
            known: The weighting of each loss.
            rows: The most samples of each of two parts.
        """
        is_known = bool(known) and all(how.over not in (Over.OPAQUE, Over.WEIGHED) for how in known.values())
        is_training = torch.is_grad_enabled() and attempt.run.objective.may_look
        if not self._tries or not is_known or not is_training or not _may_be_replaced(attempt.run.objective.modules):
            return
        self._tries -= 1
        try:
            found = _measured(attempt, known, rows)
        except Exception as error:
            if _oom.is_device_lost(error):
                raise
            # A later window may have the memory for it; a model that cannot be run this way is not asked again.
            if not _lacks(error):
                self._tries = 0
            _oom.let_go(error)
            return
        self._tries = 0
        if found is None:
            return
        if not attempt.observed:
            attempt = attempt._replace(observed=attempt.more(attempt.splits[:1]))
        if attempt.observed and all(randomness(name, attempt) is None for name in known):
            self._say(found, attempt, known.values())

    def give_up(self) -> None:
        """Do not compare: what is wrong with the loss has been said."""
        self._tries = 0

    def _say(self, found: Deviation, attempt: Attempt, known: Iterable[Weighting]) -> None:
        names = ", ".join(map(repr, attempt.observed[0].whole))
        measured = (
            f"in parts of {' and '.join(map(str, found.samples))} samples, the gradient of {found.parameter!r} is "
            f"{_percent(found.error)} off. Larger micro-batches make that smaller"
        )
        if _mixes_samples(attempt):
            self._tell(
                f"loss {names}: the model's outputs for a sample depend on the other samples in its micro-batch "
                "(attention between samples, a batch's own statistics), so the gradient is not that of the whole "
                f"batch: {measured}"
            )
            return
        bent = bent_entries(attempt, known, is_certain=True)
        what = f"its term {' + '.join(map(repr, bent))} is" if bent else "it has a term that is"
        self._tell(
            f"loss {names}: {what} not a mean or a sum over the samples (as a router's load-balancing loss, a term "
            "scaled by another or a gradient divided by its norm is not), so it is taken for each micro-batch by "
            f"itself: {measured}. {window_scope(attempt)}"
        )


def _lacks(error: Exception) -> bool:
    return _oom.is_oom(error) or _oom.is_too_large(error)


def _measured(attempt: Attempt, known: Mapping[str, Weighting], most: int) -> Deviation | None:
    run = attempt.run
    one, other = (rows[:most] for rows in attempt.splits[0])
    copies = not attempt.way.casts and may_be_copied(run.objective.modules)
    if copies:
        try:
            return deviation(run, attempt.sample, [one, other], attempt.way, known, copies=True)
        except Exception as error:
            if _oom.is_device_lost(error) or _lacks(error):
                raise
            _oom.let_go(error)  # a model with types of its own
    return deviation(run, attempt.sample, [one, other], attempt.way, known, copies=False)


def _mixes_samples(attempt: Attempt) -> bool:
    """Whether outputs of some samples change with the others that they are run with."""
    run, way = attempt.run, attempt.way
    if not run.objective.takes_outputs and run.objective.weighting_by_default is None:
        return False
    one, other = attempt.splits[0]
    try:
        with run.without_trace(), torch.no_grad():
            whole, part = (FIRST.piece(run.outputs(rows, attempt.sample, way)) for rows in ([*one, *other], one))
    except InvalidInputError:
        return False  # outputs that do not run along the samples
    if (whole.samples, part.samples) != (len(one) + len(other), len(one)):
        return False
    return not all(
        torch.allclose(together[: len(one)], alone, rtol=_IN_SINGLE.own, atol=_IN_SINGLE.own * float(alone.abs().max()))
        for together, alone in zip(whole.tensors(), part.tensors(), strict=True)
        if alone.is_floating_point() and alone.numel()
    )


def _percent(error: float) -> str:
    return f"{100 * error:.{0 if error > _ROUGHLY else 1}f} %"


def deviation(
    run: Run, sample: Window, split: Rows, way: Way, known: Mapping[str, Weighting], *, copies: bool
) -> Deviation | None:
    """Return how far the parts of a sample together are from its gradient; None if no further than by rounding.

    Args:
        run: Runs the objective.
        sample: The samples.
        split: The rows of its parts.
        way: How the objective is run.
        known: The weighting of each loss.
        copies: Whether to run with copies of the parameters in float64.
    """
    noise = _IN_DOUBLE if copies else _IN_HALF if way.casts or run.is_in_half else _noise_of_single(run)
    convert = _doubled if copies else None
    parts = [sample.chosen(part).cut(0, len(part)) for part in split]
    with run.without_trace(), torch.enable_grad(), _stand_ins(run.objective.modules, copies=copies) as stand_ins:
        whole = _trained(run.terms([row for part in split for row in part], sample, way, convert=convert))
        of_whole, of_parts = _factors(whole, known, parts, tuple(map(len, split)))
        total = _total(whole, of_whole)
        if total is None or not stand_ins or not math.isfinite(total.item()):
            return None
        leaves = list(stand_ins.values())  # and no parameters of other modules that the loss uses
        total.backward(inputs=leaves)  # type: ignore[no-untyped-call]
        del whole, total
        sizes = {name: _norm(parameter) for name, parameter in stand_ins.items()}
        for rows, factors in zip(split, of_parts, strict=True):
            total = _total(_trained(run.terms(rows, sample, way, convert=convert)), factors)
            if total is not None:
                (-total).backward(inputs=leaves)  # type: ignore[no-untyped-call]
        apart = {name: _norm(parameter) for name, parameter in stand_ins.items()}
    least = noise.all * math.hypot(*sizes.values())
    errors = {name: apart[name] / size for name, size in sizes.items() if size and apart[name] > least}
    worst = max(errors, key=errors.__getitem__, default=None)
    if worst is None or not errors[worst] > noise.own:
        return None
    return Deviation(errors[worst], worst, tuple(map(len, split)))


def _noise_of_single(run: Run) -> _Noise:
    """Return the noise of single precision; on a card, convolutions compute in TF32 unless that is switched off."""
    parts = [part for module in run.objective.modules for part in module.modules()]
    is_on_host = all(parameter.device.type == "cpu" for part in parts for parameter in part.parameters(recurse=False))
    is_full = torch.get_float32_matmul_precision() == "highest" and not any(isinstance(part, _ConvNd) for part in parts)
    return _IN_SINGLE if is_on_host or is_full else _IN_TENSOR_FLOAT


def _may_be_replaced(modules: Sequence[nn.Module]) -> bool:
    """Whether the parameters of modules are theirs to set, as those of compiled scripts are not."""
    return not any(isinstance(part, torch.jit.ScriptModule) for module in modules for part in module.modules())


def may_be_copied(modules: Sequence[nn.Module]) -> bool:
    """Whether the parameters of modules are few enough, and of types, for copies in float64."""
    parameters = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    return (
        all(type(parameter) is nn.Parameter and parameter.is_floating_point() for parameter in parameters)
        and all(parameter.device.type != "mps" for parameter in parameters)
        and sum(parameter.numel() for parameter in parameters) <= _COPIED
    )


@contextmanager
def _stand_ins(modules: Sequence[nn.Module], *, copies: bool) -> Iterator[dict[str, nn.Parameter]]:
    """Put other parameters in the place of the modules' own for the block; they collect gradients of their own.

    Yields:
        Those that collect one, by name.
    """
    places = [
        (part, f"{path}.{name}" if path else name, name, parameter)
        for number, module in enumerate(modules)
        for path, part in module.named_modules(prefix="loss" if number else "")
        for name, parameter in part._parameters.items()
        if type(parameter) is nn.Parameter
    ]
    # A module may hold its parameters a second time, where they are not replaced.
    gradients = {parameter: parameter.grad for module in modules for parameter in module.parameters()}
    buffers = [(part._buffers, dict(part._buffers)) for module in modules for part in module.modules()]
    made: dict[nn.Parameter, nn.Parameter] = {}
    try:
        for parameter in gradients:
            parameter.grad = None
        for part, _, name, parameter in places:
            if parameter not in made:
                values = parameter.detach().double() if copies else parameter.detach()
                made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            setattr(part, name, made[parameter])
        for holder, own in buffers if copies else ():
            holder.update({name: None if value is None else _doubled(value) for name, value in own.items()})
        yield {path: made[parameter] for _, path, _, parameter in places if parameter.requires_grad}
    finally:
        for holder, own in buffers:
            holder.update(own)
        for part, _, name, parameter in places:
            setattr(part, name, parameter)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


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


def _norm(parameter: nn.Parameter) -> float:
    return 0.0 if parameter.grad is None else float(parameter.grad.norm())


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
