"""Measures how far the gradient of a few samples is from that of their parts together.

A term of a loss that is not a mean or a sum over the samples (a router's load-balancing loss) can be invisible in the
loss's value, which it hardly changes near its minimum, and yet bend the gradient. So can a model whose outputs for one
sample depend on the others, and a gradient that is detached, clipped or scaled by a norm. If nothing is found in
evaluation mode, training mode is tried, with dropout and statistics of batches switched off: some terms exist there
only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import distributed

from autoaccum import _oom
from autoaccum._data.splits import FIRST
from autoaccum._loss.gradient_comparison import deviation, slopes
from autoaccum._loss.nonlinear_terms import bent_entries
from autoaccum._loss.observation import Mode
from autoaccum._loss.stand_ins import doubled, may_be_copied, may_be_replaced, standing_in
from autoaccum._loss.unknown_loss import randomness, window_scope
from autoaccum._loss.weighting import Over
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from autoaccum._loss.gradient_comparison import Deviation
    from autoaccum._loss.observation import Attempt
    from autoaccum._loss.reduction_candidates import Split
    from autoaccum._loss.weighting import Weighting

# Windows in which memory may be lacking.
_TRIES = 3
_ROUGHLY = 0.1  # errors that are given without decimals
# The relative difference between outputs of a sample that rounding may cause.
_OUTPUTS = 1e-3
# A term of training mode has the same error under other seeds, but for rounding.
_SEEDS = (2, 4, 6)
_ALIKE = 0.05


class _Found(NamedTuple):
    """How far the parts of a few samples are from their gradient, and in which mode."""

    deviation: Deviation
    mode: Mode


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
        if not self._tries or not is_known or not is_training or not may_be_replaced(attempt.run.objective.modules):
            return
        self._tries -= 1
        try:
            found = _searched(attempt, known, rows)
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
        if found.mode is not Mode.EVALUATION:
            # The names of its terms are those of evaluation mode, in which none bends the loss.
            self._say_of_training(found, attempt, known)
            return
        if not attempt.observed:
            attempt = attempt._replace(observed=attempt.more(attempt.splits[:1]))
        if attempt.observed and all(randomness(name, attempt) is None for name in known):
            self._say(found.deviation, attempt, known.values())

    def give_up(self) -> None:
        """Do not compare: what is wrong with the loss has been said."""
        self._tries = 0

    def _say(self, found: Deviation, attempt: Attempt, known: Iterable[Weighting]) -> None:
        if _mixes_samples(attempt, Mode.EVALUATION):
            self._say_mixed(found, attempt.observed[0].whole, "")
            return
        bent = bent_entries(attempt, known, is_certain=True)
        what = f"its term {' + '.join(map(repr, bent))} is" if bent else "it has a term that is"
        self._say_term(found, attempt, attempt.observed[0].whole, what)

    def _say_of_training(self, found: _Found, attempt: Attempt, names: Iterable[str]) -> None:
        if _mixes_samples(attempt, found.mode):
            self._say_mixed(found.deviation, names, ", in training mode,")
        else:
            self._say_term(found.deviation, attempt, names, "it has a term, in training mode only, that is")

    def _say_mixed(self, found: Deviation, names: Iterable[str], when: str) -> None:
        self._tell(
            f"loss {', '.join(map(repr, names))}: the model's outputs for a sample depend{when} on the other samples "
            "in its micro-batch (attention between samples, a batch's own statistics), so the gradient is not that of "
            f"the whole batch: {_spelled(found)}"
        )

    def _say_term(self, found: Deviation, attempt: Attempt, names: Iterable[str], what: str) -> None:
        self._tell(
            f"loss {', '.join(map(repr, names))}: {what} not a mean or a sum over the samples (as a router's "
            "load-balancing loss, a term scaled by another or a gradient divided by its norm is not), so it is taken "
            f"for each micro-batch by itself: {_spelled(found)}. {window_scope(attempt)}"
        )


def _spelled(found: Deviation) -> str:
    return (
        f"in parts of {' and '.join(map(str, found.samples))} samples, the gradient of {found.parameter!r} is "
        f"{_percent(found.error)} off. Larger micro-batches make that smaller"
    )


def _lacks(error: Exception) -> bool:
    return _oom.is_oom(error) or _oom.is_too_large(error)


def _searched(attempt: Attempt, known: Mapping[str, Weighting], most: int) -> _Found | None:
    found = _measured(attempt, known, most, Mode.EVALUATION)
    if found is not None:
        return _Found(found, Mode.EVALUATION)
    for mode in (Mode.TRAINING, Mode.BARE_TRAINING) if _may_train(attempt) else ():
        found = _measured(attempt, known, most, mode)
        if found is None:
            return None
        again = (_measured(attempt, known, most, mode, seed) for seed in _SEEDS)
        if not found.is_random and all(_are_alike(found, other) for other in again):
            return _Found(found, mode)
    return None


def _are_alike(found: Deviation, other: Deviation | None) -> bool:
    """Whether a deviation was found again under another seed: layers that are dropped at random may agree twice."""
    return other is not None and not other.is_random and abs(other.error - found.error) <= _ALIKE * found.error


def _may_train(attempt: Attempt) -> bool:
    """Whether a few samples may be run in training mode, where modules of several processes may wait for each other."""
    is_one_of_several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return not is_one_of_several and any(part.training for part in attempt.run.objective.modules)


def _measured(
    attempt: Attempt, known: Mapping[str, Weighting], most: int, mode: Mode, seed: int = 0
) -> Deviation | None:
    run, way = attempt.run.in_mode(mode), attempt.way
    one, other = (rows[:most] for rows in attempt.splits[0])
    if not way.casts and may_be_copied(run.objective.modules):
        try:
            return deviation(run, attempt.sample, [one, other], way, known, convert=doubled, seed=seed)
        except Exception as error:
            if _oom.is_device_lost(error) or _lacks(error):
                raise
            _oom.let_go(error)  # a model with types of its own
    return deviation(run, attempt.sample, [one, other], way, known, convert=way.convert, seed=seed)


def slopes_of(name: str, attempt: Attempt) -> Split | None:
    """Return the slopes of a loss for a few samples and parts of them; None if they cannot be had."""
    run, way = attempt.run, attempt.way
    modules = run.objective.modules
    is_training = torch.is_grad_enabled() and run.objective.may_look
    if not is_training or not attempt.can_be_split or not may_be_replaced(modules):
        return None
    split = attempt.splits[0]
    convert = doubled if not way.casts and may_be_copied(modules) else way.convert
    try:
        return slopes(run, attempt.sample, split, way, name, convert=convert)
    except Exception as error:
        if _oom.is_device_lost(error):
            raise
        _oom.let_go(error)  # no memory for it, or a model with types of its own: values tell, later
        return None


def _mixes_samples(attempt: Attempt, mode: Mode) -> bool:
    """Whether outputs of some samples change with the others that they are run with."""
    run, way = attempt.run.in_mode(mode), attempt.way
    if not run.objective.takes_outputs and run.objective.weighting_by_default is None:
        return False
    one, other = attempt.splits[0]
    is_training = mode is not Mode.EVALUATION
    try:
        with (
            run.without_trace(),
            torch.no_grad(),
            standing_in(run.objective.modules, convert=way.convert, may_be_written=is_training) as held,
        ):
            whole = FIRST.piece(run.outputs([*one, *other], attempt.sample, way))
            held.renew()
            part = FIRST.piece(run.outputs(one, attempt.sample, way))
    except InvalidInputError:
        return False  # outputs that do not run along the samples
    if (whole.samples, part.samples) != (len(one) + len(other), len(one)):
        return False
    return not all(
        torch.allclose(together[: len(one)], alone, rtol=_OUTPUTS, atol=_OUTPUTS * float(alone.abs().max()))
        for together, alone in zip(whole.tensors(), part.tensors(), strict=True)
        # Those that are padded to another length cannot be compared.
        if alone.is_floating_point() and alone.numel() and together.shape[1:] == alone.shape[1:]
    )


def _percent(error: float) -> str:
    return f"{100 * error:.{0 if error > _ROUGHLY else 1}f} %"
