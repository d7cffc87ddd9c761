"""Runs a micro-batch through the model and the loss, and weights its samples within the loss of the window.

Returns loss terms with their graphs, which the caller back-propagates. `reduction_inference` infers how an unknown loss
weights its samples.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum import _oom
from autoaccum._arguments import check_function, is_one_of, shown
from autoaccum._data.batches import chosen
from autoaccum._data.nesting import map_tensors
from autoaccum._data.numbers import spelled
from autoaccum._data.pieces import weigher_of
from autoaccum._data.random_state import RandomState
from autoaccum._data.splits import Along, ByDefault, check_split
from autoaccum._loss import calling_conventions, divisor, weighting
from autoaccum._loss.closures import Closure
from autoaccum._loss.counting import is_pair, tallies_of, target_tensors
from autoaccum._loss.loss_entries import TOTAL, Entries
from autoaccum._loss.modes import Modes, evaluation_mode
from autoaccum._loss.observation import Run, eager
from autoaccum._loss.reduction_inference import Settler
from autoaccum._loss.terms import Term, describe, reported_term, term_of
from autoaccum._loss.weighting import Over, Weighting
from autoaccum._loss.whole_batch import call_with
from autoaccum._system.exceptions import contextmanager
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from autoaccum._data.batches import Window
    from autoaccum._data.numbers import Path
    from autoaccum._data.pieces import Split
    from autoaccum._loss.modes import Mark
    from autoaccum._loss.reduction_inference import Knowledge
    from autoaccum._loss.weighting import Tally
    from autoaccum._system.notices import Notices

CALLS_USER_CODE = True  # for own_code.raised_here

Loss = Callable[..., Any]

# The weight by which parts of a window are combined: their samples, none, or the weight of a pair, which only its loss
# returns; otherwise the weight of the loss of that name.
SAMPLES, SUM, PAIR = "", " sum", " pair"
# Relative difference by which a window's weight may differ from the sum of its micro-batches'.
_ADDS_UP = 1e-6
_BY_SAMPLES = Weighting(Over.SAMPLES)
# For recognising (inputs, targets) as `counting.is_pair` does, inlined because it is done for every micro-batch.
_PAIRS, _PAIR = (tuple, list), 2


@dataclass(slots=True)
class Factors:
    """The factors of the losses of one micro-batch, with which those of a window sum to its loss.

    Attributes:
        usual: For every loss not in `named`: the micro-batch's share of the window's samples.
        provisional: For the sum of a (sum, weight) pair whose total weight over the window is not known yet.
        alone: Whether the micro-batch is the whole window, so that a pair is divided by its own weight.
        named: By name, for losses with another weighting. For a (sum, weight) pair the factor applies to the sum.
    """

    usual: float
    provisional: float
    alone: bool
    named: dict[str, float] = field(default_factory=dict)

    def of(self, name: str) -> float:
        """Return the factor of the loss of this name."""
        return self.named.get(name, self.usual)

    def times(self, number: float) -> Factors:
        """Return these factors multiplied by a number."""
        named = {name: factor * number for name, factor in self.named.items()}
        return Factors(self.usual * number, self.provisional * number, self.alone, named)


@dataclass(frozen=True, slots=True)
class Source:
    """One forward pass, which gives a mapping of raw losses by name, and the model's outputs if there are any.

    Attributes:
        run: Runs the pass; called with the objective and a batch.
        total: The name of the entry that is the total.
    """

    run: Callable[[Objective, Any], tuple[dict[str, Any], Any]]
    total: str = TOTAL


class Objective:
    """A model and its loss, evaluated on one micro-batch after another.

    Args:
        model: Called by DESIGN's conventions with a pair's first half, a mapping's items, or the batch itself.
        loss: A callable of (outputs, targets) or (outputs, batch); a list of callables of (model, batch), each with a
            forward pass of its own; None for the model's own loss or one chosen by the targets' type.
        forward: A callable of (model, batch) that returns the outputs, replacing the conventions.
        loss_reduction: "mean" or "sum"; None to infer it.
        notices: Reports choices.
        split: Counts, cuts and joins batches; None where samples run along the first dimension. Its `weight` replaces
            the inference of a mean's reduction, except for `torch.nn` losses, per-sample losses and pairs.
        further: Modules beside the model that the loss uses, whose buffers and parameters belong to the step too.

    Attributes:
        split: As the argument.
        returns_pairs: Whether any loss so far was a (sum, weight) pair.
        may_look: Whether a sample may be run through the model to determine which entries of a mapping have a gradient.
        casts_itself: Whether the model, or a closure, enters autocast by itself.
        gave_number: Whether the last pass returned a single number.

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
        split: Split | None = None,
        further: Sequence[nn.Module] = (),
    ) -> None:
        check_loss_reduction(loss_reduction)
        _check_loss(loss)
        check_split(split)
        if forward is not None:
            check_function("forward", forward, "model, batch")
        self.model = model
        self.split = ByDefault() if split is None else split
        self._loss = loss
        self._further = [module for module in further if module is not model]
        self._forward = forward
        self._notices = notices
        self._accepted = _accepted_names(model)
        self._default: Over | None = None
        self.returns_pairs = False
        self.may_look = True
        self.casts_itself = False
        self.gave_number = False
        self._has_lacked_memory = False
        self._adds_up = False  # whether the split's weight was seen to
        self._said = _said_by(loss_reduction, split)
        self.sources: tuple[Source, ...]
        if isinstance(loss, list | tuple):
            self.sources = self._from_callables(loss)
        else:
            self.sources = (Source(Objective._forward_and_loss),)
        self._settler = Settler(takes_outputs=self.takes_outputs, said=self._said, notices=notices)
        self._takes_pairs = self._forward is None and loss is not None and not isinstance(loss, list | tuple)
        self._modes: Modes | None = None  # as they were, while something is tried in evaluation mode
        self._entries = Entries(notices, self._settler.forget)
        self._loss_reduction = loss_reduction
        self._settings: tuple[Any, ...] | None = None
        self._class_weights: Tensor | None = None
        self._read_settings()

    @property
    def loss(self) -> Loss | Sequence[Loss] | None:
        """The loss argument."""
        return self._loss

    @property
    def modules(self) -> list[nn.Module]:
        """The model, losses that are modules, and further ones: all whose buffers and parameters belong to the step."""
        losses = self._loss if isinstance(self._loss, list | tuple) else [self._loss]
        return [self.model, *(loss for loss in losses if isinstance(loss, nn.Module)), *self._further]

    @property
    def functions(self) -> list[Any]:
        """The functions of the user's that run in a pass, or join a micro-batch."""
        losses = self._loss if isinstance(self._loss, list | tuple) else [self._loss]
        losses = [loss.function if isinstance(loss, Closure) else loss for loss in losses]
        return [one for one in (*losses, self._forward, self.split) if one is not None]

    def terms(self, source: Source, batch: Any, samples: int) -> tuple[list[Term], Any]:
        """Run one source on one micro-batch.

        Args:
            source: One of `sources`.
            batch: The micro-batch, on the device.
            samples: Its number of samples.

        Returns:
            The loss terms with their graphs, and the model's outputs (None for a callable that does not return them).

        Raises:
            InvalidInputError: The returned value is not a loss.
        """
        raw, outputs = source.run(self, batch)
        name, value = next(iter(raw.items())) if len(raw) == 1 else ("", None)
        self.gave_number = False
        if isinstance(value, Tensor) and value.dim() == 0:  # the usual case
            self.gave_number, terms = True, [Term(name, value)]
        else:
            terms = self._terms(raw, samples, source.total, self._with_gradients(source, batch))
        if self._settler.put_off is not None:
            self._settler.say_put_off()
        return terms, outputs

    def _with_gradients(self, source: Source, batch: Any) -> Callable[[], Mapping[str, Any] | None]:
        """Return a function that runs one source once more, to see what has gradients; None if it may not be run."""

        def with_gradients() -> Mapping[str, Any] | None:
            return self._looked_at(lambda: source.run(self, self._one_of(batch))[0]) if self.may_look else None

        return with_gradients

    def _one_of(self, batch: Any) -> Any:
        """Return one sample of a micro-batch; all of it where a split has joined it, which cannot cut it again."""
        return chosen(batch, [0], self.split) if isinstance(self.split, Along) else batch

    def number_of(self, batch: Any) -> Any:
        """Run the only source on one micro-batch, and return its only loss as it is."""
        if self._takes_pairs and isinstance(batch, _PAIRS) and len(batch) == _PAIR:
            return self._loss(self.model(batch[0]), batch[1])  # type: ignore[operator,misc]
        raw = self.sources[0].run(self, batch)[0]
        return next(iter(raw.values())) if len(raw) == 1 else raw

    def outputs(self, batch: Any) -> Any:
        """Return the model's outputs for a batch, without its loss."""
        return self._by_convention(batch) if self._forward is None else self._forward(self.model, batch)

    def terms_of(self, outputs: Any, batch: Any, samples: int) -> list[Term]:
        """Return the loss terms of existing outputs; not for a list of losses, which compute their own.

        Args:
            outputs: The model's outputs.
            batch: The batch that they were computed from, on the device; of a pair only the targets are used.
            samples: Its number of samples.

        Raises:
            InvalidInputError: The returned value is not a loss.
        """

        def with_gradients() -> Mapping[str, Any] | None:
            return self._looked_at(lambda: self._losses_of(map_tensors(_with_gradient, outputs), batch))

        return self._terms(self._losses_of(outputs, batch), samples, TOTAL, with_gradients)

    # --- weights ------------------------------------------------------------------------------------------------------

    @property
    def takes_outputs(self) -> bool:
        """Whether the loss is a function of outputs, so that it can be called on some of their rows alone."""
        return self._loss is not None and not isinstance(self._loss, list | tuple)

    @property
    def gives_outputs(self) -> bool:
        """Whether a pass gives outputs beside the loss: the model's, or those that a closure returns."""
        return not isinstance(self._loss, list | tuple) or isinstance(self._loss[0], Closure)

    @property
    def weighting_by_default(self) -> Weighting | None:
        """The weighting of the default loss, once it has run; None if a loss was given."""
        return None if self._default is None else Weighting(self._default)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What was said of losses whose gradient may differ from that of the whole batch."""
        return tuple(self._settler.doubts)

    def weighting(self, name: str) -> Weighting:
        """Return the weighting of the loss of this name; by samples while it is unknown."""
        return self._settler.known.get(name, self._said or _BY_SAMPLES)

    def factors(
        self, window: Window, sizes: Sequence[int], totals: Mapping[str, float] | None = None, *, is_part: bool = False
    ) -> list[Factors]:
        """Return the factors of each micro-batch's losses.

        A micro-batch's factors are bitwise identical however the rest of the window is cut.

        Args:
            window: The samples.
            sizes: The micro-batch sizes.
            totals: `weights` of the window that these samples are a part of; None if they are the whole.
            is_part: Whether they are a part, whose losses are later combined with those of other parts.

        Raises:
            InvalidInputError: No target of the window counts, and it is not a part.
        """
        alone = len(sizes) == 1 and not is_part
        usual_total = None if totals is None else totals[SAMPLES]
        usual_how = self._said or _BY_SAMPLES
        weights = tallies_of(usual_how, window, sizes)
        if self._is_weighed and not self._adds_up and len(sizes) > 1:
            self._check_weight(window, weights)
        usual = weighting.shares(usual_how, weights, window.samples, usual_total)
        factors = [Factors(share, 1.0 / (usual_total or window.samples), alone) for share in usual]
        for name, how in self._settler.known.items():
            if self._is_usual(how):
                continue
            total = None if totals is None else totals.get(name)
            if how.divisor is not None:
                shares = self._shares_of_divided(how.divisor, window, sizes, total, is_part=is_part)
                for micro, share in zip(factors, shares, strict=True):
                    micro.named[name] = share
                continue
            tallies = tallies_of(how, window, sizes, in_full=totals is not None)
            if totals is None and is_part:
                # With an unknown weighting all samples count, including those without counted targets.
                total = float(window.samples) if how.over is Over.OPAQUE else how.worth(sum(tallies))
            shares = weighting.shares(how, tallies, window.samples, total)
            for micro, share in zip(factors, shares, strict=True):
                micro.named[name] = share
        return factors

    def _shares_of_divided(
        self, path: Path, window: Window, sizes: Sequence[int], total: float | None, *, is_part: bool
    ) -> list[float]:
        total = self._divisor(path, window) if total is None else total
        if not total and not is_part:
            raise InvalidInputError(
                f"{spelled(path)} of the batches of this window is 0, so the loss over it does not exist; leave such "
                "batches out"
            )
        return [number / total if total else 0.0 for number in divisor.of_micro_batches(path, window, sizes)]

    def _divisor(self, path: Path, window: Window) -> float:
        found = divisor.of_window(path, window)
        if found.is_of_window:
            self._notices.say(
                f"{spelled(path)} is the count of a whole window on each of its batches already, and is not added up",
                key=f"of window {path}",
            )
        if not found.is_known:
            self._notices.say(
                f"{spelled(path)} of a batch is not the number of its targets that count (those that are not "
                f"{weighting.IGNORE_INDEX}), and a window holds a part of that batch: the part is given its share of "
                "the number by samples. Choose a target batch that is a multiple of the loader's batch size for "
                "windows that end where batches do",
                key=f"part of {path}",
            )
        return found.total

    def weigh(self, name: str, cut: Any, part: Window) -> tuple[float, float]:
        """Return what the loss of a part of a window is multiplied by for the sum over its targets, and their weight.

        Args:
            name: Name of the loss, which is no (sum, weight) pair.
            cut: The samples, as the model gets them.
            part: The samples.
        """
        how = self.weighting(name)
        if how.divisor is not None:
            return divisor.of_micro_batches(how.divisor, part, [part.samples])[0], self._divisor(how.divisor, part)
        if how.over is Over.SUM:
            return 1.0, float(part.samples)
        is_weighed = how.over is Over.WEIGHED
        weight = part.weight(0, part.samples) if is_weighed else how.weigh(part.samples, target_tensors(cut))
        return weight, weight

    def weights(self, window: Window) -> dict[str, float]:
        """Return the weights of a window's samples: the usual one, and one for each loss with another weighting."""
        found = {SAMPLES: window.weight(0, window.samples) if self._is_weighed else float(window.samples)}
        for name, how in self._settler.known.items():
            if self._is_usual(how) or how.over is Over.SUM or not window.samples:
                continue
            if how.divisor is not None:
                found[name] = self._divisor(how.divisor, window)
                continue
            # With an unknown weighting all samples count, as in one process.
            is_guess = how.over is Over.OPAQUE
            found[name] = how.worth(
                window.samples if is_guess else tallies_of(how, window, [window.samples], in_full=True)[0]
            )
        return found

    @property
    def common_weight(self) -> str | None:
        """The one of `weights` by which parts of a window are combined; None if losses differ in it."""
        known = self._settler.known
        names = {
            SAMPLES if self._is_usual(how) else SUM if how.over is Over.SUM else name for name, how in known.items()
        }
        pairs = [name for name, how in known.items() if how.over is Over.PAIR]
        if pairs:
            return PAIR if len(known) == 1 else None
        if not known:
            return SUM if self._said is not None and self._said.over is Over.SUM else SAMPLES
        return names.pop() if len(names) == 1 else None

    @property
    def _is_weighed(self) -> bool:
        """Whether the usual weight is what the split counts, and not the number of samples."""
        return self._said is not None and self._said.over is Over.WEIGHED

    def _check_weight(self, window: Window, weights: Sequence[Tally]) -> None:
        """Reject a weight of the split that does not add up over the micro-batches of a window.

        Raises:
            InvalidInputError: It does not.
        """
        whole, added = window.weight(0, window.samples), float(sum(weights))
        if not math.isclose(whole, added, rel_tol=_ADDS_UP):
            raise InvalidInputError(
                f"split={self.split!r}: weight does not add up: {whole:g} for a window, and {added:g} for its "
                f"{len(weights)} micro-batches together, as a mean or a maximum would; return a sum, such as the tokens"
            )
        self._adds_up = True

    def is_known_as_number(self, name: str) -> bool:
        """Whether the loss of this name was seen to weigh samples in a way that only numbers do."""
        how = self._settler.known.get(name)
        return how is not None and not self._is_usual(how)

    def is_by_samples(self, name: str) -> bool:
        """Whether the loss of this name is weighed by samples."""
        return not self._is_weighed and self._is_usual(self.weighting(name))

    def _is_usual(self, how: Weighting) -> bool:
        """Whether a loss has the usual weight, as an unknown one has, so that it needs no factor of its own."""
        if how.over is Over.PAIR:
            return True  # its weight comes with it
        by_samples = how.over in (Over.VECTOR, Over.SAMPLES, Over.OPAQUE) and not how.void
        return how.over is Over.WEIGHED if self._is_weighed else by_samples

    @property
    def has_questions(self) -> bool:
        """Whether the reduction of a loss is still to be inferred."""
        return self._settler.has_questions

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to infer in windows like those so far."""
        return self._settler.is_settled and self._settler.has_compared

    @property
    def knowledge(self) -> dict[str, Knowledge]:
        """What is known of each loss's reduction."""
        return self._settler.knowledge

    def adopt(self, known: Mapping[str, Knowledge]) -> None:
        """Adopt what another process of the same training knows."""
        self._settler.adopt({name: how for name, how in known.items() if not self._entries.is_reported(name)})

    def open_shares(self, window: Window) -> bytes | None:
        """Return how much this part of a window would weigh, for each weighting of a loss that is still possible.

        Returns:
            A digest, equal on all ranks if it does not matter which weighting is right; b"" if it matters whatever the
            other parts weigh, and None if nothing is open.
        """
        with _random_kept(window):
            return self._settler.open_shares(window)

    def mixes_pairs(self) -> bool:
        """Whether one of several losses is known to be a (sum, weight) pair."""
        known = self._settler.known.values()
        return len(known) > 1 and any(how.over is Over.PAIR for how in known)

    def settle(
        self,
        window: Window,
        sizes: Sequence[int],
        place: Callable[[Any], Any],
        mark: Mark,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Infer the reductions of the losses that are unknown and matter.

        An unknown loss is run on a few samples and on parts of them, in evaluation mode and without gradients. If the
        samples do not distinguish two candidates (no padding yet), the question stays open until a window in which they
        differ.

        Args:
            window: Samples to try the losses on.
            sizes: The micro-batch sizes that the window will be cut into.
            place: Moves a batch to the device.
            mark: Taken and restored here.
            autocast: Returns a context to run the model in if it fails without.

        Raises:
            InvalidInputError: A loss returned a pair that is not (sum, weight).
        """
        settler = self._settler
        if settler.is_settled and (len(sizes) == 1 or (settler.has_compared and not settler.compares_again)):
            return
        self._modes = Modes(self.modules)
        with _random_kept(window):
            self._settler.settle(window, sizes, Run(self, place, mark, autocast))
        self._modes = None

    def put_back_modes(self) -> None:
        """Restore the modules' modes and the compiler if something was tried in evaluation mode and never ended.

        An interrupt can come between a block's end and the code that restores what the block changed.
        """
        eager.put_back()
        if self._modes is not None:
            self._modes.put_back()
            self._modes = None

    def begin_window(self, number: int | None = None) -> None:
        """Read the settings of a `torch.nn` loss, which may change from one window to the next.

        Args:
            number: The number of the window; None outside of windows.

        Raises:
            InvalidInputError: As for `_read_settings`.
        """
        if number is not None:
            self._settler.windows = number
        self._read_settings()

    def settings(self) -> tuple[Any, ...]:
        """Return the settings of a `torch.nn` loss, the identity of its class weights, and how losses weigh samples."""
        settings, class_weights = weighting.settings_of(self._loss)
        return settings, id(class_weights), list(self._settler.known.values())

    def _read_settings(self) -> None:
        """Read the settings of a `torch.nn` loss.

        Raises:
            InvalidInputError: They contradict `loss_reduction`.
        """
        settings, class_weights = weighting.settings_of(self._loss)
        if settings == self._settings and class_weights is self._class_weights:
            return
        if self._settings is not None:
            self._settler.forget(TOTAL)
        self._settings, self._class_weights = settings, class_weights
        self._read_module(self._loss, self._loss_reduction)

    def _read_module(self, loss: Any, loss_reduction: str | None) -> None:
        how = weighting.of_loss_module(loss)
        if how is None or how.over is Over.VECTOR:
            return
        if loss_reduction is not None and (loss_reduction == "sum") != (how.over is Over.SUM):
            raise InvalidInputError(
                f"loss_reduction={loss_reduction!r} contradicts the loss, a {type(loss).__name__} with "
                f"reduction={loss.reduction!r}; leave loss_reduction out"
            )
        self._settler.known[TOTAL] = how

    # --- calling the model and the loss -------------------------------------------------------------------------------

    def _from_callables(self, losses: Sequence[Loss]) -> tuple[Source, ...]:
        if len(losses) == 1 and isinstance(losses[0], Closure):
            return (Source(losses[0].source),)
        names: list[str] = []
        for loss in losses:
            name = getattr(loss, "__name__", type(loss).__name__)
            names.append(name if name not in names else f"{name} {len(names) + 1}")
        return tuple(
            Source(_one_of_several(name, loss), total=f"{name}/{TOTAL}")
            for name, loss in zip(names, losses, strict=True)
        )

    def _forward_and_loss(self, batch: Any) -> tuple[dict[str, Any], Any]:
        outputs = self._by_convention(batch) if self._forward is None else self._forward(self.model, batch)
        return self._losses_of(outputs, batch), outputs

    def _losses_of(self, outputs: Any, batch: Any) -> dict[str, Any]:
        if self._loss is None:
            raw = self._own_or_default(outputs, batch)
        elif isinstance(batch, _PAIRS) and len(batch) == _PAIR:
            if isinstance(self._loss, weighting.ELEMENTWISE):
                _check_same_shape(outputs, batch[1], type(self._loss).__name__)
            raw = self._called(outputs, batch[1])
        else:
            raw = self._loss_of_batch(outputs, batch)
        # Asking whether a tensor is a Mapping is slow.
        return {TOTAL: raw} if isinstance(raw, Tensor) or not isinstance(raw, Mapping) else dict(raw)

    def _terms(
        self, raw: Mapping[str, Any], samples: int, total: str, with_gradients: Callable[[], Mapping[str, Any] | None]
    ) -> list[Term]:
        summed = self._said is not None and self._said.over is Over.SUM
        added = self._entries.added(raw, total, with_gradients)
        terms = [term_of(name, value, samples, summed=summed) for name, value in raw.items() if name in added]
        self.returns_pairs = self.returns_pairs or any(term.over is Over.PAIR for term in terms)
        for name, value in raw.items():
            if name not in added and value is not None:
                reported = reported_term(name, value, samples, summed=summed)
                if reported is None:
                    self._notices.say(
                        f"loss {name!r} is {describe(value)}, so it is not reported; return a number, a vector of "
                        "per-sample values or a (sum, weight) pair",
                        key=f"not reported {name}",
                    )
                else:
                    terms.append(reported)
        return terms

    def _looked_at(self, run: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Run something with gradients, which the caller has disabled, to see which entries have one."""
        try:
            with torch.enable_grad(), evaluation_mode(self.modules):
                return run()
        except Exception as error:
            lacks = _oom.is_oom(error) or _oom.is_too_large(error)
            # The first time, the caller has to free memory.
            if _oom.is_device_lost(error) or (lacks and not self._has_lacked_memory):
                self._has_lacked_memory = True
                raise
            self._notices.say(
                f"which entries of the loss have a gradient could not be inferred ({_oom.first_line(error)}); all are "
                "summed until training shows it. Return an entry 'loss' to mark the total",
                key="entries unknown",
            )
            _oom.let_go(error)
        return None

    def _loss_of_batch(self, outputs: Any, batch: Any) -> Any:
        if weighting.of_loss_module(self._loss) is not None:
            raise InvalidInputError(
                f"{type(self._loss).__name__} needs targets, but a batch of type {type(batch).__name__} is not an "
                "(inputs, targets) pair; pass loss=lambda outputs, batch: ... to select them"
            )
        return self._called(outputs, batch)

    def _called(self, outputs: Any, targets: Any) -> Any:
        assert callable(self._loss)
        try:
            return self._loss(outputs, targets)
        except TypeError as error:
            explained = calling_conventions.explain_single(error, self._loss, outputs)
            if explained is None:
                raise
            raise explained from error

    def _own_or_default(self, outputs: Any, batch: Any) -> Any:
        own = _own_loss(outputs)
        if own is not None:
            return own
        if not is_pair(batch):
            if isinstance(batch, Tensor):
                raise InvalidInputError(
                    f"no loss: the model returned {describe(outputs)}, which contains none, and the loader yields "
                    "tensors, not (inputs, targets) pairs; pass loss=, or a DataLoader of a "
                    "TensorDataset(inputs, targets)"
                )
            raise InvalidInputError(
                f"no loss: the model returned {describe(outputs)}, which contains none, and a batch of type "
                f"{type(batch).__name__} is not an (inputs, targets) pair; pass loss=, or targets (labels) to the model"
            )
        loss, self._default = _default_loss(outputs, batch[1])
        self._notices.say(f"loss: {loss.__name__} for {batch[1].dtype} targets (loss=None)", key="default loss")
        return loss(outputs, batch[1])

    def _by_convention(self, batch: Any) -> Any:
        model = self.model
        inputs: list[Any] = []
        entries: dict[str, Any] = {}
        if isinstance(batch, _PAIRS) and len(batch) == _PAIR:
            inputs = [batch[0]]
        elif isinstance(batch, Mapping):
            accepted = None if self._loss is None else self._accepted
            entries = {name: batch[name] for name in batch if accepted is None or name in accepted}
        else:
            return call_with(model, batch)
        try:
            return model(*inputs, **entries)
        except TypeError as error:
            explained = calling_conventions.explain_model(error, model, batch, inputs, entries)
            if explained is None:
                raise
            raise explained from error


def check_loss_reduction(loss_reduction: object) -> None:
    """Check the argument `loss_reduction`.

    Raises:
        InvalidInputError: It is not one of the reductions.
    """
    if loss_reduction is not None and not is_one_of(loss_reduction, ("mean", "sum")):
        raise InvalidInputError(f"loss_reduction={shown(loss_reduction)} is unknown; choose 'mean', 'sum' or None")


def _said_by(loss_reduction: str | None, split: Split | None) -> Weighting | None:
    """Return the weighting that the arguments give to every unknown loss; None to infer it."""
    if loss_reduction == "sum":
        return Weighting(Over.SUM)
    if weigher_of(split) is not None:
        return Weighting(Over.WEIGHED)
    return None if loss_reduction is None else Weighting(Over.OPAQUE)


def _one_of_several(name: str, loss: Loss) -> Callable[[Objective, Any], tuple[dict[str, Any], Any]]:
    def run(objective: Objective, batch: Any) -> tuple[dict[str, Any], Any]:
        try:
            raw = loss(objective.model, batch)
        except (AttributeError, TypeError) as error:
            explained = calling_conventions.explain_list(error, loss, objective.model, batch)
            if explained is None:
                raise
            raise explained from error
        return (
            {f"{name}/{key}": value for key, value in raw.items()} if isinstance(raw, Mapping) else {name: raw}
        ), None

    return run


def _check_loss(loss: object) -> None:
    if isinstance(loss, list | tuple):
        if not loss or not all(map(callable, loss)):
            raise InvalidInputError(f"loss={shown(loss)}: a list of losses must hold callables of (model, batch)")
        for one in loss:
            check_function("loss", one, "model, batch")
        calling_conventions.check_list(loss)
    elif loss is not None and not callable(loss):
        raise InvalidInputError(f"loss={shown(loss)} cannot be called; pass a torch.nn loss, a function or a list")
    elif loss is not None:
        check_function("loss", loss, "outputs, targets")
        calling_conventions.check_single(loss)


def no_gradient(names: Iterable[str]) -> InvalidInputError:
    """Return the error for losses of these names that have no graph."""
    return InvalidInputError(
        f"loss {'+'.join(names)!r} has no gradient: it does not depend on a trainable parameter; look for "
        ".detach(), .item() or torch.no_grad() in its computation"
    )


def _with_gradient(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().clone()
    return tensor.requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def _own_loss(outputs: Any) -> Any:
    """Return the loss that the model itself computed; None if there is none."""
    if isinstance(outputs, Tensor):
        return outputs if outputs.dim() == 0 else None
    if not isinstance(outputs, Mapping):
        return getattr(outputs, TOTAL, None)
    if outputs.get(TOTAL) is None:
        values = outputs.values()
        all_losses = bool(outputs) and all(isinstance(value, Tensor) and value.dim() == 0 for value in values)
        return outputs if all_losses else None
    # Besides a loss a model returns its outputs; scalars among them are parts of the loss or metrics.
    return {
        name: value
        for name, value in outputs.items()
        if name == TOTAL or (isinstance(value, Tensor) and value.dim() == 0)
    }


@contextmanager
def _random_kept(window: Window) -> Iterator[None]:
    """Restore the random state after a block that looks at targets: samples may be collated for that, and draw."""
    if window.is_nested:
        yield
        return
    random = RandomState(torch.device("cpu"))
    random.take()
    try:
        yield
    finally:
        random.put_back()


def _default_loss(outputs: Any, targets: Any) -> tuple[Loss, Over]:
    """Choose cross entropy for integer targets and mean squared error for floating-point ones."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.dtype is torch.bool:
        raise InvalidInputError(
            f"no loss can be chosen for outputs {describe(outputs)} and targets {describe(targets)}; pass loss=, or "
            "forward=lambda model, batch: model(*batch) if the model computes its loss itself from inputs and targets"
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


def _accepted_names(model: nn.Module) -> set[str] | None:
    """Return the keyword arguments that the model accepts; None if it accepts any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}
