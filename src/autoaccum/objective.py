"""What is minimised: how a batch goes through the model and the loss, and what its samples weigh.

A micro-batch comes in, loss terms with their graphs come out; nothing is back-propagated here. How an unknown loss
weighs its samples is found out here by running it on a handful of samples, without gradients and without a trace.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum import batches, oom, signals, weighting
from autoaccum.errors import InvalidInputError
from autoaccum.state import Mark, evaluation_mode
from autoaccum.weighting import Over, Weighting

if TYPE_CHECKING:
    from autoaccum.batches import Window
    from autoaccum.notices import Notices

Loss = Callable[..., Any]

_PAIR = 2
_LOSS = "loss"
# Names under which mappings keep what a model's own loss compares with.
_TARGET_WORDS = ("label", "target")
# A loss is rebuilt from its parts up to rounding: of the mean itself, and of kernels that differ by batch size.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5}
_HALF_TOLERANCE = 1e-2
# Of candidates that fit, one is the better only if it is so by more than rounding.
_CLEARLY = 4.0
_ROUNDING = 1e-7
_BY_SAMPLES = Weighting(Over.SAMPLES)
# Samples looked at for a choice in which the candidates differ, and windows tried until the best guess stands.
_LOOKED_AT = 32
_ATTEMPTS = 8


@dataclass(slots=True)
class Term:
    """One loss of one micro-batch.

    Attributes:
        name: What it is reported as.
        value: Scalar tensor, with its graph: a mean or a sum over the micro-batch.
        over: `Over.VECTOR` or `Over.PAIR` where the form itself says what it is, else None.
        weight: Of a (sum, weight) pair, its weight.
    """

    name: str
    value: Tensor
    over: Over | None = None
    weight: Tensor | float | None = None


@dataclass(slots=True)
class Factors:
    """What the losses of one micro-batch are to be multiplied by, so that the window's add up to its loss.

    Attributes:
        usual: For every loss that is not named: its share of the window's samples.
        provisional: For the sum of a (sum, weight) pair whose weight over the window is not known yet.
        alone: Whether the micro-batch is the whole window, so that a pair's weight is its own.
        named: By name, for losses that weigh their samples otherwise. Of a (sum, weight) pair it multiplies the sum.
    """

    usual: float
    provisional: float
    alone: bool
    named: dict[str, float] = field(default_factory=dict)

    def of(self, name: str) -> float:
        """Return the factor of the loss of this name."""
        return self.named.get(name, self.usual)


@dataclass(frozen=True, slots=True)
class Source:
    """One forward pass and what it gives: a mapping of raw losses by name, and the model's outputs if there are any."""

    run: Callable[[Any], tuple[dict[str, Any], Any]]


class Objective:
    """A model and what to minimise, ready to be asked about one micro-batch after another.

    Args:
        model: Called as DESIGN's conventions say: a pair's first half, a mapping's items, or the batch itself.
        loss: A callable of (outputs, targets) or (outputs, batch); a list of callables of (model, batch), each with a
            forward pass of its own; None for the model's own loss or one chosen by the targets' type.
        forward: A callable of (model, batch) that returns the outputs, in place of the conventions.
        loss_reduction: "mean" or "sum" where it should not be found out.
        notices: Where choices are said.

    Raises:
        InvalidInputError: The arguments cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Sequence[Loss] | None,
        *,
        forward: Callable[[nn.Module, Any], Any] | None,
        loss_reduction: str | None,
        notices: Notices,
    ) -> None:
        if loss_reduction not in (None, "mean", "sum"):
            raise InvalidInputError(f"loss_reduction={loss_reduction!r} is unknown; choose 'mean', 'sum' or None")
        if loss is not None and not isinstance(loss, list | tuple) and not callable(loss):
            raise InvalidInputError(f"loss={loss!r} cannot be called; pass a torch.nn loss, a function or a list")
        self.model = model
        self._loss = loss
        self._forward = forward or self._by_convention
        self._notices = notices
        self._accepted = _accepted_names(model)
        self._weightings: dict[str, Weighting] = {}
        self._open: dict[str, list[Weighting]] = {}
        self._attempts = 0
        self._default: Over | None = None
        self._said = (
            None if loss_reduction is None else Weighting(Over.SUM if loss_reduction == "sum" else Over.SAMPLES)
        )
        if isinstance(loss, list | tuple):
            self.sources = self._from_callables(loss)
        else:
            self.sources = (Source(self._forward_and_loss),)
        self._read_module(loss, loss_reduction)

    @property
    def modules(self) -> list[nn.Module]:
        """The model, and losses that are modules: everything whose buffers and parameters belong to the step."""
        losses = self._loss if isinstance(self._loss, list | tuple) else [self._loss]
        return [self.model, *(loss for loss in losses if isinstance(loss, nn.Module))]

    def terms(self, source: Source, batch: Any, samples: int) -> tuple[list[Term], Any]:
        """Run one source on one micro-batch.

        Args:
            source: One of `sources`.
            batch: The micro-batch, on the device.
            samples: Its number of samples.

        Returns:
            The loss terms with their graphs, and the model's outputs (None for a callable that keeps them).

        Raises:
            InvalidInputError: What came out is no loss.
        """
        raw, outputs = source.run(batch)
        summed = self._said is not None and self._said.over is Over.SUM
        return [_term(name, value, samples, summed=summed) for name, value in raw.items()], outputs

    def outputs(self, batch: Any) -> Any:
        """Return the model's outputs for a batch, for metrics."""
        return self._forward(self.model, batch)

    # --- weights ------------------------------------------------------------------------------------------------------

    def weighting(self, name: str) -> Weighting:
        """What the loss of this name runs over, as far as is known; samples where nothing is."""
        return self._weightings.get(name, self._said or Weighting(Over.SAMPLES))

    def factors(self, window: Window, sizes: Sequence[int]) -> list[Factors]:
        """Return for each micro-batch what its losses are to be multiplied by.

        Raises:
            InvalidInputError: No target of the window counts.
        """
        alone = len(sizes) == 1
        usual = self._shares(self._said or _BY_SAMPLES, window, sizes)
        factors = [Factors(share, 1.0 / window.samples, alone) for share in usual]
        for name, how in self._weightings.items():
            if how.over in (Over.PAIR, Over.VECTOR, Over.SAMPLES):
                continue
            for micro, share in zip(factors, self._shares(how, window, sizes), strict=True):
                micro.named[name] = share
        return factors

    def mixes_pairs(self) -> bool:
        """Whether, as far as is known, some but not all of the losses are (sum, weight) pairs, or several are."""
        return len(self._weightings) > 1 and any(how.over is Over.PAIR for how in self._weightings.values())

    def settle(self, window: Window, sizes: Sequence[int], place: Callable[[Any], Any], mark: Mark) -> None:
        """Find out, where it matters and is not known, what the losses run over.

        An unknown loss is run on one sample, on two others and on the three together, in evaluation mode and without
        gradients; `mark` puts back what that moved. Where the samples at hand cannot tell two candidates apart (no
        padding yet) the question stays open until a window comes in which they differ.

        Args:
            window: Samples to try it on.
            sizes: The micro-batches in which the window will be cut.
            place: Moves a batch to the device.
            mark: Taken and put back here.
        """
        while self._must_ask(window, sizes):
            self._attempts += 1
            mark.take()
            try:
                with evaluation_mode(self.modules), torch.no_grad():
                    self._ask(_telling_samples(window, self._attempts), place)
            except Exception as error:
                # A model may give no loss in evaluation mode (torchvision's detectors give boxes): no reason to stop.
                # Nor is lack of memory, where only one or two samples fit.
                if oom.is_device_lost(error):
                    raise
                self._give_up(oom.first_line(error))
                oom.let_go(error)
            finally:
                with signals.held():
                    mark.put_back()
        if self._open and self._attempts >= _ATTEMPTS:
            self._notices.say(
                f"loss {', '.join(map(repr, self._open))}: what it runs over cannot be told for sure from what was "
                f"seen; taken as {', '.join(self.weighting(name).over.value for name in self._open)}. "
                "loss_reduction= or a (sum, weight) pair says it exactly"
            )

    def _must_ask(self, window: Window, sizes: Sequence[int]) -> bool:
        if self._attempts >= _ATTEMPTS:
            return False
        if not self._weightings and not self._open:
            # Uncut, every loss is its own window's; all that could matter is whether anything counts.
            return len(sizes) > 1 or not _all_count(window)
        return any(_differ(found, window, sizes) for found in self._open.values())

    def _ask(self, sample: Any, place: Callable[[Any], Any]) -> None:
        parts = [batches.chosen(sample, [0])]
        rest = batches.count(sample) - 1
        if rest:
            parts.append(batches.chosen(sample, range(1, 1 + rest)))
        whole = self._raw(place(batches.copied(sample)), 1 + rest)
        if self._default is not None:
            self._know(_LOSS, Weighting(self._default))
            return
        pieces = [self._raw(place(batches.copied(part)), batches.count(part)) for part in parts]
        for name, term in whole.items():
            if term.over is not None:
                self._know(name, Weighting(term.over))
            elif self._said is not None:
                self._know(name, self._said)
            elif len(parts) == _PAIR:
                self._compare(name, term, [piece[name] for piece in pieces if name in piece], parts)

    def _compare(self, name: str, whole: Term, pieces: Sequence[Term], parts: Sequence[Any]) -> None:
        targets = [target_tensors(part) for part in parts]
        if name not in self._open:
            self._open[name] = weighting.candidates(targets[0])
        values = [float(piece.value) for piece in pieces]
        if len(values) != len(parts):
            self._cannot_tell(name)
            return
        if not math.isfinite(float(whole.value)):
            return
        tolerance = _TOLERANCE.get(whole.value.dtype, _HALF_TOLERANCE)
        misfits = {}
        for how in self._open[name]:
            weights = [how.weigh(batches.count(part), named) for part, named in zip(parts, targets, strict=True)]
            misfits[how] = weighting.misfit(how, float(whole.value), values, weights)
        fitting = [how for how, off in misfits.items() if off <= tolerance]
        if not fitting:
            self._cannot_tell(name)
            return
        self._open[name] = [how for how in self._open[name] if how in fitting]
        # Candidates that fit alike give the same answer for samples like these; the best fit stands until they differ,
        # and of equals the one that is right with padding too.
        best = min(misfits[how] for how in fitting)
        equals = [how for how in fitting if misfits[how] <= _CLEARLY * best + _ROUNDING]
        self._know(name, min(equals, key=lambda how: how.over in (Over.SUM, Over.SAMPLES)), say=len(fitting) == 1)
        if len(fitting) == 1:
            self._open.pop(name)

    def _cannot_tell(self, name: str) -> None:
        self._open.pop(name, None)
        self._know(name, Weighting(Over.SAMPLES))
        self._notices.say(
            f"loss {name!r}: what it runs over could not be found out (batch-coupled, random in evaluation mode, or "
            "not there for every sample); micro-batches weigh by their samples. A (sum, weight) pair or "
            "loss_reduction= says it exactly"
        )

    def _raw(self, batch: Any, samples: int) -> dict[str, Term]:
        return {term.name: term for source in self.sources for term in self.terms(source, batch, samples)[0]}

    def _shares(self, how: Weighting, window: Window, sizes: Sequence[int]) -> list[float]:
        return weighting.shares(how, weights_of(how, window, sizes))

    def _know(self, name: str, how: Weighting, *, say: bool = False) -> None:
        self._weightings[name] = how
        if say and self._said is None:
            self._notices.say(f"loss {name!r} is {how.over.value} (found out from a few samples)")

    def _give_up(self, why: str) -> None:
        self._attempts = _ATTEMPTS
        self._notices.say(
            f"what the loss runs over could not be found out in evaluation mode ({why}); micro-batches weigh by their "
            "samples. A (sum, weight) pair or loss_reduction= says it exactly"
        )

    def _read_module(self, loss: Any, loss_reduction: str | None) -> None:
        how = weighting.of_loss_module(loss)
        if how is None or how.over is Over.VECTOR:
            return
        if loss_reduction is not None and (loss_reduction == "sum") != (how.over is Over.SUM):
            raise InvalidInputError(
                f"loss_reduction={loss_reduction!r} contradicts the loss, a {type(loss).__name__} with "
                f"reduction={loss.reduction!r}; leave loss_reduction out"
            )
        self._know(_LOSS, how)

    # --- calling the model and the loss -------------------------------------------------------------------------------

    def _from_callables(self, losses: Sequence[Loss]) -> tuple[Source, ...]:
        if not losses or not all(map(callable, losses)):
            raise InvalidInputError(f"loss={losses!r}: a list of losses must hold callables of (model, batch)")
        names: list[str] = []
        for loss in losses:
            name = getattr(loss, "__name__", type(loss).__name__)
            names.append(name if name not in names else f"{name} {len(names) + 1}")
        return tuple(Source(self._one_of_several(name, loss)) for name, loss in zip(names, losses, strict=True))

    def _one_of_several(self, name: str, loss: Loss) -> Callable[[Any], tuple[dict[str, Any], Any]]:
        def run(batch: Any) -> tuple[dict[str, Any], Any]:
            raw = loss(self.model, batch)
            return (
                {f"{name}/{key}": value for key, value in raw.items()} if isinstance(raw, Mapping) else {name: raw}
            ), None

        return run

    def _forward_and_loss(self, batch: Any) -> tuple[dict[str, Any], Any]:
        outputs = self._forward(self.model, batch)
        if self._loss is None:
            raw = self._own_or_default(outputs, batch)
        elif is_pair(batch):
            if isinstance(self._loss, weighting.ELEMENTWISE):
                _check_same_shape(outputs, batch[1], type(self._loss).__name__)
            raw = self._loss(outputs, batch[1])  # type: ignore[operator]
        else:
            raw = self._loss_of_batch(outputs, batch)
        return (dict(raw) if isinstance(raw, Mapping) else {_LOSS: raw}), outputs

    def _loss_of_batch(self, outputs: Any, batch: Any) -> Any:
        if weighting.of_loss_module(self._loss) is not None:
            raise InvalidInputError(
                f"{type(self._loss).__name__} needs targets, but a batch of type {type(batch).__name__} is no (inputs, "
                "targets) pair; pass loss=lambda outputs, batch: ... that picks them"
            )
        return self._loss(outputs, batch)  # type: ignore[operator,misc]

    def _own_or_default(self, outputs: Any, batch: Any) -> Any:
        own = _own_loss(outputs)
        if own is not None:
            return own
        if not is_pair(batch):
            raise InvalidInputError(
                f"no loss: the model returned {_describe(outputs)}, which holds none, and a batch of type "
                f"{type(batch).__name__} is no (inputs, targets) pair; pass loss=, or targets (labels) to the model"
            )
        loss, self._default = _default_loss(outputs, batch[1])
        self._notices.say(f"loss: {loss.__name__} for {batch[1].dtype} targets (loss=None)", key="default loss")
        return loss(outputs, batch[1])

    def _by_convention(self, model: nn.Module, batch: Any) -> Any:
        if is_pair(batch):
            return model(batch[0])
        if isinstance(batch, Mapping):
            if self._loss is None or self._accepted is None:
                return model(**batch)
            return model(**{name: value for name, value in batch.items() if name in self._accepted})
        return model(batch)


def is_pair(batch: Any) -> bool:
    """Whether a batch is (inputs, targets)."""
    return isinstance(batch, tuple | list) and len(batch) == _PAIR


def target_tensors(batch: Any) -> dict[str, Tensor]:
    """Return the tensors in a batch that are targets, by name."""
    return {str(name): value for name, value in _named_targets(batch) if isinstance(value, Tensor) and value.dim()}


def _named_targets(batch: Any) -> Iterable[tuple[Any, Any]]:
    if not is_pair(batch):
        items = batch.items() if isinstance(batch, Mapping) else ()
        return [(name, value) for name, value in items if any(word in str(name) for word in _TARGET_WORDS)]
    targets = batch[1]
    if isinstance(targets, Mapping):
        return targets.items()
    return enumerate(targets) if isinstance(targets, list | tuple) else [("", targets)]


def weights_of(how: Weighting, window: Window, sizes: Sequence[int]) -> list[float]:
    """Return what each micro-batch of a cut weighs."""
    if not how.needs_targets:
        return [float(size) for size in sizes]
    if len(window.groups()) == 1 and all(how.counts_all(target_tensors(part)) for part in window):
        return [float(size) for size in sizes]  # the usual case, and far cheaper: all samples weigh the same
    weights, start = [], 0
    for size in sizes:
        parts = window.parts(start, start + size)
        weights.append(sum(how.weigh(samples, target_tensors(part)) for part, samples in parts))
        start += size
    return weights


def _term(name: str, raw: Any, samples: int, *, summed: bool) -> Term:
    if isinstance(raw, Tensor):
        if raw.dim() == 0:
            return Term(name, raw)
        if raw.dim() == 1 and raw.shape[0] == samples:
            return Term(name, raw.sum()) if summed else Term(name, raw.mean(), Over.VECTOR)
        raise InvalidInputError(
            f"loss {name!r} has shape {tuple(raw.shape)} for {samples} samples; return a scalar, a vector of {samples} "
            "per-sample losses, or a (sum, weight) pair, such as ((loss * mask).sum(), mask.sum())"
        )
    if is_pair(raw) and isinstance(raw[0], Tensor):
        total, weight = raw
        return Term(
            name,
            total.sum(),
            Over.PAIR,
            weight.detach().sum() if isinstance(weight, Tensor) else float(weight),
        )
    raise InvalidInputError(
        f"loss {name!r} is {_describe(raw)}; return a scalar tensor, a vector of per-sample losses, or a (sum, weight) "
        "pair, with its graph (no .item(), .detach() or float())"
    )


def _own_loss(outputs: Any) -> Any:
    """Return the loss that a model computed itself; None where there is none."""
    if isinstance(outputs, Tensor):
        return outputs if outputs.dim() == 0 else None
    if isinstance(outputs, Mapping) and outputs.get(_LOSS) is None:
        values = outputs.values()
        all_losses = bool(outputs) and all(isinstance(value, Tensor) and value.dim() == 0 for value in values)
        return outputs if all_losses else None
    return outputs[_LOSS] if isinstance(outputs, Mapping) else getattr(outputs, _LOSS, None)


def _default_loss(outputs: Any, targets: Any) -> tuple[Loss, Over]:
    """Choose cross entropy for whole-number targets and mean squared error for floating ones."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.dtype is torch.bool:
        raise InvalidInputError(
            f"no loss can be chosen for outputs {_describe(outputs)} and targets {_describe(targets)}; pass loss="
        )
    if targets.is_floating_point() or targets.is_complex():
        _check_same_shape(outputs, targets, "mean squared error")
        return functional.mse_loss, Over.ELEMENTS
    classes_second = outputs.dim() > 1 and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape)
    classes_last = outputs.dim() > 1 and tuple(outputs.shape[:-1]) == tuple(targets.shape)
    if (not classes_second and not classes_last) or outputs.shape[1 if classes_second else -1] == 1:
        raise InvalidInputError(
            f"no loss can be chosen for outputs of shape {tuple(outputs.shape)} and whole-number targets of shape "
            f"{tuple(targets.shape)}: cross entropy needs (N, C, ...) against (N, ...), with C classes of at least 2; "
            "pass loss= (for one logit a sample, torch.nn.BCEWithLogitsLoss() and floating targets)"
        )
    return (cross_entropy if classes_second else cross_entropy_of_last), Over.COUNTED


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits of shape (N, C, ...) and classes of shape (N, ...)."""
    return functional.cross_entropy(outputs, targets.long())


def cross_entropy_of_last(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits of shape (N, ..., C) and classes of shape (N, ...)."""
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten().long())


def _check_same_shape(outputs: Any, targets: Any, what: str) -> None:
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.shape != targets.shape:
        raise InvalidInputError(
            f"{what} compares element by element, but the outputs have shape {tuple(outputs.shape)} and the targets "
            f"{tuple(targets.shape)}, which torch would broadcast against each other; give both the same shape "
            "(outputs.squeeze(-1) in the model, or targets.unsqueeze(-1) in the loader)"
        )


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _accepted_names(model: nn.Module) -> set[str] | None:
    """Names that the model takes as keyword arguments; None where it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _differ(candidates: Sequence[Weighting], window: Window, sizes: Sequence[int]) -> bool:
    """Whether it matters for this cut which of the candidates is the right one."""
    if len(sizes) > 1 and len({how.over is Over.SUM for how in candidates}) > 1:
        return True
    cuts = [weights_of(how, window, sizes) for how in candidates if how.over is not Over.SUM]
    totals = [sum(weights) for weights in cuts]
    return not all(totals) or any(
        not math.isclose(mine / totals[0], theirs / total, rel_tol=1e-9)
        for weights, total in zip(cuts, totals, strict=True)
        for mine, theirs in zip(cuts[0], weights, strict=True)
    )


def _all_count(window: Window) -> bool:
    return all(
        Weighting(Over.COUNTED).counts_all({name: targets})
        for batch in window
        for name, targets in target_tensors(batch).items()
    )


def _telling_samples(window: Window, attempt: int) -> Any:
    """Choose up to three samples that stand in one batch: one in which few targets count, one of many, one of none.

    With the first alone and the others together, every candidate gives another answer (where the samples can tell). A
    later attempt chooses by chance, but the same in every run.
    """
    groups = window.groups()
    largest = max(range(len(groups)), key=groups.__getitem__)
    start = sum(groups[:largest])
    looked_at = window.cut(start, start + min(groups[largest], _LOOKED_AT))
    counts = _counts(looked_at)
    if attempt > 1:
        any_three = random.Random(attempt).sample(range(len(counts)), min(len(counts), 3))  # noqa: S311 - no secret
        return batches.chosen(looked_at, any_three)
    rarity = _frequencies(looked_at, len(counts))
    by_count = sorted(range(len(counts)), key=lambda index: (counts[index], rarity[index]))
    counting = [index for index in by_count if counts[index]] or by_count
    telling = dict.fromkeys([counting[0], counting[-1], by_count[0], by_count[-2:][0]])
    return batches.chosen(looked_at, list(telling)[:3])


def _frequencies(batch: Any, samples: int) -> list[int]:
    """Return for each sample how often its class occurs in the batch: class weights show only between classes."""
    for targets in target_tensors(batch).values():
        if not targets.is_floating_point() and targets.dim() == 1:
            _, which, often = torch.unique(targets.cpu(), return_inverse=True, return_counts=True)
            return often[which].tolist()  # type: ignore[no-any-return]
    return [0] * samples


def _counts(batch: Any) -> list[int]:
    """Return for each sample how many of its targets count, with and without the shift by one."""
    counts = torch.zeros(batches.count(batch), dtype=torch.long)
    for targets in target_tensors(batch).values():
        if not targets.is_floating_point():
            counting = (targets != weighting.IGNORE_INDEX).reshape(len(targets), -1).cpu()
            counts += counting.sum(1) + counting[:, 1:].sum(1)
    return counts.tolist()
