"""Saves what forward passes may change, so that a window that fails can be made again from the same state.

Saved are buffers, random state, what torchmetrics' metrics have counted, and parameters that the model itself writes:
those of the modules, and of what a loss or a closure reaches. Small buffers are copied always; large ones, and
parameters, where windows with all checks have seen them move. All others are watched: one that has moved cannot be
restored.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autoaccum._data.random_state import RandomState
from autoaccum._engine.attribute_state import AttributeState
from autoaccum._engine.dtensor import is_spread
from autoaccum._loss.closures import used_by
from autoaccum._oom import is_oom, let_go

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_VERSION = attrgetter("_version")
_VALUES = methodcaller("values")
_NUMBERS = (bool, int, float, complex, str, type(None))
# Kernels like BatchNorm's write their statistics without changing the version counter, so small buffers are copied
# every time. Larger ones (masks, position tables) are seldom statistics.
_SMALL_ELEMENTS = 65_536
# Frozen parameters of so many bytes are copied before the first window, of more if they do not exceed the others.
_FEW_BYTES = 64 * 2**20
# Elements whose sum is taken at once on the CPU: their copies in double precision take 2 MiB.
_SUMMED_AT_ONCE = 2**18


class _Saved(NamedTuple):
    """A tensor with a copy; `key` stays the same where a module replaces its buffer."""

    key: Any
    tensor: Tensor
    copy: Tensor


class _Small(NamedTuple):
    """Small tensors of one type, which one operator copies into one tensor."""

    saved: list[_Saved]
    views: list[Tensor]  # of the tensors
    copy: Tensor


class Savepoint:
    """The state of all that forward passes may change, at one moment.

    Args:
        modules: The model, and losses that are modules.
        device: Its random generator is saved beside the CPU's.
        functions: Losses, closures and splits: modules, metrics and generators that they reach are saved as well.

    Attributes:
        random: The random generators.
        is_restored: Whether the last `restore` has ended: False if memory ran out in it. It can be called again.
    """

    random: RandomState
    is_restored = True

    def __init__(self, modules: Iterable[nn.Module], device: torch.device, functions: Iterable[Any] = ()) -> None:
        self._modules = list(modules)
        self._device = device
        self._functions = list(functions)
        self._moving: set[Any] = set()  # keys
        self._parent: Savepoint | None = None
        self._tables: list[dict[str, Tensor | None]] = []
        self._small: list[_Small] = []
        self._single: list[_Saved] = []
        self._attributes: AttributeState | None = None
        self._has_looked = False
        self._arranged: bool | None = None  # for which `copies_all`; None for neither
        self._host_moves = False

    def like_it(self) -> Savepoint:
        """Return another savepoint of the same, which knows what this one learns; its `restore` is no damage here."""
        made = Savepoint(self._modules, self._device, self._functions)
        made._moving, made._parent = self._moving, self
        return made

    def refresh(self) -> None:
        """Look for modules, buffers, metrics and generators; `take` does so at first, or where it is asked."""
        found = used_by(self._functions)
        modules = [*self._modules, *(value for value in found if isinstance(value, nn.Module))]
        parts = list({id(part): part for module in modules for part in module.modules()}.values())
        self.random = RandomState(self._device, modules, found)
        self._parts = parts
        self._metrics = [part for part in parts if is_metric(part)]
        self._counted: list[tuple[dict[str, Any], dict[str, Any]]] = []  # their attributes, and what these were
        self._tables = [part._buffers for part in parts]
        own = chain.from_iterable(part._parameters.values() for part in parts)
        there = (parameter for parameter in own if not (parameter is None or parameter.is_meta))
        self._parameters = list({id(parameter): parameter for parameter in there}.values())
        if any(map(is_spread, self._parameters)):  # `fully_shard` swaps them during a pass, which is not a change
            self._parameters = []
        self._has_looked, self._arranged = True, None

    def take(
        self,
        *,
        copies_all: bool = True,
        is_thorough: bool = False,
        with_host_random: bool = True,
        with_attributes: bool = False,
    ) -> None:
        """Save the current state.

        Args:
            copies_all: Whether to copy also what has not been seen to move, but for large tensors of whole numbers
                (quantised weights), and for frozen parameters if they are larger than the trained ones.
            is_thorough: Whether to look at all modules anew, and at the values of what is not copied, so that
                `learn_moved` and `damage` find what changes without a trace.
            with_host_random: Whether to save the random state of Python and NumPy also where it has not been seen to
                move.
            with_attributes: Whether to save also what modules keep as plain attributes, those of new modules too.
        """
        if is_thorough or with_attributes or not self._has_looked:
            self.refresh()
        self._attributes = AttributeState(self._named_parts()) if with_attributes else None
        self.random.take(of_host=with_host_random or is_thorough or self._host_moves)
        if self._metrics:
            self._counted = [(vars(metric), _counted_by(metric)) for metric in self._metrics]
        if self._arranged is not copies_all or not self._are_in_place():
            self._arrange(copies_all=copies_all)
        self._sums = None
        if self._small or self._single or is_thorough:
            with torch.no_grad():
                for small in self._small:
                    torch.cat(small.views, out=small.copy)
                for _, tensor, copy in self._single:
                    copy.copy_(tensor)
                if is_thorough:
                    self._sums = [_sum(tensor) for _, tensor in self._watched]
        self._versions = list(map(_VERSION, self._watched_tensors))
        self._addresses = list(map(self._address, self._watched_tensors))

    def restore(self, *, with_attributes: bool = True) -> None:
        """Restore the state; `damage` tells what could not be.

        Args:
            with_attributes: Whether also plain attributes, if they were saved.
        """
        self.is_restored = False
        if self._attributes is not None and with_attributes:
            self._attributes.put_back()
        with torch.no_grad():
            self._made = set()
            for table, kept in zip(self._tables, self._kept, strict=True):
                self._made |= {(id(table), name) for name in set(table.keys()).difference(kept)}
                if list(table.keys()) != list(kept):
                    table.clear()
                for name, tensor in kept.items():  # one by one, as the table of a scripted module takes them
                    table[name] = tensor
            writes = {key: _write(tensor, copy) for key, tensor, copy in self._copies()}
        if self._parent is not None and self._parent._arranged is not None:
            self._parent.expect(writes)
        for attributes, counted in self._counted:
            _put_back(attributes, counted)
        self.random.put_back()
        self.is_restored = True

    def expect(self, writes: Mapping[Any, int]) -> None:
        """Take these writes, by key (a parameter's id) how often a version counter moved, for no change."""
        now = zip(self._watched, self._versions, strict=True)
        self._versions = [version + writes.get(key, 0) for (key, _), version in now]

    def learn_moved(self) -> list[str]:
        """Learn what has moved since `take(is_thorough=True)`.

        Returns:
            The names of the buffers and parameters that have; without buffers that were empty, and so collect
            something that somebody else takes out.
        """
        moved = self._moved()
        empty = {key for key, _, copy in self._copies() if not copy.numel()}
        if self._arranged or not moved <= self._moving:
            self._arranged = None  # copies of what does not move are not needed any more
        self._moving |= moved
        self._host_moves = self._host_moves or self.random.host_has_moved()
        return self._names(moved - empty)

    def has_moved(self) -> bool:
        """Whether buffers, parameters or plain attributes have moved since `take(with_attributes=True)`."""
        return bool(self.moved_attributes() or self._moved())

    def moved_attributes(self) -> list[str]:
        """Return the names of plain attributes that have moved since `take(with_attributes=True)`."""
        return [] if self._attributes is None else self._attributes.moved()

    def forget(self) -> None:
        """Free the copies, until the next `take`."""
        self._small, self._single, self._arranged = [], [], None
        self.forget_attributes()

    def forget_attributes(self) -> None:
        """Release what modules kept as attributes, which may be whole graphs."""
        self._attributes = None

    def damage(self) -> list[str]:
        """Return the names of what cannot be restored, once all else is: what was not copied, or made meanwhile."""
        known, keys = set(map(id, self._tables)), set(self._made)
        try:
            with torch.no_grad():
                keys |= self._moved_of_watched()
        except Exception as error:
            if self._sums is None or not is_oom(error):
                raise
            let_go(error)
            self._sums = None  # sums need memory; counters, which do not see every write, need none
            keys |= self._moved_of_watched()
        for module in self._modules:
            for part in module.modules():
                if id(part._buffers) not in known:
                    keys |= {(id(part._buffers), name) for name in part._buffers}
        return self._names(keys)

    # --- what is copied, and what is watched --------------------------------------------------------------------------

    def _arrange(self, *, copies_all: bool) -> None:
        """Choose what to copy, and allocate the copies."""
        self._arranged = None
        self._small, self._single = [], []
        self._watched: list[tuple[Any, Tensor]] = []
        self._kept = [dict(table) for table in self._tables]
        self._filled = [table for table in self._tables if table]
        self._entries = sum(map(len, self._tables))
        self._in_tables = list(chain.from_iterable(map(_VALUES, self._filled)))
        small: dict[Any, list[tuple[Any, Tensor]]] = defaultdict(list)
        for table in self._tables:
            for name, tensor in table.items():
                if tensor is None or tensor.is_meta:
                    continue
                key = id(table), name
                if tensor.numel() > _SMALL_ELEMENTS or _is_sparse(tensor):
                    self._sort(key, tensor, copies=copies_all)
                elif _is_plain(tensor) and tensor.is_contiguous():
                    small[tensor.dtype, tensor.device].append((key, tensor))
                else:
                    self._single.append(_Saved(key, tensor, tensor.detach().clone()))
        for several in small.values():
            views = [tensor.detach().view(-1) for _, tensor in several]
            copy = torch.cat(views)
            parts = torch.split(copy, [view.numel() for view in views])
            saved = [
                _Saved(key, tensor, part.view(tensor.shape)) for (key, tensor), part in zip(several, parts, strict=True)
            ]
            self._small.append(_Small(saved, views, copy))
        self._small_tensors = [saved.tensor for small in self._small for saved in small.saved]
        self._sort_parameters(copies_all=copies_all)
        self._single_tensors = [saved.tensor for saved in self._single]
        self._small_at = self._now_at()
        self._watched_tensors = [tensor for _, tensor in self._watched]
        self._address = Tensor.data_ptr if all(map(_is_plain, self._watched_tensors)) else _address
        self._arranged = copies_all

    def _sort_parameters(self, *, copies_all: bool) -> None:
        frozen, trained = (
            sum(parameter.nbytes for parameter in self._parameters if parameter.requires_grad is is_trained)
            for is_trained in (False, True)
        )
        # A momentum encoder is as large as what it follows; the frozen base of an adapter may not fit twice.
        copies_all = copies_all and frozen <= max(trained, _FEW_BYTES)
        for parameter in self._parameters:
            if parameter._post_accumulate_grad_hooks:  # of an optimizer that steps there, whose state is not saved
                self._watched.append((id(parameter), parameter))
                continue
            self._sort(id(parameter), parameter, copies=copies_all and not parameter.requires_grad)

    def _sort(self, key: Any, tensor: Tensor, *, copies: bool) -> None:
        is_quantised = not (tensor.is_floating_point() or tensor.is_complex())
        if not _is_sparse(tensor) and (key in self._moving or (copies and not is_quantised)):
            self._single.append(_Saved(key, tensor, tensor.detach().clone()))
        elif not tensor.is_inference():  # whose writes are not counted
            self._watched.append((key, tensor))

    def _are_in_place(self) -> bool:
        """Whether the tables hold the tensors that copies were allocated for, as they were then."""
        if sum(map(len, self._tables)) != self._entries:
            return False  # also where a table was empty
        now = list(chain.from_iterable(map(_VALUES, self._filled)))
        are_same = len(now) == len(self._in_tables) and all(map(is_, now, self._in_tables))
        return are_same and self._now_at() == self._small_at

    def _now_at(self) -> list[int]:
        """Return what changes when a model resizes a buffer in place: addresses and numbers of elements."""
        at = list(map(Tensor.data_ptr, self._small_tensors))
        at += map(Tensor.numel, self._small_tensors)
        at += map(Tensor.numel, self._single_tensors)
        return at

    def _copies(self) -> Iterator[_Saved]:
        return chain(self._single, *(small.saved for small in self._small))

    def _moved(self) -> set[Any]:
        """Return the keys of buffers and parameters that have changed since `take`, or have been replaced."""
        with torch.no_grad():
            moved = {key for key, tensor, copy in self._copies() if not _are_same(tensor, copy)}
            moved |= self._moved_of_watched()
        for table, kept in zip(self._tables, self._kept, strict=True):
            held = dict(table)
            moved |= {(id(table), name) for name in {**kept, **held} if held.get(name) is not kept.get(name)}
        return moved

    def _moved_of_watched(self) -> set[Any]:
        """Return the keys of what is not copied and has changed: by its values, or else by versions and addresses."""
        now: Any
        if self._sums is not None:
            now = [_sum(tensor) for tensor in self._watched_tensors]
            are_moved = [not _are_same(one, other) for one, other in zip(now, self._sums, strict=True)]
        else:
            then = zip(self._versions, self._addresses, strict=True)
            now = zip(map(_VERSION, self._watched_tensors), map(self._address, self._watched_tensors), strict=True)
            are_moved = [one != other for one, other in zip(now, then, strict=True)]
        return {key for (key, _), is_moved in zip(self._watched, are_moved, strict=True) if is_moved}

    def _named_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules but metrics, which have a count of their own, with their names; none twice."""
        names: dict[int, str] = {}
        for module in reversed(self._modules):
            names |= {id(part): path for path, part in module.named_modules()}
        return ((names.get(id(part), type(part).__name__), part) for part in self._parts if not is_metric(part))

    def _names(self, keys: set[Any]) -> list[str]:
        names_in: dict[int, list[str]] = defaultdict(list)
        for key in keys:
            if isinstance(key, tuple):
                names_in[key[0]].append(key[1])
        found: dict[Any, str] = {}  # a shared one once
        for module in self._modules:
            for path, part in module.named_modules():
                names = names_in[id(part._buffers)]
                names += [name for name, parameter in part._parameters.items() if id(parameter) in keys]
                found |= {(id(part), name): f"{path}.{name}" if path else name for name in names}
        return list(found.values()) or ["a tensor that is none of the model's"] * bool(keys)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor is one that torch copies, but cannot compare."""
    return tensor.layout not in (torch.strided, torch.jagged)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if _is_plain(tensor) else id(tensor)


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values; NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if hasattr(one, "__tensor_flatten__"):  # what quantises weights need not tell whether they are equal
        return all(_are_same(getattr(one, name), getattr(other, name)) for name in one.__tensor_flatten__()[0])
    one, other = _readable(one), _readable(other)
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _readable(tensor: Tensor) -> Tensor:
    """Return a tensor that torch compares and sums: floating-point numbers of eight bits as the bytes that they are."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _write(tensor: Tensor, copy: Tensor) -> int:
    """Write a copy back; return how far the version counter moved."""
    before = 0 if tensor.is_inference() else tensor._version
    # A tensor made in inference mode can be written in that mode alone, which turns gradients on where it is off.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.shape != copy.shape:
            tensor.resize_(copy.shape)  # the model resized it in place
        if tensor.layout is torch.strided and 0 in tensor.stride():
            # All rows of an expanded tensor share memory, which torch refuses to write more than once.
            rows = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
            tensor[rows].copy_(copy[rows])
        else:
            tensor.copy_(copy)
    return 0 if tensor.is_inference() else tensor._version - before


def _sum(tensor: Tensor) -> Tensor:
    """Return two sums that cheaply show whether a tensor is unchanged, also by writes through `.data`.

    One is of all elements; gradients of a last layer add up to 0, so the other is of their squares, or of every third.
    """
    tensor = tensor.detach()
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return torch.stack([_sum(getattr(tensor, name)).double().cpu() for name in names]).sum(0)
    if tensor.layout is not torch.strided:
        return torch.tensor(float(tensor._version))
    tensor = _readable(tensor)
    if not tensor.is_floating_point():
        return torch.stack([tensor.sum(), tensor.flatten()[::3].sum()])
    # On the CPU, summing in another type first makes a copy in that type; MPS has no double precision.
    kind = torch.float32 if tensor.device.type == "mps" else torch.float64
    pieces = torch.split(tensor.flatten(), _SUMMED_AT_ONCE) if tensor.device.type == "cpu" else [tensor]
    sums = [torch.stack([piece.sum(dtype=kind), torch.linalg.vector_norm(piece, dtype=kind)]) for piece in pieces]
    return torch.stack(sums).sum(0)


# --- what torchmetrics' metrics have counted --------------------------------------------------------------------------


# Results that are replaced and never written to.
_RESULTS = ("_computed", "_forward_cache", "_cache")


def is_metric(module: object) -> bool:
    """Whether a module is a metric of torchmetrics."""
    return isinstance(module, nn.Module) and hasattr(module, "_defaults") and hasattr(module, "_update_count")


def _counted_by(metric: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return a metric's attributes, and copies of what updates write to."""
    kept: dict[str, tuple[Any, Any]] = {}
    for name, value in vars(metric).items():
        if name in metric._defaults:  # type: ignore[operator]
            kept[name] = value, value.detach().clone() if isinstance(value, Tensor) else list(value)
        elif name in _RESULTS or isinstance(value, _NUMBERS):
            kept[name] = value, None
    return kept


def _put_back(attributes: dict[str, Any], counted: dict[str, tuple[Any, Any]]) -> None:
    for name, (value, content) in counted.items():
        if isinstance(content, Tensor):
            _write(value, content)
        elif isinstance(content, list):
            value[:] = content
        attributes[name] = value
