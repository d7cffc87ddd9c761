"""Runs an objective on a few samples without a trace, usually in evaluation mode, and returns its losses.

The losses of the samples and of parts of them show how the objective weights its samples; `reduction_inference` decides
which samples are run.
"""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from autoaccum import _oom
from autoaccum._data.batches import Window, chosen
from autoaccum._data.nesting import copied, map_tensors
from autoaccum._data.numbers import numbers_in, with_number
from autoaccum._data.splits import FIRST
from autoaccum._loss.counting import target_tensors
from autoaccum._loss.modes import evaluation_mode
from autoaccum._loss.plain_attributes import PlainAttributes
from autoaccum._loss.reduction_candidates import VIA_SINGLE, Rounding, Split, rounding_of
from autoaccum._loss.stand_ins import HALF, may_be_widened, standing_in, widened
from autoaccum._loss.training_mode import quiet_training
from autoaccum._loss.weighting import Weighting, check_pair
from autoaccum._system import signals
from autoaccum._system.exceptions import contextmanager
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from autoaccum._data.numbers import Path
    from autoaccum._loss.modes import Mark
    from autoaccum._loss.terms import Term

# The rows of the parts that a few samples are split into; a single part if there is only one sample.
Rows = list[list[int]]

# What autograd says of a gradient that is asked for where none are recorded.
_NEEDS_A_GRAPH = "does not require grad"
# The most elements of outputs in all splits.
_ELEMENTS = 2**25


class Mode(Enum):
    """The mode that modules are run in."""

    EVALUATION = "evaluation mode"
    TRAINING = "training mode, without dropout and the like"
    BARE_TRAINING = "training mode, without layers that have no parameters"


class Way(NamedTuple):
    """How the objective is run.

    Attributes:
        outputs: The type in which the loss is computed on rows of one forward pass; None runs the model on each part.
        casts: Whether the model runs under autocast.
        widens: Whether it runs with copies in float32 of what it has in half precision, whose rounding hides much.
    """

    outputs: torch.dtype | None
    casts: bool
    widens: bool = False

    @property
    def convert(self) -> Callable[[Tensor], Tensor] | None:
        """What makes the tensors that the model runs with; None if they are its own."""
        return widened if self.widens else None


class Observed(NamedTuple):
    """The losses of a few samples and of the parts that they are split into, by name.

    Attributes:
        whole: The losses of all samples.
        parts: Those of each part.
        batches: The parts.
        samples: Their sizes.
        reported: The entries that are only reported, of all samples and of each part.
        in_half: Whether half precision was used.
    """

    whole: dict[str, Term]
    parts: list[dict[str, Term]]
    batches: list[Any]
    samples: tuple[int, ...]
    reported: list[dict[str, Term]]
    in_half: bool

    def holds(self, name: str) -> bool:
        """Whether the loss exists for all samples and for each part."""
        return all(name in terms for terms in (self.whole, *self.parts))

    def split(self, name: str) -> Split:
        """Return the values of one loss, or of one entry that is only reported."""
        whole, *parts = (self.whole, *self.parts) if name in self.whole else self.reported
        return Split(
            whole=float(whole[name].value),
            parts=tuple(float(terms[name].value) for terms in parts),
            named=tuple(target_tensors(batch) for batch in self.batches),
            samples=self.samples,
            rounding=rounding_of(whole[name].value.dtype, in_half=self.in_half),
        )

    def check_pair(self, name: str) -> bool:
        """Reject a pair that cannot be (sum, weight); return whether the samples allowed a check.

        Raises:
            InvalidInputError: The pair is not (sum, weight).
        """
        whole, *parts = ((float(t[name].value), float(t[name].weight or 0.0)) for t in (self.whole, *self.parts))
        # Its weight may have been counted in single precision.
        check_pair(name, whole, parts, max(self._rounding(name).most, VIA_SINGLE.most))
        return whole[1] != 0.0 and len(parts) > 1

    def _rounding(self, name: str) -> Rounding:
        return rounding_of(self.whole[name].value.dtype, in_half=self.in_half)


class Attempt(NamedTuple):
    """A few samples of a window, and what an objective returned for them and for parts of them.

    Attributes:
        sample: The samples.
        splits: The rows of the parts that they are split into; the first one comes first, and is the whole sample.
        observed: The losses for each split that was run.
        window: The window that they come from.
        run: Runs the objective.
        way: How it was run.
    """

    sample: Window
    splits: list[Rows]
    observed: list[Observed]
    window: Window
    run: Run
    way: Way

    @property
    def can_be_split(self) -> bool:
        """Whether there is more than one sample."""
        return len(self.splits[0]) > 1

    def splits_of(self, name: str) -> list[Split]:
        """Return the values of a loss that can tell something about it."""
        found = [one.split(name) for one in self.observed]
        return [split for split in found if len(split.parts) > 1 and math.isfinite(split.whole)]

    def value_of(self, name: str) -> float:
        """Return the value of a loss for the sample."""
        return float(self.observed[0].whole[name].value)

    def more(self, splits: Sequence[Rows]) -> list[Observed]:
        """Return the losses for further splits of the sample; fewer than asked for if they cannot be had."""
        found = []
        try:
            for split in splits:
                found += self.run.observe(self.sample, [split], self.way)
        except Exception as error:
            if _oom.is_device_lost(error):
                raise
            _oom.let_go(error)
        return found

    def numbers(self) -> dict[Path, float]:
        """Return the numbers that the sample carries."""
        return numbers_in(self.sample.spans[0].piece.batch) if self.sample.is_nested else {}

    def repeat(
        self, name: str, *, numbers: Mapping[Path, float] | None = None, seed: int | None = None
    ) -> tuple[float, float] | None:
        """Return the values of a loss for the sample in two more calls, one after the other; None if it has none.

        Args:
            name: The loss.
            numbers: Other numbers for the sample to carry.
            seed: Seeds the generators before the first call.
        """
        rows = [row for part in self.splits[0] for row in part]
        try:
            (observed, *_) = self.run.observe(self._with(numbers or {}), [[rows]], self.way, seed=seed)
        except Exception as error:
            if _oom.is_device_lost(error):
                raise
            _oom.let_go(error)
            return None
        return (observed.split(name).whole, observed.split(name).parts[0]) if observed.holds(name) else None

    def _with(self, numbers: Mapping[Path, float]) -> Window:
        if not numbers:
            return self.sample
        batch = self.sample.cut(0, self.sample.samples)
        for path, number in numbers.items():
            batch = with_number(batch, path, number)
        return Window([batch], self.sample.split)


class Observable(Protocol):
    """The interface of an objective whose reductions can be inferred; `Objective` implements it."""

    returns_pairs: bool
    may_look: bool
    casts_itself: bool

    @property
    def takes_outputs(self) -> bool: ...

    @property
    def sources(self) -> Sequence[Any]: ...

    @property
    def modules(self) -> Sequence[nn.Module]: ...

    @property
    def weighting_by_default(self) -> Weighting | None: ...

    def outputs(self, batch: Any) -> Any: ...

    def terms(self, source: Any, batch: Any, samples: int) -> tuple[list[Term], Any]: ...

    def terms_of(self, outputs: Any, batch: Any, samples: int) -> list[Term]: ...


class Run:
    """Runs an objective on a few samples without side effects.

    Args:
        objective: The objective to run.
        place: Moves a batch to the device.
        mark: Taken before and restored afterwards.
        autocast: Returns a context to run the model in if it fails without.
        mode: The mode of its modules.

    Attributes:
        objective: As the argument.
        mode: As the argument.
    """

    def __init__(
        self,
        objective: Observable,
        place: Callable[[Any], Any],
        mark: Mark,
        autocast: Callable[[], AbstractContextManager[object]],
        mode: Mode = Mode.EVALUATION,
    ) -> None:
        self.objective = objective
        self.mode = mode
        self._place = place
        self._mark = mark
        self._autocast = autocast

    def in_mode(self, mode: Mode) -> Run:
        """Return a run of the same objective in another mode."""
        return Run(self.objective, self._place, self._mark, self._autocast, mode)

    def observe(self, sample: Window, splits: Sequence[Rows], way: Way, *, seed: int | None = None) -> list[Observed]:
        """Return the losses for splits of a sample; if each needs forward passes, for the first split only.

        Args:
            sample: The samples.
            splits: The rows of the parts that they are split into.
            way: How the objective is run.
            seed: Seeds every generator that is restored afterwards; None leaves them as they are.
        """
        try:
            with torch.no_grad():
                return self._observe(sample, splits, way, seed)
        except RuntimeError as error:
            if _NEEDS_A_GRAPH not in str(error):
                raise
            _oom.let_go(error)
        with torch.enable_grad():  # a penalty on a gradient of the model
            return self._observe(sample, splits, way, seed)

    def _observe(self, sample: Window, splits: Sequence[Rows], way: Way, seed: int | None) -> list[Observed]:
        with self.without_trace():
            if seed is not None:
                self.seed(seed)
            modules = self.objective.modules if way.widens else ()
            with standing_in(modules, convert=way.convert, may_be_written=False):
                if self.in_effect(way, sample).outputs is None:
                    return [self._anew(sample, splits[0], way)]
                assert way.outputs is not None
                return self._on_outputs(sample, splits, way.outputs, way)

    def in_effect(self, way: Way, sample: Window) -> Way:
        """Return how the objective is run on a sample; outputs can be cut only if they run along the samples."""
        return way if sample.is_plain else way._replace(outputs=None)

    @contextmanager
    def without_trace(self) -> Iterator[PlainAttributes]:
        """Put the modules into the run's mode for the block; restore modes, buffers and random state afterwards.

        Yields:
            Their plain attributes, which are restored too.
        """
        self._mark.take()
        attributes = PlainAttributes(self.objective.modules)
        try:
            eager.take()
            with self._modes():
                yield attributes
        finally:
            with signals.held(), ExitStack() as restoring:
                restoring.callback(_restore, self._mark.restore)  # last: it knows how metrics write their states
                restoring.callback(_restore, attributes.put_back)
                restoring.callback(eager.put_back)

    def seed(self, seed: int) -> None:
        """Seed every generator that is restored afterwards."""
        self._mark.random.seed(seed)

    def _modes(self) -> AbstractContextManager[None]:
        if self.mode is Mode.EVALUATION:
            return evaluation_mode(self.objective.modules)
        return quiet_training(self.objective.modules, layers_without_parameters=self.mode is Mode.BARE_TRAINING)

    def terms(
        self, rows: Sequence[int], sample: Window, way: Way, *, convert: Callable[[Tensor], Tensor] | None = None
    ) -> list[Term]:
        """Run model and loss on some rows of a sample, whose tensors may be converted before in another way."""
        batch = self._rows(rows, sample, convert or way.convert)
        with self._autocast() if way.casts else nullcontext():
            found = [self.objective.terms(source, batch, len(rows))[0] for source in self.objective.sources]
        return [term for terms in found for term in terms]

    def outputs(self, rows: Sequence[int], sample: Window, way: Way) -> Any:
        """Run the model on some rows of a sample."""
        with self._autocast() if way.casts else nullcontext():
            return self.objective.outputs(self._rows(rows, sample, way.convert))

    def _rows(self, rows: Sequence[int], sample: Window, convert: Callable[[Tensor], Tensor] | None) -> Any:
        return self._placed(sample.chosen(rows), convert)

    def _placed(self, sample: Window, convert: Callable[[Tensor], Tensor] | None) -> Any:
        batch = self._place(copied(sample.cut(0, sample.samples)))
        return batch if convert is None else map_tensors(convert, batch)

    @property
    def may_widen(self) -> bool:
        """Whether the objective's modules may have copies in float32 of what they have in half precision."""
        return may_be_widened(self.objective.modules)

    @property
    def is_in_half(self) -> bool:
        """Whether a parameter is in half precision, or the objective computes in it by itself."""
        found = [parameter for module in self.objective.modules for parameter in module.parameters()]
        types = {parameter.device.type for parameter in found} - {"meta"}
        return (
            self.objective.casts_itself
            or any(parameter.dtype in HALF for parameter in found)
            or any(map(torch.is_autocast_enabled, types))  # the user's own, around the call
        )

    def _on_outputs(self, sample: Window, splits: Sequence[Rows], dtype: torch.dtype, way: Way) -> list[Observed]:
        batch = self._placed(sample, way.convert)
        with self._autocast() if way.casts else nullcontext():
            outputs = self.objective.outputs(batch)
        rows = FIRST.piece(outputs)
        if rows.samples != sample.samples:
            raise InvalidInputError(f"outputs with {rows.samples} rows for {sample.samples} samples")
        elements = sum(tensor.numel() for tensor in rows.tensors() if tensor.is_floating_point())

        def terms(rows: list[int]) -> list[Term]:
            # The loss may write to both, so it gets copies.
            of_rows, of_batch = copied(chosen(outputs, rows, FIRST)), copied(chosen(batch, rows, sample.split))
            of_rows = map_tensors(lambda tensor: _widened(tensor, dtype), of_rows)
            return self.objective.terms_of(of_rows, of_batch, len(rows))

        affordable = splits[: max(1, _ELEMENTS // max(elements, 1))]
        return [_observed(terms, sample, split, in_half=False) for split in affordable]

    def _anew(self, sample: Window, split: Rows, way: Way) -> Observed:
        in_half = way.casts or self.is_in_half
        return _observed(lambda rows: self.terms(rows, sample, way), sample, split, in_half=in_half)


def _restore(put_back: Callable[[], object]) -> None:
    """Restore something, a second time if it fails: nothing may stay half restored where the error is let go."""
    try:
        put_back()
    except Exception:
        put_back()
        raise


def _observed(terms: Callable[[list[int]], list[Term]], sample: Window, split: Rows, *, in_half: bool) -> Observed:
    rows = [[row for part in split for row in part], *split]
    (whole, *parts), reported = zip(*(_sorted(terms(part)) for part in rows), strict=True)
    of_parts = [sample.chosen(part).cut(0, len(part)) for part in split]
    return Observed(whole, parts, of_parts, tuple(map(len, split)), list(reported), in_half)


def _sorted(terms: Iterable[Term]) -> tuple[dict[str, Term], dict[str, Term]]:
    """Return the terms that are trained on and those that are only reported, by name."""
    found: tuple[dict[str, Term], dict[str, Term]] = ({}, {})
    for term in terms:
        found[term.is_reported][term.name] = replace(term, value=term.value.detach())
    return found


def _widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, dtype)) if tensor.is_floating_point() else tensor


class Eager:
    """Lets compiled modules and functions run eagerly: a size that occurs once is not worth a graph.

    There is one for the process: after an interrupt, a block may end while a later one runs, or never.
    """

    def __init__(self) -> None:
        self._stance: AbstractContextManager[None] | None = None

    def take(self) -> None:
        """Run everything eagerly from now on, unless the compiler was never imported, which would take seconds."""
        if self._stance is None and "torch._dynamo" in sys.modules:
            with signals.held():  # the stance holds from when the object is made
                self._stance = torch.compiler.set_stance("force_eager")

    def put_back(self) -> None:
        """Run compiled code as before, if that was not done already."""
        with signals.held():
            stance, self._stance = self._stance, None
            if stance is not None:
                stance.__exit__(None, None, None)


eager = Eager()
