"""Determines which module of a model created a tensor, from marks that forward passes leave in autograd's graph.

From `begin` to `end`, every module marks the graph nodes behind its outputs with its own name, and the nodes behind its
inputs with the name of the module around it. A mark lives and dies with its node, so nothing is kept alive and nothing
has to be cleared. Without a graph there are no marks. Tensors are not touched.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from autoaccum._system import own_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import CodeType, FrameType

    from torch.utils.hooks import RemovableHandle

_KEY = "autoaccum"
_PYTORCH = str(Path(torch.__file__).parent)
# Name of the model itself, whose path is empty.
MODEL = "(model)"


class Place(NamedTuple):
    """A running module.

    Attributes:
        module: Its path in the model.
        kind: The name of its class.
        code: Code of its forward. If that is PyTorch's, code of the nearest caller in the model that is not PyTorch's;
            None if there is none.
        line: The line where that forward begins, or of the call.
    """

    module: str
    kind: str
    code: CodeType | None
    line: int

    @property
    def source(self) -> str | None:
        """The line, as "file.py:12"."""
        return None if self.code is None else f"{self.code.co_filename}:{self.line}"


class Places:
    """While active, marks what modules create.

    Args:
        modules: The model first, then losses that are modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = tuple(modules)  # names are stored by id, which is valid only as long as these exist
        self._names: dict[int, tuple[str, str]] = {}
        self._own_code: dict[int, tuple[CodeType, int]] = {}
        for number, root in enumerate(modules):
            for path, part in root.named_modules():
                name = ".".join(filter(None, ("" if number == 0 else "(loss)", path))) or MODEL
                self._names.setdefault(id(part), (name, type(part).__name__))
                code = getattr(type(part).forward, "__code__", None)
                if code is not None and not code.co_filename.startswith((_PYTORCH, own_code.FOLDER)):
                    self._own_code[id(part)] = code, code.co_firstlineno
        self._can_mark = not are_compiled(modules)
        self._at_work: list[Place] = []
        self._handles: list[RemovableHandle] = []

    @property
    def names(self) -> Mapping[int, tuple[str, str]]:
        """Path and class of each module, by its id."""
        return self._names

    @property
    def is_marking(self) -> bool:
        """Whether modules currently leave marks."""
        return bool(self._handles)

    @property
    def at_work(self) -> tuple[Place, ...]:
        """The modules that have begun and not ended, outermost first; after an exception, those it passed through."""
        return tuple(self._at_work)

    def begin(self) -> None:
        """Start marking, unless the model is compiled: hooks would break its graphs."""
        if self._can_mark:
            # Hooks on all modules of the process, since a module's own hooks would be copied with the model.
            self._handles.append(hooks.register_module_forward_pre_hook(self._enter))
            self._handles.append(hooks.register_module_forward_hook(self._leave, with_kwargs=True))

    def end(self) -> None:
        """Stop marking; existing marks stay with their nodes."""
        for handle in self._handles:
            handle.remove()
            # PyTorch 2.15 forgets this half of the entry, and then warns of every compiled module.
            hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)
        self._handles = []
        self.forget()

    def forget(self) -> None:
        """Forget the running modules, which an exception has ended."""
        self._at_work.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        if name[0] == MODEL:
            self._at_work.clear()  # left over from an exception that the user's code caught
        elif self._at_work:
            _mark(args, self._at_work[-1])
        self._at_work.append(Place(*name, *(self._own_code.get(id(module)) or _caller())))

    def _leave(self, module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        while self._at_work:
            place = self._at_work.pop()
            if place.module == name[0]:
                _mark((outputs,), place)
                break
        if kwargs and self._at_work:
            _mark(kwargs.values(), self._at_work[-1])


def mark_of(node: Any) -> Place | None:
    """Return the module that created the result of this autograd node, if the node was marked."""
    place: Place | None = node.metadata.get(_KEY)
    return place


def _mark(values: Iterable[Any], place: Place) -> None:
    for value in values:
        if isinstance(value, Tensor):
            node = value.grad_fn
            if node is not None:
                marks: dict[str, Place] = node.metadata  # type: ignore[assignment]  # a property, by its stub a method
                marks.setdefault(_KEY, place)
        elif isinstance(value, list | tuple):
            _mark(value, place)
        elif isinstance(value, dict):
            _mark(value.values(), place)


def _caller() -> tuple[CodeType | None, int]:
    """Return where the model's own code called the module; None if this library called it directly."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(own_code.FOLDER):
            break
        if not file.startswith(_PYTORCH):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None, 0


def are_compiled(modules: Sequence[nn.Module]) -> bool:
    """Whether some of these modules, or of their parts, are compiled."""
    parts = (part for root in modules for part in root.modules())
    return any(part._compiled_call_impl is not None or type(part).__name__ == "OptimizedModule" for part in parts)
