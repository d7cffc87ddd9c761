"""Asks together what a loss runs over, where no rank can tell: each has a single sample, or samples that are alike."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, cast

import torch

from autoaccum import _oom
from autoaccum._data.batches import Window
from autoaccum._data.nesting import copied
from autoaccum._engine.phases import Phase
from autoaccum._engine.savepoint import Savepoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from autoaccum._data.pieces import Split
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._loss.reduction_inference import Knowledge

# Ranks that send samples, and how many each sends.
_RANKS = 8
_SAMPLES = 4
# Times in a row that asking may tell nothing.
_IN_VAIN = 8


class JointQuestions:
    """Tries the losses of a step, on every rank alike, on samples of several ranks.

    All ranks have to call these functions in the same windows, with the same messages of all of them.

    Args:
        ranks: All ranks.
        step: This rank's step.
        say: Tells the user what cannot be asked.
    """

    def __init__(self, ranks: Ranks, step: GradientStep, say: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._say = say
        self._step = step
        self._in_vain = self._asked = self._ruled_out = 0
        self._has_asked = False

    def begin_window(self) -> None:
        """Begin a window, in which questions are asked once."""
        self._has_asked = False

    def are_to_be_asked(self, shares: Sequence[bytes | None]) -> bool:
        """Whether a question matters for the shares of a window, and no rank has found the answer.

        Args:
            shares: `Objective.open_shares` of each rank's part that has samples.
        """
        if self._has_asked or self._in_vain >= _IN_VAIN or len(shares) <= 1 or None in shares:
            return False
        return b"" in shares or len(set(shares)) > 1

    def ask(self, window: Window, sources: Sequence[int]) -> None:
        """Try the losses; a rank that lacks the memory learns the answer from the others.

        Args:
            window: This rank's part of the window.
            sources: The ranks that have samples.
        """
        first = self._asked * _RANKS % len(sources)
        self._asked += 1
        self._in_vain += 1
        self._has_asked = True
        step, phase = self._step, self._step.stage.phase
        turned = [*sources[first:], *sources[:first]]
        asked = samples_of(self._ranks, window, turned[:_RANKS], _SAMPLES, step.objective.split)
        if asked is None:
            self._say(
                "the samples of this loader cannot be sent to other ranks, so each rank infers from its own what the "
                "loss runs over, and ranks count alike where these do not tell; return a (sum, weight) pair or pass "
                "loss_reduction= for exact weights"
            )
            return
        step.stage.phase = Phase.WEIGH
        mark = Savepoint(step.objective.modules, step.memory.device, step.objective.functions)
        try:
            step.objective.settle(asked, (1,) * asked.samples, step.transfer.place, mark, step.precision.autocast)
        except Exception as error:
            if not (_oom.is_oom(error) or _oom.is_too_large(error)) or _oom.is_device_lost(error):
                raise
            _oom.let_go(error)
            step.memory.release()
        step.stage.phase = phase

    def learn(self, known: Sequence[Mapping[str, Knowledge]]) -> None:
        """Note what all ranks know now."""
        ruled_out = sum(one.ruled_out for of_rank in known for one in of_rank.values())
        if ruled_out > self._ruled_out:
            self._ruled_out, self._in_vain = ruled_out, 0


def samples_of(ranks: Ranks, window: Window, sources: Sequence[int], most: int, split: Split) -> Window | None:
    """Return samples of several ranks, on the host; the same ones on every rank.

    Args:
        ranks: All ranks.
        window: This rank's part of the window.
        sources: The ranks whose samples are wanted.
        most: The most samples of each.
        split: Counts, cuts and joins the samples.

    Returns:
        A window of them; None if they cannot be sent.
    """
    found: list[Any] = []
    for source in sources:
        found += ranks.tell(_sendable(window, most) if source == ranks.rank else None, source)
    return Window(found, split) if found else None


def _sendable(window: Window, most: int) -> list[Any]:
    """Return the first samples of a window, as the loader would yield them; nothing if they cannot be pickled."""
    try:
        found = copied(window.part(0, min(most, window.groups()[0])).raw())
        torch.save(found, io.BytesIO())
    except Exception:  # noqa: BLE001 - of the user's own types; other ranks wait for what is sent
        return []
    return cast("list[Any]", found)
