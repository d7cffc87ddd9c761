"""Optimizers that train with other weights than they evaluate with, as schedule-free ones: `train()` and `eval()`.

Both calls write the parameters, and one after the other round them. What is restored here is so bit for bit.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autoaccum._engine.optimizer_step import OptimizerCopy
from autoaccum._engine.optimizers import OptimizerList
from autoaccum._oom import first_line
from autoaccum._system import signals
from autoaccum.errors import StateDamagedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from autoaccum._memory.base import MemoryBackend

CALLS_USER_CODE = True  # for own_code.raised_here

# What an optimizer may keep its mode in, outside of its groups.
_FLAGS = (bool, int, float, str, type(None))


def with_modes(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the optimizer, or those of its parts, that have modes; torch's have none."""
    parts = optimizer.parts if isinstance(optimizer, OptimizerList) else [optimizer]
    return [part for part in parts if callable(getattr(part, "train", None)) and callable(getattr(part, "eval", None))]


def train(optimizer: torch.optim.Optimizer) -> None:
    """Put the weights for training into the parameters, if they are not there. Not within a window."""
    try:
        _call("train", optimizer)
    except Exception as error:
        raise StateDamagedError(
            f"the optimizer's train() failed, so the parameters may be part those for evaluation, part those for "
            f"training ({first_line(error)}); load a checkpoint"
        ) from error


def evaluate(optimizer: torch.optim.Optimizer, memory: MemoryBackend) -> None:
    """Put the weights for evaluation into the parameters; after an error all is as before."""
    if with_modes(optimizer):
        _Modes(optimizer, memory).evaluate()


@contextmanager
def evaluation_weights(
    optimizer: torch.optim.Optimizer, memory: MemoryBackend
) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]] | None]:
    """Have the weights for evaluation in the parameters within the block; afterwards all is bit for bit as before.

    Gives the optimizer's `state_dict` before and the parameters, on the host; None for an optimizer without modes.
    """
    if not with_modes(optimizer):
        yield None
        return
    modes = _Modes(optimizer, memory)
    modes.evaluate()
    try:
        yield modes.before
    finally:
        modes.restore()


class _Modes:
    """Switches to evaluation and back.

    Attributes:
        before: The optimizer's state at first, and the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, memory: MemoryBackend) -> None:
        self._optimizer = optimizer
        with memory.lifted(), memory.elsewhere():
            self._copy = copy = OptimizerCopy(optimizer)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.before = copy.as_copied(optimizer.state_dict()), copy.as_copied(held)
        own = map(vars, with_modes(optimizer))
        self._flags = [{name: one for name, one in kept.items() if isinstance(one, _FLAGS)} for kept in own]

    def evaluate(self) -> None:
        with signals.deferred():
            try:
                _call("eval", self._optimizer)
            except BaseException:
                self._undo()
                raise

    def restore(self) -> None:
        with signals.deferred():
            try:
                _call("train", self._optimizer)  # which may keep its mode where `_undo` does not look
            finally:
                self._undo()

    def _undo(self) -> None:
        self._copy.undo()
        for part, flags in zip(with_modes(self._optimizer), self._flags, strict=True):
            vars(part).update(flags)


def _call(name: str, optimizer: torch.optim.Optimizer) -> None:
    for part in with_modes(optimizer):
        entries = len(part.state)
        getattr(part, name)()
        if len(part.state) > entries:  # looked for in a defaultdict, which counts as state that a step has made
            for holder in [holder for holder, state in part.state.items() if not state]:
                del part.state[holder]
