"""Compiles a model for one call of `fit`, once its micro-batch sizes are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from autoaccum._arguments import shown
from autoaccum._engine.activation_budget import within_budget
from autoaccum._memory.limits import format_bytes
from autoaccum._oom import first_line
from autoaccum._system.exceptions import contextmanager
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoaccum._memory.base import MemoryBackend


class Compiling:
    """Compiles a model in place, and restores it at the end.

    Args:
        model: The model. Its parameters and their names do not change.
        options: Options for `torch.compile`.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        self._model = model
        self._options = options
        self._share: float | None = None
        self._before = model._compiled_call_impl

    def begin(self) -> None:
        """Compile from now on, with one graph for each size."""
        if self._model._compiled_call_impl is self._before:
            options = self._options if self._share is None else within_budget(self._options, self._share)
            self._model.compile(**{"dynamic": False, **options})

    @contextmanager
    def budget(self, share: float) -> Iterator[None]:
        """Let activations take this share of what they would, in this block; it begins and ends uncompiled."""
        self.end()
        self._share = share
        try:
            yield
        finally:
            self._share = None
            self.end()

    def end(self) -> None:
        """Stop compiling."""
        self._model._compiled_call_impl = self._before


def compile_options(compile: bool | Mapping[str, Any]) -> Mapping[str, Any] | None:  # noqa: A002 - as `fit` names it
    """Return the `torch.compile` options from `fit`'s argument; None if it should not compile.

    Raises:
        InvalidInputError: It is neither a bool nor a mapping, or torch.compile rejects its contents.
    """
    if isinstance(compile, bool):
        return {} if compile else None
    if not isinstance(compile, Mapping):
        raise InvalidInputError(
            f"compile={shown(compile)} is unknown; pass True, False, or a mapping for torch.compile"
        )
    if compile:
        _try(compile)
    return compile


def _try(options: Mapping[str, Any]) -> None:
    """Have torch.compile check its options, which it does when wrapping a module; this compiles nothing."""
    for name in ("fullgraph", "disable", "dynamic"):
        if name in options and not isinstance(options[name], bool | None if name == "dynamic" else bool):
            raise InvalidInputError(f"compile={shown(options)}: {name} must be True or False")
    try:
        nn.Identity().compile(**{"dynamic": False, **options})
    except Exception as error:
        raise InvalidInputError(
            f"compile={shown(options)} is refused by torch.compile ({first_line(error)}); pass what it takes: backend, "
            "mode, options, dynamic, fullgraph"
        ) from error


def check_that_it_can_be_limited(memory: MemoryBackend, limit_bytes: int | None) -> None:
    """Reject a memory limit that the compiler itself would exceed.

    Raises:
        InvalidInputError: The limit applies to the whole process.
    """
    if limit_bytes is not None and not memory.fails_cleanly:
        raise InvalidInputError(
            f"compile= under memory_limit={format_bytes(limit_bytes)} on {memory.name}: the limit holds for the whole "
            "process, and compiling takes hundreds of MiB that are no part of a step; leave one of the two out"
        )
