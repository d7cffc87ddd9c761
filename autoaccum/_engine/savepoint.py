"""Saves what forward passes may change, so that a window that fails can be made again from the same state.

Saved are buffers, random state, what torchmetrics' metrics have counted, and parameters that the model itself writes:
those of the modules, and of what a loss or a closure reaches. Small buffers are copied always. In the first window of a
structure large buffers and frozen parameters are copied too, but for quantised weights and a frozen base larger than
what is trained; later only those seen to move. All others are watched: one that has moved cannot be restored.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from autoaccum._data.random_state import RandomState, host_has_moved
from autoaccum._engine.attribute_state import AttributeState
from autoaccum._engine.dtensor import is_spread
from autoaccum._engine.metric_counts import counted_by, is_metric, restore
from autoaccum._engine.tensor_values import address_of, are_same, is_plain, is_sparse, sum_of, write
from autoaccum._loss.closures import used_by
from autoaccum._oom import clear_traceback_frames, is_oom

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_VERSION = attrgetter("_version")
_VALUES = methodcaller("values")
# Kernels like BatchNorm's write their statistics without changing the version counter, so small buffers are copied
# every time. Larger ones (masks, position tables) are seldom statistics.
_SMALL_ELEMENTS = 65_536
# Frozen parameters, and large buffers of whole numbers, of so many bytes are copied before the first window, of more if
# they do not exceed what is trained.
_FEW_BYTES = 64 * 2**20


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
    """Saves all that forward passes of modules and functions may change, and knows what has been seen to move.

    Args:
        modules: The model, and losses that are modules.
        device: Its random generator is saved beside the CPU's.
        functions: Losses, closures and splits: modules, metrics and generators that they reach are saved as well.

    Attributes:
        moving: The keys of tensors that have moved: of a buffer its table's id and its name, of a parameter its id.
        host_moves: Whether Python's or NumPy's random generator has moved.
        writes: By key, how often version counters moved as states were restored, which is no change.
        unrestored: The state in whose `restore` memory ran out, which can be called again; None if there is none.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device, functions: Iterable[Any] = ()) -> None:
        self.modules = list(modules)
        self.device = device
        self.functions = list(functions)
        self.moving: set[Any] = set()
        self.host_moves = False
        self.writes: Mapping[Any, int] = {}
        self.unrestored: SavedState | None = None

    def save(
        self,
        again: SavedState | None = None,
        *,
        copies_all: bool = True,
        is_thorough: bool = False,
        with_host_random: bool = True,
        with_attributes: bool = False,
    ) -> SavedState:
        """Return the current state.

        Args:
            again: An earlier state that is not needed any more, whose memory this one takes over. Modules that have
                come since are seen where all is looked at anew.
            copies_all: Whether to copy also what has not been seen to move, but for frozen parameters of whole numbers
                (quantised weights); and for large buffers of whole numbers, and frozen parameters, if they are larger
                than the trained ones.
            is_thorough: Whether to look at all modules anew, and at the values of what is not copied, so that
                `learn_moved` and `damage` find what changes without a trace.
            with_host_random: Whether to save the random state of Python and NumPy also where it has not been seen to
                move.
            with_attributes: Whether to look at all modules anew, and save what they keep as plain attributes.
        """
        self.unrestored = None  # of an earlier pass, which an interrupt has ended
        state = SavedState(self) if again is None else again
        if again is None or is_thorough or with_attributes:
            state.look()
        state.capture(
            copies_all=copies_all,
            is_thorough=is_thorough,
            of_host=with_host_random or is_thorough or self.host_moves,
            with_attributes=with_attributes,
        )
        return state

    def wrote(self, writes: Mapping[Any, int]) -> None:
        """Take these writes, by key how often a version counter moved, for no change."""
        self.writes = {**self.writes, **{key: self.writes.get(key, 0) + times for key, times in writes.items()}}


class SavedState:
    """What a `Savepoint` has saved.

    Attributes:
        random: The random generators.
    """

    random: RandomState
    _random_states: tuple[Any, ...]
    _attributes: AttributeState | None

    def __init__(self, savepoint: Savepoint) -> None:
        self._savepoint = savepoint
        self._small: list[_Small] = []
        self._single: list[_Saved] = []
        self._arranged: tuple[bool, int] | None = None  # for which `copies_all`, and how many that move

    def look(self) -> None:
        """Look for modules, buffers, metrics and generators."""
        found = used_by(self._savepoint.functions)
        modules = [*self._savepoint.modules, *(value for value in found if isinstance(value, nn.Module))]
        self._parts = list({id(part): part for module in modules for part in module.modules()}.values())
        self.random = RandomState(self._savepoint.device, modules, found)
        self._metrics = [part for part in self._parts if is_metric(part)]
        self._tables = [part._buffers for part in self._parts]
        own = chain.from_iterable(part._parameters.values() for part in self._parts)
        there = (parameter for parameter in own if not (parameter is None or parameter.is_meta))
        self._parameters = list({id(parameter): parameter for parameter in there}.values())
        if any(map(is_spread, self._parameters)):  # `fully_shard` swaps them during a pass, which is not a change
            self._parameters = []
        self._arranged = None

    def capture(self, *, copies_all: bool, is_thorough: bool, of_host: bool, with_attributes: bool) -> None:
        """Save the current state of what `look` has found; arguments as for `Savepoint.save`."""
        self._attributes = AttributeState(self._named_parts()) if with_attributes else None
        self._random_states = self.random.capture(of_host=of_host)
        # Of each metric its attributes, and what these were.
        self._counted = [(vars(metric), counted_by(metric)) for metric in self._metrics] if self._metrics else []
        arrangement = copies_all, len(self._savepoint.moving)
        if self._arranged != arrangement or not self._are_in_place():
            self._arrange(copies_all=copies_all)
            self._arranged = arrangement
        self._sums = None
        if self._small or self._single or is_thorough:
            with torch.no_grad():
                for small in self._small:
                    torch.cat(small.views, out=small.copy)
                for _, tensor, copy in self._single:
                    copy.copy_(tensor)
                if is_thorough:
                    self._sums = [sum_of(tensor) for _, tensor in self._watched]
        self._versions = list(map(_VERSION, self._watched_tensors))
        self._addresses = list(map(self._address, self._watched_tensors))
        self._writes = self._savepoint.writes

    def restore(self, *, with_attributes: bool = True) -> None:
        """Restore the state, and plain attributes that were saved if asked to; `damage` tells what could not be."""
        self._savepoint.unrestored = self
        if self._attributes is not None and with_attributes:
            self._attributes.restore()
        with torch.no_grad():
            self._made = set()
            for table, kept in zip(self._tables, self._kept, strict=True):
                self._made |= {(id(table), name) for name in set(table.keys()).difference(kept)}
                if list(table.keys()) != list(kept):
                    table.clear()
                for name, tensor in kept.items():  # one by one, as the table of a scripted module takes them
                    table[name] = tensor
            self._savepoint.wrote({key: write(tensor, copy) for key, tensor, copy in self._copies()})
        for attributes, counted in self._counted:
            restore(attributes, counted)
        self.random.restore(self._random_states)
        self._savepoint.unrestored = None

    def learn_moved(self) -> list[str]:
        """Let the savepoint learn what has moved since `save`; what is not copied shows it by version counters alone.

        After a thorough `save` its values show it too.

        Returns:
            The names of the buffers and parameters that have; without buffers that were empty, and so collect
            something that somebody else takes out.
        """
        moved = self._moved()
        empty = {key for key, _, copy in self._copies() if not copy.numel()}
        self._savepoint.moving |= moved
        self._savepoint.host_moves |= host_has_moved(self._random_states)
        return self._names(moved - empty)

    def has_moved(self) -> bool:
        """Whether buffers, parameters or plain attributes have moved since a `save` with attributes."""
        return bool(self.moved_attributes() or self._moved())

    def moved_attributes(self) -> list[str]:
        """Return the names of plain attributes that have moved since a `save` with attributes."""
        return [] if self._attributes is None else self._attributes.moved()

    def damage(self) -> list[str]:
        """Return the names of what cannot be restored, once all else is: what was not copied, or made meanwhile."""
        known, keys = set(map(id, self._tables)), set(self._made)
        try:
            with torch.no_grad():
                keys |= self._moved_of_watched()
        except Exception as error:
            if self._sums is None or not is_oom(error):
                raise
            clear_traceback_frames(error)
            self._sums = None  # sums need memory; counters, which do not see every write, need none
            keys |= self._moved_of_watched()
        for module in self._savepoint.modules:
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
        large: list[tuple[Any, Tensor]] = []
        small: dict[Any, list[tuple[Any, Tensor]]] = defaultdict(list)
        for table in self._tables:
            for name, tensor in table.items():
                if tensor is None or tensor.is_meta:
                    continue
                key = id(table), name
                if tensor.numel() > _SMALL_ELEMENTS or is_sparse(tensor):
                    large.append((key, tensor))
                elif is_plain(tensor) and tensor.is_contiguous():
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
        self._sort_large(large, copies_all=copies_all)
        self._single_tensors = [saved.tensor for saved in self._single]
        self._small_at = self._now_at()
        self._watched_tensors = [tensor for _, tensor in self._watched]
        self._address = Tensor.data_ptr if all(map(is_plain, self._watched_tensors)) else address_of

    def _sort_large(self, buffers: list[tuple[Any, Tensor]], *, copies_all: bool) -> None:
        frozen, trained = (
            sum(parameter.nbytes for parameter in self._parameters if parameter.requires_grad is is_trained)
            for is_trained in (False, True)
        )
        few = max(trained, _FEW_BYTES)
        # A queue or a count may be of whole numbers; weights that are may not fit twice.
        whole = sum(tensor.nbytes for _, tensor in buffers if _is_whole(tensor))
        for key, tensor in buffers:
            self._sort(key, tensor, copies=copies_all and (whole <= few or not _is_whole(tensor)))
        # A momentum encoder is as large as what it follows; the frozen base of an adapter may not fit twice.
        copies_all = copies_all and frozen <= few
        for parameter in self._parameters:
            if parameter._post_accumulate_grad_hooks:  # of an optimizer that steps there, whose state is not saved
                self._watched.append((id(parameter), parameter))
                continue
            is_frozen = not (parameter.requires_grad or _is_whole(parameter))
            self._sort(id(parameter), parameter, copies=copies_all and is_frozen)

    def _sort(self, key: Any, tensor: Tensor, *, copies: bool) -> None:
        if not is_sparse(tensor) and (key in self._savepoint.moving or copies):
            self._single.append(_Saved(key, tensor, tensor.detach().clone()))
        elif not tensor.is_inference():  # whose writes are not counted
            self._watched.append((key, tensor))

    def _are_in_place(self) -> bool:
        """Whether the tables hold the tensors that copies were allocated for, as they were then."""
        if sum(map(len, self._tables)) != self._entries:
            return False  # also where a table was empty
        now = list(chain.from_iterable(map(_VALUES, self._filled)))
        is_same = len(now) == len(self._in_tables) and all(map(is_, now, self._in_tables))
        return is_same and self._now_at() == self._small_at

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
            moved = {key for key, tensor, copy in self._copies() if not are_same(tensor, copy)}
            moved |= self._moved_of_watched()
        for table, kept in zip(self._tables, self._kept, strict=True):
            held = dict(table)
            moved |= {(id(table), name) for name in {**kept, **held} if held.get(name) is not kept.get(name)}
        return moved

    def _moved_of_watched(self) -> set[Any]:
        """Return the keys of what is not copied and has changed: by its values, or else by versions and addresses."""
        now: Any
        if self._sums is not None:
            now = [sum_of(tensor) for tensor in self._watched_tensors]
            are_moved = [not are_same(one, other) for one, other in zip(now, self._sums, strict=True)]
        else:
            then = zip(self._versions, self._addresses, strict=True)
            now = zip(self._versions_now(), map(self._address, self._watched_tensors), strict=True)
            are_moved = [one != other for one, other in zip(now, then, strict=True)]
        return {key for (key, _), is_moved in zip(self._watched, are_moved, strict=True) if is_moved}

    def _versions_now(self) -> Iterator[int]:
        """Yield the versions of what is not copied, without the writes of states that were restored since `take`."""
        then, now = self._writes, self._savepoint.writes
        return (tensor._version - now.get(key, 0) + then.get(key, 0) for key, tensor in self._watched)

    def _named_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules but metrics, which have a count of their own, with their names; none twice."""
        names: dict[int, str] = {}
        for module in reversed(self._savepoint.modules):
            names |= {id(part): path for path, part in module.named_modules()}
        return ((names.get(id(part), type(part).__name__), part) for part in self._parts if not is_metric(part))

    def _names(self, keys: set[Any]) -> list[str]:
        names_in: dict[int, list[str]] = defaultdict(list)
        for key in keys:
            if isinstance(key, tuple):
                names_in[key[0]].append(key[1])
        found: dict[Any, str] = {}  # a shared one once
        for module in self._savepoint.modules:
            for path, part in module.named_modules():
                names = names_in[id(part._buffers)]
                names += [name for name, parameter in part._parameters.items() if id(parameter) in keys]
                found |= {(id(part), name): f"{path}.{name}" if path else name for name in names}
        return list(found.values()) or ["a tensor that is none of the model's"] * bool(keys)


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is one of whole numbers."""
    return not (is_sparse(tensor) or tensor.is_floating_point() or tensor.is_complex())
