"""Lists every live storage on a device once, with its purpose and the module that created it.

Inspects the process from outside after a failure: tensors held by Python (mostly by the failed step's frames), and
tensors that only autograd's graph holds, saved for a backward pass. Nothing is computed, moved or unpacked: a saved
tensor packed by hooks (checkpointing, offloading) stays packed. The result holds no tensors.
"""

from __future__ import annotations

import gc
import heapq
import inspect
import itertools
import re
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autoaccum._engine.forward_backward import TrainingStep
from autoaccum._engine.tensor_origins import Place, mark_of
from autoaccum._memory._storages import StorageWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import CodeType, FrameType

CATEGORIES = ("parameters", "gradients", "optimizer state", "buffers", "inputs", "activations", "other")
# Autograd nodes whose result shares its input's storage (torch, tools/autograd/derivatives.yaml: views).
_VIEWS = re.compile(
    r"(Unsafe)?(Alias|AsStrided|Detach|Diagonal|Expand|Narrow|Permute|ReshapeAlias|Select|Slice|Split|SplitWithSizes|"
    r"Squeeze|T|Transpose|Unbind|Unfold|Unsqueeze|View|ViewAsComplex|ViewAsReal|Chunk)Backward\d+"
)
_RAW = "_raw_saved_"
# The functions whose frames are inspected, and the argument to read from each.
_MICRO_BATCH_OF = TrainingStep.accumulate, "batch"
_REFUSED_BY = StorageWatch._count, "storages"


@dataclass(slots=True)
class Alive:
    """One live storage.

    Attributes:
        bytes: Its size.
        address: Its start address.
        shape: Shape of the largest tensor in it.
        dtype: Data type of that tensor.
        category: One of `CATEGORIES`.
        name: Name of the parameter, buffer or optimizer state entry; None for anything else.
        module: The module that owns or created it; None if unknown.
        kind: Class of that module.
        operator: The operator that created it, as autograd names it.
        source: Line of the user's code that called the module.
    """

    bytes: int
    address: int
    shape: tuple[int, ...]
    dtype: str
    category: str = "other"
    name: str | None = None
    module: str | None = None
    kind: str | None = None
    operator: str | None = None
    source: str | None = None


def survey(
    error: BaseException, step: TrainingStep, names: Mapping[int, tuple[str, str]], *, is_marked: bool
) -> list[Alive]:
    """Return every live storage on the step's device, largest first.

    Args:
        error: The error that ended the step. The frames in its traceback are inspected.
        step: The training step.
        names: Path and class of each module, by its id.
        is_marked: Whether modules have marked what they created. Without marks, module boundaries in the graph are
            unknown, and a tensor belongs to the module in whose frame it was found, or to none.
    """
    frames = _Frames(error, names)
    found = _Survey(step.memory.device, frames.refused)
    for category, name, module, tensor in _owned(step, names):
        found.own(tensor, category, name, module)
    for tensor in frames.inputs:
        found.own(tensor, "inputs", None, None)
    # By type: `isinstance` reads `__class__`, which proxies answer with code of their own.
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    for tensor in tensors:
        # Up to PyTorch 2.9 a tensor that only C++ holds keeps its Python object, and takes it along when it goes.
        Tensor._fix_weakref(tensor)  # type: ignore[attr-defined]
    found.walk(tensors, frames.places if is_marked else {})
    for tensor in tensors:
        found.see(tensor, None, frames.places.get(id(tensor)))
    return sorted(found.alive.values(), key=lambda one: -one.bytes)


class _Survey:
    """Collects storages of one device, except those that the device has refused."""

    def __init__(self, device: torch.device, refused: set[int]) -> None:
        self.alive: dict[int, Alive] = {}
        self._device = device
        self._refused = refused
        self._made: dict[int, int] = {}  # by storage, the sequence number of the node that created it
        self._places: dict[Any, Place | None] = {}  # by node

    def own(self, tensor: Tensor, category: str, name: str | None, module: tuple[str, str] | None) -> None:
        """Record a tensor whose purpose is known."""
        one = self._note(tensor)
        if one is not None and one.category == "other":
            one.category, one.name = category, name
            one.module, one.kind = module or (None, None)

    def see(self, tensor: Tensor, saved_by: Any, place: Place | None) -> None:
        """Record a tensor that was found.

        Args:
            tensor: The tensor.
            saved_by: The graph node that holds it, if any.
            place: The module in whose frame it was found, if any.
        """
        one = self._note(tensor)
        if one is None or one.category not in ("other", "activations"):
            return
        maker = _maker(tensor) or saved_by
        if maker is None and place is None:
            return
        one.category = "activations"
        if maker is None:
            if one.module is None and place is not None:
                one.module, one.kind, one.source = place.module, place.kind, place.source
            return
        # Of several tensors in one storage, the first was created; the others are views or in-place writes.
        key, number = tensor.untyped_storage()._cdata, maker._sequence_nr()
        if number >= self._made.get(key, sys.maxsize):
            return
        self._made[key] = number
        one.operator = re.sub(r"(Backward)?\d*$", "", maker.name())
        where = self._places.get(maker) or place
        if where is not None:
            one.module, one.kind, one.source = where.module, where.kind, where.source

    def walk(self, tensors: Iterable[Tensor], in_frames: Mapping[int, Place]) -> None:
        """Walk the graphs behind some tensors, from outputs to inputs.

        A node without a mark of its own was created by the same module as the node after it: module boundaries
        always carry a mark.

        Args:
            tensors: Tensors to start from.
            in_frames: The module in whose frame a tensor was found, by the tensor's id.
        """
        waiting: list[tuple[int, int, Any]] = []
        order = itertools.count()

        def visit(node: Any, follows: Place | None) -> None:
            if node in self._places:
                self._places[node] = self._places[node] or follows
                return
            self._places[node] = mark_of(node) or follows
            heapq.heappush(waiting, (-node._sequence_nr(), next(order), node))

        for tensor in tensors:
            if tensor.grad_fn is not None:
                visit(tensor.grad_fn, in_frames.get(id(tensor)))
        while waiting:
            node = heapq.heappop(waiting)[2]
            for before, _ in node.next_functions:
                if before is not None:
                    visit(before, self._places[node])
        for node in self._places:
            for tensor in _saved(node):
                self.see(tensor, node, None)

    def _note(self, tensor: Tensor) -> Alive | None:
        if tensor.device != self._device or tensor.layout is not torch.strided:
            return None
        try:
            storage = tensor.untyped_storage()
            key, size, address = storage._cdata, storage.nbytes(), storage.data_ptr()
        except (RuntimeError, NotImplementedError):  # a wrapper subclass has no storage
            return None
        if size == 0 or key in self._refused:
            return None
        one = self.alive.get(key)
        shape = tuple(tensor.shape)
        if one is None:
            one = self.alive[key] = Alive(size, address, shape, str(tensor.dtype).removeprefix("torch."))
        elif tensor.nbytes > torch.Size(one.shape).numel() * getattr(torch, one.dtype).itemsize:
            one.shape, one.dtype = shape, str(tensor.dtype).removeprefix("torch.")
        return one


class _Frames:
    """Tensors and modules found in the frames of an exception's traceback.

    Attributes:
        inputs: The tensors of the micro-batch.
        places: The module in whose frame a tensor was found, by the tensor's id; the outermost of several.
        refused: Storages that a simulated device has refused; an operator creates them before the device can refuse.
    """

    def __init__(self, error: BaseException, names: Mapping[int, tuple[str, str]]) -> None:
        self.inputs: list[Tensor] = []
        self.refused: set[int] = set()
        self.places: dict[int, Place] = {}
        running = set(_running())
        for frame, line in traceback.walk_tb(error.__traceback__):
            # A frame that is still running would keep the copy of its variables made here, and everything in it.
            if frame in running or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                continue
            variables = frame.f_locals
            self._look_at(frame, variables, line, names)
            if isinstance(variables, dict):  # before Python 3.13 a copy, which would outlive `let_go`
                variables.clear()

    def _look_at(
        self, frame: FrameType, variables: Mapping[str, Any], line: int, names: Mapping[int, tuple[str, str]]
    ) -> None:
        self.inputs += _tensors(_argument(frame, variables, *_MICRO_BATCH_OF))
        self.refused |= set(_argument(frame, variables, *_REFUSED_BY) or ())
        name = names.get(id(variables.get("self")))
        if name is None:
            return
        place = Place(*name, frame.f_code, line)
        for value in variables.values():
            for tensor in _tensors(value):
                self.places.setdefault(id(tensor), place)


def _argument(frame: FrameType, variables: Mapping[str, Any], function: Callable[..., Any], name: str) -> Any:
    """Return an argument's value if the frame belongs to the function, else None."""
    code: CodeType = function.__code__
    if name not in code.co_varnames[: code.co_argcount]:
        raise AssertionError(f"{function.__qualname__} has no argument {name!r}")
    return variables.get(name) if frame.f_code is code else None


def _running() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _owned(
    step: TrainingStep, names: Mapping[int, tuple[str, str]]
) -> Iterator[tuple[str, str, tuple[str, str] | None, Tensor]]:
    """Yield category, name, module and tensor for everything that the model and the optimizer own."""
    called: dict[nn.Parameter, tuple[str, tuple[str, str]]] = {}
    for part in itertools.chain.from_iterable(root.modules() for root in step.objective.modules):
        module = names.get(id(part))
        if module is None:
            continue
        prefix = "" if module[0].startswith("(model") else f"{module[0]}."
        for name, parameter in part.named_parameters(recurse=False):
            called.setdefault(parameter, (f"{prefix}{name}", module))
        for name, buffer in part.named_buffers(recurse=False):
            yield "buffers", f"{prefix}{name}", module, buffer
    for parameter, (name, module) in called.items():
        yield "parameters", name, module, parameter
        if parameter.grad is not None:
            yield "gradients", f"{name}.grad", module, parameter.grad
    for held, state in step.optimizer.state.items():
        name, owner = called.get(held, ("?", None))  # type: ignore[call-overload]
        for entry, value in state.items() if isinstance(state, dict) else ():
            for tensor in _tensors(value):
                yield "optimizer state", f"{name} {entry}", owner, tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, including those nested in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


def _maker(tensor: Tensor) -> Any:
    """Return the node of the operator that created a tensor's storage, as far as the graph shows it."""
    node = tensor.grad_fn
    while node is not None and _VIEWS.fullmatch(node.name()) and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return None if node is None or "AccumulateGrad" in node.name() else node


def _saved(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that a node has saved, except those packed by hooks."""
    for attribute in dir(type(node)):
        if not attribute.startswith(_RAW):
            continue
        try:
            saved = getattr(node, attribute)
        except RuntimeError:  # already freed by the backward pass
            continue
        for one in saved if isinstance(saved, list | tuple) else [saved]:
            if getattr(one, "unpack_hook", None) is None and isinstance(getattr(one, "data", None), Tensor):
                yield one.data
