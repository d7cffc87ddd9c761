"""Evaluates on validation data: mean loss and metrics over every sample once, in micro-batches of their own size."""

from __future__ import annotations

import copy
import inspect
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from autoaccum._arguments import check_function, shown
from autoaccum._data.batches import Window
from autoaccum._data.nesting import copied, map_tensors
from autoaccum._data.object_state import Holdings
from autoaccum._engine.does_not_fit import sample_does_not_fit, sample_of, whole_does_not_fit
from autoaccum._engine.phases import Phase
from autoaccum._engine.savepoint import Savepoint
from autoaccum._engine.window_loss import WindowLoss
from autoaccum._loss.counting import is_pair
from autoaccum._loss.modes import evaluation_mode
from autoaccum._loss.weighting import Over, in_full
from autoaccum._oom import first_line, is_oom, is_too_large, let_go
from autoaccum._records import Evaluation, MemoryEvent
from autoaccum._sizing.planner import balanced, shrink
from autoaccum._system import exceptions
from autoaccum.errors import DoesNotFitError, InvalidInputError

if TYPE_CHECKING:
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.peers import Talk
    from autoaccum._loss.terms import Term

Metric = Callable[[Any, Any], Any]
_T = TypeVar("_T")
_NO_SAMPLES = (
    "the validation loader gave no samples (val_loader=), so there is nothing to evaluate; make it a "
    "DataLoader or a list, since a generator can be read only once"
)
# Samples evaluated before training if running out of memory cannot be survived: few enough to fit anywhere, and enough
# for a metric that needs several.
_TRIED = 32
# Attempts at a loss over a whole batch.
_TRIES = 2
# Name, sum, weight, and whether the value is only reported.
_Loss = tuple[str, Tensor, float | Tensor, bool]
# What a value is multiplied by for its sum, and its weight.
_Share = tuple[float | Tensor, float | Tensor]


class Evaluator:
    """Evaluates with the model and loss of a training step, which it leaves unchanged.

    The micro-batch size is found by failure alone and kept from one evaluation to the next. It is separate from the
    training's, which is not touched.

    Args:
        step: The training step.
        metrics: One metric, several, or several by name. A metric is a callable of (outputs, targets) whose values are
            averaged over the samples, or an object with `update`, `compute` and `reset` (such as torchmetrics'). With
            ranks, the object must come from torchmetrics or have `merge_state(others)` (such as torcheval's).
        on_oom: Called each time memory runs out.
        loss_scope: "micro_batch": the loss is computed on each cut; "window": on each of the loader's batches as a
            whole, and then depends on their size. Metrics see the cuts either way.
        ranks: Other processes that also evaluate, each on the batches of its own loader; None if there are none.

    Raises:
        InvalidInputError: A metric is neither, or cannot be combined over ranks, or the loss cannot be computed on a
            whole batch.
    """

    def __init__(
        self,
        step: TrainingStep,
        metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None = None,
        on_oom: Callable[[MemoryEvent], None] = lambda _: None,
        *,
        loss_scope: str = "micro_batch",
        ranks: Talk | None = None,
    ) -> None:
        self._step = step
        self._ranks = ranks
        self._whole = WindowLoss(step) if loss_scope == "window" else None
        self._metrics = [_counted(name, metric, step.memory.device, ranks) for name, metric in _named(metrics).items()]
        self._on_oom = on_oom
        self._max_size: int | None = None
        self._fed: list[Any] | None = None  # the metrics' state before the cut that they are now processing

    def run(self, batches: Iterable[Any], *, trained_size: int | None = None) -> Evaluation:
        """Evaluate `batches` once, without gradients; a failed attempt's modes and random state are restored.

        Args:
            batches: A loader's batches.
            trained_size: A size known to fit in training, if any. If the device does not fail cleanly, the first
                attempt is no larger; otherwise it is a whole batch.

        Raises:
            InvalidInputError: There is no batch, a metric returns no number, or the model no loss in evaluation mode.
            DoesNotFitError: Not even one sample fits.
        """
        started = time.perf_counter()
        totals = _Totals()
        # If a failure within a pass ends all ranks, an attempt larger than what is known to fit would end them again.
        is_survived = self._step.memory.fails_cleanly and self._step.passes is None
        if trained_size is not None and not is_survived:
            self._max_size = min(self._max_size or trained_size, trained_size)
        for metric in self._metrics:
            metric.reset()
        mark = Savepoint(self._step.objective.modules, self._step.memory.device, self._step.objective.functions)
        with evaluation_mode(self._step.objective.modules), torch.no_grad():
            for batch in batches:
                self._one_batch(Window.of_checked([batch], self._step.objective.split), totals, mark)
            if self._step.passes is not None:
                self._step.passes.evaluate_with_others(self._passes)
        others = [totals] if self._ranks is None else self._ranks.exchange("evaluation", totals.on_host())
        totals = _Totals.of_all(others)
        if not totals.samples:
            raise InvalidInputError(_NO_SAMPLES)
        values = {name: value for metric in self._metrics for name, value in metric.result(self._ranks).items()}
        elapsed_s = time.perf_counter() - started
        return Evaluation(totals.mean(), values, totals.samples, elapsed_s, losses=totals.means())

    def try_out(self, batches: Iterable[Any], most: int | None = None) -> None:
        """Evaluate one cut of the first batch with samples; metrics, modes and known sizes are left unchanged.

        Running out of memory is not an error here: the evaluation itself finds the size that fits.

        Args:
            batches: A loader's batches.
            most: The largest allowed number of samples at once, if known.

        Raises:
            InvalidInputError: There is no sample, a metric returns no number, or the model no loss in evaluation mode.
        """
        kept = [(metric, metric.state()) for metric in self._metrics]
        # Metrics whose state cannot be restored are not tried.
        tried = [metric for metric, state in kept if metric.can_be_put_back(state)]
        try:
            for metric in tried:
                metric.reset()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings about too few samples are irrelevant here
                self._try_first(batches, most, tried)
        except Exception as error:
            if not (is_oom(error) or is_too_large(error)):
                exceptions.note(
                    error, "autoaccum: found by evaluating a few samples of val_loader before the first update"
                )
                raise
            let_go(error)
        finally:
            for metric, state in kept:
                if metric in tried:
                    metric.put_back(state, "it was tried on a few samples before the first update")
        self._step.memory.release()

    def _try_first(self, batches: Iterable[Any], most: int | None, metrics: Sequence[_Averaged | _Stateful]) -> None:
        split = self._step.objective.split
        window = next((window for batch in batches if (window := Window([batch], split)).samples), None)
        if window is not None:
            size = window.samples if self._step.memory.fails_cleanly else min(window.samples, most or _TRIED, _TRIED)
            with evaluation_mode(self._step.objective.modules), torch.no_grad():
                self._try_cut(window, size, metrics)
        elif self._ranks is None:  # other ranks may have some
            raise InvalidInputError(_NO_SAMPLES)

    def _try_cut(self, window: Window, size: int, metrics: Sequence[_Averaged | _Stateful]) -> None:
        cut = window.cut(0, size)
        batch = self._step.transfer.place(cut)
        if self._whole is None:
            terms, outputs = self._passes(batch, size)
        else:
            outputs = self._whole.outputs(batch, size)
            of_whole = self._whole.terms(self._whole.join([outputs]), self._whole.batch(window.part(0, size)), size)
            terms = [of_whole]
        self._losses(terms, cut, window.part(0, size))
        targets = batch[1] if is_pair(batch) else batch
        for metric in metrics:
            metric.update(outputs, targets, size)
            if self._ranks is None:  # some metrics would communicate with other processes
                metric.result(None)

    def _one_batch(self, window: Window, totals: _Totals, mark: Savepoint) -> None:
        start = 0
        parts: list[Any] = []
        while start < window.samples:
            size = min(self._max_size or window.samples, window.samples - start)
            done = self._try(partial(self._one_cut, window, start, size, mark), size, mark)
            if isinstance(done, MemoryEvent):
                self._max_size = shrink(window.samples, size)
                if self._max_size is None:
                    sample = sample_of(window, start)
                    raise sample_does_not_fit(self._step, done.message, sample=sample, phase=Phase.EVALUATE)
                continue
            losses, representations = done
            totals.add(losses, size)
            parts.append(representations)
            start += size
        if self._whole is not None and parts:
            totals.add(self._over_all(self._whole, window, parts, mark), 0)

    def _try(self, work: Callable[[], _T], size: int | None, mark: Savepoint) -> _T | MemoryEvent:
        """Do some work; if memory runs out, restore everything and return what happened."""
        self._fed = None
        is_marked = False
        try:
            mark.take()
            is_marked = True
            return work()
        except Exception as error:
            if self._step.passes is not None:
                self._step.passes.evaluation_failed(error, size)
            if not (is_oom(error) or is_too_large(error)):
                raise
            if self._step.witness is not None:
                self._step.witness.see(error, phase=Phase.EVALUATE, size=size)
            failure = MemoryEvent("evaluate", size, first_line(error))
            let_go(error)
        # The handler has ended: inside it the traceback would still pin the activations.
        if is_marked:
            mark.restore()
        self._step.memory.release()
        if self._fed is not None:
            for metric, state in zip(self._metrics, self._fed, strict=True):
                metric.put_back(state, failure.message)
        self._on_oom(failure)
        return failure

    def _over_all(self, whole: WindowLoss, window: Window, parts: list[Any], mark: Savepoint) -> list[_Loss]:
        """Return the losses over a whole batch, given its representations."""

        def work() -> list[_Loss]:
            terms = whole.terms(whole.join(parts), whole.batch(window), window.samples)
            return self._losses([terms], window[0], window)

        for _ in range(_TRIES):  # there is no smaller cut to try: try once more with empty caches
            done = self._try(work, None, mark)
            if not isinstance(done, MemoryEvent):
                return done
            failure = done.message
        what = f"the loss over all {window.samples} samples of a batch"
        raise whole_does_not_fit(self._step, failure, Phase.EVALUATE, _TRIES, what)

    def _settle(self, window: Window, mark: Savepoint) -> None:
        """Let the objective determine what the losses run over, if not yet known: batches are weighted by it."""
        halves = balanced(window.samples, math.ceil(window.samples / 2))
        place, autocast = self._step.transfer.place, self._step.precision.autocast
        self._step.objective.settle(window, halves, place, mark, autocast)

    def _one_cut(self, window: Window, start: int, size: int, mark: Savepoint) -> tuple[list[_Loss], Any]:
        """Return a cut's losses; if the loss is taken over the whole batch, no losses but the cut's representations."""
        passes = self._step.passes
        if self._whole is None and passes is None:
            self._settle(window, mark)
        cut = window.cut(start, start + size)
        batch = self._step.transfer.place(cut)
        if passes is not None:
            passes.begin_evaluation_pass()
        if self._whole is None:
            terms, outputs = self._passes(batch, size)
            losses = self._losses(terms, cut, window.part(start, start + size))
        else:
            losses, outputs = [], self._whole.outputs(batch, size)
        if passes is not None:
            passes.end_pass()
        # Copies: an output may be a view of a whole layer and keep it alive.
        representations = None if self._whole is None else copied(outputs)
        targets = batch[1] if is_pair(batch) else batch
        # As late as possible, so that only a failing metric can make it necessary to restore what metrics have counted.
        self._fed = [metric.state() for metric in self._metrics]
        for metric in self._metrics:
            metric.update(outputs, targets, size)
        self._fed = None
        return losses, representations

    def _passes(self, batch: Any, size: int) -> tuple[list[list[Term]], Any]:
        """Run a cut's forward passes; return the terms of each, and the outputs if metrics need them."""
        objective = self._step.objective
        terms: list[list[Term]] = []
        outputs: Any = None
        with self._step.precision.autocast():
            for source in objective.sources:
                found, outputs = objective.terms(source, batch, size)
                terms.append(found)
            if self._metrics and outputs is None:
                outputs = objective.outputs(batch)
        return terms, outputs

    def _losses(self, of_passes: Sequence[Sequence[Term]], cut: Any, samples: Window) -> list[_Loss]:
        """Return the losses and reported values of some forward passes, each with its sum and weight."""
        losses: list[_Loss] = []
        by_samples = float(samples.samples), float(samples.samples)
        for terms in of_passes:
            trained = [(term, self._share(term, cut, samples)) for term in terms if not term.is_reported]
            losses += [_weighed(term, share) for term, share in trained]
            usual = self._usual(trained, samples.samples)
            for term in terms:
                if term.is_reported and term.over is Over.PAIR:
                    losses.append(_weighed(term, _share_of_pair(term)))
                elif term.is_reported:
                    losses.append(_weighed(term, by_samples if term.over is Over.VECTOR else usual))
        return losses

    def _usual(self, trained: Sequence[tuple[Term, _Share]], size: int) -> _Share:
        """Return the share of a value reported as a plain number: that of the loss that was computed with it."""
        if len(trained) == 1:
            ((loss, (factor, weight)),) = trained
            return (weight, weight) if loss.over is Over.PAIR else (factor, weight)
        is_sum = all(self._is_sum(loss) for loss, _ in trained)
        return (1.0 if is_sum else float(size)), float(size)

    def _is_sum(self, term: Term) -> bool:
        return term.over is not Over.PAIR and self._step.objective.weighting(term.name).over is Over.SUM

    def _share(self, term: Term, cut: Any, samples: Window) -> _Share:
        """Return what a loss of a cut is multiplied by, and its weight."""
        return _share_of_pair(term) if term.over is Over.PAIR else self._step.objective.weigh(term.name, cut, samples)


def _share_of_pair(term: Term) -> _Share:
    assert term.weight is not None
    return 1.0, term.weight


def _weighed(term: Term, share: _Share) -> _Loss:
    """Return the name, sum and weight of a loss or a reported value."""
    factor, weight = share
    value = in_full(term.value)  # the sum could overflow in half precision
    # If nothing counts, a mean is NaN and must add nothing.
    adds_nothing = isinstance(factor, float) and not factor
    return term.name, torch.zeros_like(value) if adds_nothing else value * factor, weight, term.is_reported


class _Totals:
    def __init__(self) -> None:
        self.samples = 0
        self._sums: dict[str, Tensor | float] = defaultdict(float)
        self._weights: dict[str, Tensor | float] = defaultdict(float)
        self._added: dict[str, None] = {}  # names of those that are losses, in order

    @classmethod
    def of_all(cls, several: Sequence[_Totals]) -> _Totals:
        """Return the combined totals of several."""
        if len(several) == 1:
            return several[0]
        together = cls()
        for one in several:
            found = [(name, sum_, one._weights[name], name not in one._added) for name, sum_ in one._sums.items()]
            together.add(found, one.samples)
        return together

    def on_host(self) -> _Totals:
        """Return the same totals as plain numbers, which waits for the device."""
        plain = _Totals()
        plain.samples, plain._added = self.samples, self._added
        plain._sums.update({name: float(total) for name, total in self._sums.items()})
        plain._weights.update({name: float(weight) for name, weight in self._weights.items()})
        return plain

    def add(self, found: Sequence[tuple[str, Tensor | float, Tensor | float, bool]], samples: int) -> None:
        self.samples += samples
        for name, total, weight, is_reported in found:
            self._sums[name] = self._sums[name] + total
            self._weights[name] = self._weights[name] + weight
            if not is_reported:
                self._added[name] = None

    def means(self) -> dict[str, float]:
        """Return the mean of each loss and reported value; NaN, as in torch, if nothing has counted."""
        weights = {name: float(weight) for name, weight in self._weights.items()}
        return {name: float(total) / weights[name] if weights[name] else math.nan for name, total in self._sums.items()}

    def mean(self) -> float:
        """Return the sum of the losses' means."""
        means = self.means()
        return sum(means[name] for name in self._added)


class _Averaged:
    """A plain callable, averaged over the samples."""

    def __init__(self, name: str, function: Metric) -> None:
        self._name = name
        self._function = function
        self.reset()

    def reset(self) -> None:
        self._sum: Any = 0.0
        self._samples = 0

    def update(self, outputs: Any, targets: Any, samples: int) -> None:
        value = self._function(outputs, targets)
        if isinstance(value, Tensor) and value.dim():
            value = in_full(value).mean()
        elif isinstance(value, np.ndarray):
            value = value.mean()
        elif not isinstance(value, Tensor | Number):
            raise InvalidInputError(
                f"metrics: metric {self._name!r} returned {shown(value)}, which is not a number; return one, or a "
                "tensor with a value for each sample"
            )
        self._sum = self._sum + value * samples
        self._samples += samples

    def result(self, ranks: Talk | None) -> dict[str, float]:
        mine = float(self._sum), self._samples
        said = [mine] if ranks is None else ranks.exchange("metric", mine)
        return {self._name: sum(total for total, _ in said) / sum(samples for _, samples in said)}

    def state(self) -> Any:
        # An object may itself keep count of what it returns.
        is_plain = isinstance(self._function, nn.Module | type) or inspect.isroutine(self._function)
        return self._sum, self._samples, Holdings([] if is_plain else [self._function])

    def can_be_put_back(self, state: Any) -> bool:
        return bool(state[-1].can_be_put_back)

    def put_back(self, state: Any, why: str) -> None:
        self._sum, self._samples, held = state
        if not held.put_back():
            raise _cannot_be_put_back(self._name, self._function, why)


class _Stateful:
    """An object that keeps its own count, such as a torchmetrics metric."""

    def __init__(self, name: str, metric: Any, device: torch.device, ranks: Talk | None) -> None:
        self._name = name
        self._metric = metric.to(device) if hasattr(metric, "to") else metric
        # A collection of metrics or a wrapper around one: each part keeps its own count.
        self._parts = list(metric.modules()) if isinstance(metric, nn.Module) else [metric]
        if ranks is not None:
            self._check_that_ranks_can_share(ranks.size)

    def reset(self) -> None:
        self._metric.reset()

    def update(self, outputs: Any, targets: Any, samples: int) -> None:  # noqa: ARG002 - it counts for itself
        self._metric.update(outputs, targets)

    def result(self, ranks: Talk | None) -> dict[str, float]:
        if ranks is None:
            return self._named(self._metric.compute())
        value = self._of_all_states(ranks) if _is_torchmetrics(self._metric) else self._merged(ranks).compute()
        # Computed from the same states, but the last bit may differ between devices.
        said: list[dict[str, float]] = ranks.exchange("metric", self._named(value))
        return said[0]

    def state(self) -> Holdings:
        return Holdings(self._parts)

    def can_be_put_back(self, state: Holdings) -> bool:
        return state.can_be_put_back

    def put_back(self, state: Holdings, why: str) -> None:
        if not state.put_back():
            raise _cannot_be_put_back(self._name, self._metric, why)

    def _named(self, value: Any) -> dict[str, float]:
        if isinstance(value, Mapping):
            return {f"{self._name}/{key}": _number(key, part) for key, part in value.items()}
        return {self._name: _number(self._name, value)}

    def _check_that_ranks_can_share(self, size: int) -> None:
        if not _is_torchmetrics(self._metric):
            if not hasattr(self._metric, "merge_state"):
                raise InvalidInputError(
                    f"metric {self._name!r}, a {type(self._metric).__name__}, keeps a count of its own, and it is not "
                    f"known how to combine those of {size} ranks; pass a torchmetrics object or a callable of "
                    "(outputs, targets), which is averaged over the samples, or give it merge_state(others)"
                )
            return
        for part in self._parts:
            for state, reduction in getattr(part, "_reductions", {}).items():
                if getattr(reduction, "__name__", "") == "dim_zero_mean":
                    raise InvalidInputError(
                        f"metric {self._name!r} averages its state {state!r} over ranks as if all had the same number "
                        f"of samples, which {size} ranks need not have; pass one that sums, or a callable of (outputs, "
                        "targets), which is averaged over the samples"
                    )

    def _of_all_states(self, ranks: Talk) -> Any:
        """Return the value over what all ranks have counted.

        States are combined as torchmetrics declares. Its own exchange is not used: a rank that failed before reaching
        it would leave the others waiting, and it needs samples on every rank.
        """
        part: Any
        for part in self._parts:
            if hasattr(part, "compute_groups"):
                part.values(copy_state=False)  # only one of several alike counts: share its state
        parts: list[Any] = [part for part in self._parts if hasattr(part, "_reductions")]
        own = [
            (part._update_count, {name: map_tensors(Tensor.cpu, getattr(part, name)) for name in part._reductions})
            for part in parts
        ]
        said = ranks.exchange_tensors("metric states", own)
        kept = [{name: _kept(value) for name, value in vars(part).items()} for part in self._parts]
        try:
            for number, part in enumerate(parts):
                _put_together(part, [one[number] for one in said])
            return self._metric.compute()
        finally:
            for part, attributes in zip(self._parts, kept, strict=True):
                vars(part).clear()
                vars(part).update(attributes)

    def _merged(self, ranks: Talk) -> Any:
        """Return a metric on the host that has counted what all ranks' metrics have."""
        own = copy.deepcopy(self._metric)
        first, *others = ranks.exchange_tensors("metrics", own.to("cpu") if hasattr(own, "to") else own)
        first.merge_state(others)
        return first


def _is_torchmetrics(metric: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(metric).__mro__)


def _put_together(part: Any, said: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Set a torchmetrics object's states to those of all ranks combined, each given with its number of updates."""
    # A rank without samples contributes nothing, and its empty states break some reductions.
    counted = [one for one in said if one[0]] or said[:1]
    part._update_count = sum(updates for updates, _ in counted)
    part.distributed_available_fn = lambda: False  # there is nothing left to gather
    for name, reduction in part._reductions.items():
        values = [states[name] for _, states in counted]
        if len(values) == 1:
            together = values[0]
        elif isinstance(part._defaults[name], list):
            together = [item for value in values for item in (value if isinstance(value, list) else [value])]
        else:
            stacked = torch.stack(values)
            together = reduction(stacked) if callable(reduction) else stacked
        setattr(part, name, map_tensors(lambda tensor: tensor.to(part.device), together))


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise InvalidInputError(
            f"metric {name!r} gave a tensor of shape {tuple(value.shape)}, but a metric is one number; average it, or "
            "return its values by name (torchmetrics.ClasswiseWrapper)"
        )
    return float(value)


def _kept(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _cannot_be_put_back(name: str, metric: Any, why: str) -> DoesNotFitError:
    return DoesNotFitError(
        f"metric {name!r}, a {type(metric).__name__}, ran out of memory while it was counting ({why}), and its state "
        "is too large, or of an unknown kind, to be restored; let it accumulate values in lists of numbers or on the "
        "host, or give the val_loader smaller batches"
    )


def _named(metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None) -> dict[str, Metric]:
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        return dict(metrics)
    several: Sequence[Any] = metrics if isinstance(metrics, list | tuple) else [metrics]
    named: dict[str, Metric] = {}
    for metric in several:
        name = getattr(metric, "__name__", type(metric).__name__)
        named[name if name not in named else f"{name} {len(named) + 1}"] = metric
    return named


def check_metrics(metrics: object) -> None:
    """Check the argument `metrics`.

    Raises:
        InvalidInputError: One of them is no metric, or a mapping's key is no name.
    """
    for name, metric in _named(metrics).items():  # type: ignore[arg-type]
        if not isinstance(name, str):
            raise InvalidInputError(f"metrics={shown(metrics)} has the name {shown(name)}; names must be strings")
        _check_metric(name, metric)


def _check_metric(name: str, metric: Any) -> None:
    if not _is_stateful(metric) or isinstance(metric, type):
        if not callable(metric):
            raise InvalidInputError(
                f"metrics: {name!r} is {shown(metric)}; pass a callable of (outputs, targets) or a torchmetrics object"
            )
        check_function(f"metrics: {name!r}", metric, "outputs, targets")


def _is_stateful(metric: Any) -> bool:
    return all(hasattr(metric, method) for method in ("update", "compute", "reset"))


def _counted(name: str, metric: Any, device: torch.device, ranks: Talk | None) -> _Averaged | _Stateful:
    _check_metric(name, metric)
    if _is_stateful(metric):
        return _Stateful(name, metric, device, ranks)
    return _Averaged(name, metric)
