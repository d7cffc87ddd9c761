"""Notices modules that take the samples of a micro-batch for time steps, while its first pass runs.

Whether a batch is time-first cannot be told by its shape. A recurrent or attention module with `batch_first=False`
takes (T, N, F): where the first dimension of what it gets is the number of samples, and the second is not, batches were
cut along time, or the module attends over another dimension, as along the columns of images.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from autoaccum._engine.replaced_forward import are_compiled
from autoaccum._oom import is_oom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from autoaccum._system.notices import Notices

_KINDS = (nn.RNNBase, nn.MultiheadAttention)
_DIMS = 3  # (T, N, F)


class TimeFirst:
    """The modules of a model that expect time first, until one pass has shown what they get.

    Args:
        modules: The modules to search.
        notices: Reports what is found, once.

    Attributes:
        is_done: Whether there is nothing left to watch.
    """

    def __init__(self, modules: Sequence[nn.Module], notices: Notices) -> None:
        self._notices = notices
        self._watched = [
            (name, module)
            for root in modules
            for name, module in root.named_modules()
            if isinstance(module, _KINDS) and not module.batch_first
        ]
        self._taken = ""  # what is to be said of this pass
        self.is_done = are_compiled(modules) or not self._watched

    @contextmanager
    def watching(self, samples: Callable[[], int]) -> Iterator[None]:
        """Watch passes; `samples` returns how many are in the one that runs."""
        self._taken = ""
        hooks = [
            module.register_forward_pre_hook(partial(self._look, name, samples), with_kwargs=True)
            for name, module in self._watched
        ]
        try:
            yield
        except Exception as error:
            if self._taken and not is_oom(error):
                error.add_note(f"autoaccum: {self._taken}")
            raise
        finally:
            for hook in hooks:
                hook.remove()
        if self._taken:
            self._notices.say(self._taken)

    def _look(
        self,
        name: str,
        samples_now: Callable[[], int],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        given = args[0] if args else kwargs.get("input", kwargs.get("query"))
        if not isinstance(given, Tensor) or given.dim() != _DIMS or given.shape[0] == given.shape[1]:
            return
        self.is_done, samples = True, samples_now()
        if given.shape[0] == samples and not self._taken:
            self._taken = (
                f"{type(module).__name__} {name!r} has batch_first=False and gets a tensor of shape "
                f"{tuple(given.shape)}, so it takes the {samples} samples of a micro-batch for time steps; if batches "
                "are time-first, pass split=autoaccum.Along(1), or Along((1, 0)) for targets without time; if not, and "
                "it is not meant to attend along another dimension, make it with batch_first=True"
            )
