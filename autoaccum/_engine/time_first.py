"""Notices modules that take the samples of a micro-batch for time steps, while careful windows run.

Whether a batch is time-first cannot be told by its shape. A recurrent or attention module with `batch_first=False`
takes (T, N, F): where the first dimension of what it gets is the number of samples, and the second is not, batches were
cut along time, or the module attends over another dimension, as along the columns of images.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from autoaccum._data.splits import is_default
from autoaccum._engine.replaced_forward import are_compiled
from autoaccum._oom import is_oom

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoaccum._loss.objective import Objective
    from autoaccum._system.notices import Notices

_KINDS = (nn.RNNBase, nn.MultiheadAttention)
_DIMS = 3  # (T, N, F)


class TimeFirst:
    """The modules that expect time first, until a pass has shown what they get; none if the user has given a split."""

    def __init__(self, objective: Objective, notices: Notices) -> None:
        self._objective = objective
        self._notices = notices
        self._watched: list[tuple[str, nn.Module]] = []
        self._is_seen, self._finding = False, ""
        if is_default(objective.split) and not are_compiled(objective.modules):
            found = (named for root in objective.modules for named in root.named_modules())
            self._watched = [(name, one) for name, one in found if isinstance(one, _KINDS) and not one.batch_first]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the passes in this block. Report a finding; where they fail, it is a note of the error instead."""
        self._finding = ""
        hooks = [
            module.register_forward_pre_hook(partial(self._see, name), with_kwargs=True)
            for name, module in self._watched
        ]
        try:
            yield
        except Exception as error:
            if self._finding and not is_oom(error):
                error.add_note(f"autoaccum: {self._finding}")
            raise
        finally:
            for hook in hooks:
                hook.remove()
        if self._is_seen:
            self._watched = []
        if self._finding:
            self._notices.say(self._finding)

    def _see(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("input", kwargs.get("query"))
        if not isinstance(given, Tensor) or given.dim() != _DIMS or given.shape[0] == given.shape[1]:
            return
        self._is_seen, samples = True, self._objective.samples
        if given.shape[0] == samples and not self._finding:
            self._finding = (
                f"{type(module).__name__} {name!r} has batch_first=False and gets a tensor of shape "
                f"{tuple(given.shape)}, so it takes the {samples} samples of a micro-batch for time steps; if batches "
                "are time-first, pass split=autoaccum.Along(1), or Along((1, 0)) for targets without time; if not, and "
                "it is not meant to attend along another dimension, make it with batch_first=True"
            )
