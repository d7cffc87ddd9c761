"""Makes one optimizer step from complete gradients: entirely, or not at all, or reported as damage.

The transient memory of an optimizer step is measured once; later steps
reserve it first, and so fail before they write. For the measured step, and every step that creates optimizer state, a
copy of the parameters is kept in host memory.
"""

from __future__ import annotations

import copy
import math
import sys
from collections import deque
from contextlib import nullcontext
from itertools import chain, compress, repeat
from operator import attrgetter, is_not, itemgetter, or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_module
from torch.utils._python_dispatch import _get_current_dispatch_mode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from autoaccum._data.nesting import plain_parts
from autoaccum._engine.out_of_memory import Phase, Stage
from autoaccum._engine.tensor_values import is_plain
from autoaccum._memory._storages import Transients
from autoaccum._memory.available_devices import backend_for
from autoaccum._oom import clear_traceback_frames, first_line, is_oom
from autoaccum.errors import StateDamagedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    from autoaccum._memory.base import MemoryBackend


_VERSION, _GRADIENT = attrgetter("_version"), attrgetter("grad")
# Hooks on the steps of all optimizers.
_HOOKS_OF_ALL = optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks
# What an optimizer can keep numbers in, and change in place.
_CHANGEABLE = (list, dict, deque, set)
_CONTAINERS = (*_CHANGEABLE, tuple)


class OptimizerSteps:
    """Makes the steps of one optimizer: in one call, or in parts if several processes step together.

    Args:
        optimizer: The optimizer.
        scaler: Its gradient scaler, if any.
        memory: The device.
        clip_grad_norm: Maximum norm of the gradient over all parameters that the optimizer holds; None for no clipping.
            Other parameters are neither unscaled by the scaler nor counted in the norm.
        stage: Records the current phase.

    Attributes:
        has_new_gradients: Whether the last optimizer step had a gradient of a parameter that had none in any before.
        made: Number of optimizer steps made. It rises as soon as the optimizer has stepped, whatever fails after that:
            a window that has raised it must never be retried.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        memory: MemoryBackend,
        *,
        clip_grad_norm: float | None,
        stage: Stage,
    ) -> None:
        self._scaler = scaler
        self._memory = memory
        self.clip_grad_norm = clip_grad_norm
        self._stage = stage
        self._last: tuple[bool, ...] = ()  # which parameters have a gradient
        self._ever: tuple[bool, ...] = ()  # which have had one
        self.has_new_gradients = False
        self._undone: dict[int, int] = {}  # by ids of tensors: how far undone steps have moved their version counters
        self.made = 0
        self.use(optimizer)

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with another optimizer from now on; nothing is known about it yet."""
        self._optimizer = optimizer
        # Of measured steps, by which parameters had a gradient: how many have state (a step before which fewer have is
        # measured again), and the bytes that every step allocates and frees.
        self._needs: dict[tuple[bool, ...], tuple[int, int]] = {}
        self._is_unseen = False  # whether it may write without moving a version counter
        self._is_nested = False  # whether its state, or a group, holds what it can change in place
        self._copy: OptimizerCopy | None = None  # of what the next step writes, if that is to be measured
        self._first: list[tuple[int, int]] | None = None  # what its loops begin with: groups, and places in them

    def make(self) -> None:
        """Make one optimizer step from the accumulated gradients, which does not count; errors as for its parts."""
        made = self.made
        try:
            self.reserve()
            self.unscale_and_clip()
            self.commit()
        finally:
            self.drop_reservation()
            self.made = made

    def reserve(self, more: Sequence[nn.Parameter] = ()) -> None:
        """Ensure that the optimizer's step will have the memory it needs; a failure has touched nothing."""
        self._stage.phase = Phase.RESERVE
        self._copy = None
        groups = self._optimizer.param_groups
        held = groups[0]["params"] if len(groups) == 1 else self._held()
        key = tuple(map(is_not, map(_GRADIENT, held), repeat(None)))
        if more:
            coming = set(map(id, more))
            key = tuple(map(or_, key, [id(parameter) in coming for parameter in held]))
        self.has_new_gradients = False
        if key != self._last:
            self._first = None
            before = self._ever if len(self._ever) == len(key) else (False,) * len(key)
            self._ever, self._last = tuple(map(or_, key, before)), key
            self.has_new_gradients = self._ever != before
        states, transient_bytes = self._needs.get(key) or self._needs_of_parts(key)
        if len(self._optimizer.state) < states:
            self._copy = self._copied()
            if self._copy is None:
                self._needs[key] = 0, 0
        elif transient_bytes:
            self._memory.reserve(transient_bytes)

    def _needs_of_parts(self, key: tuple[bool, ...]) -> tuple[float, int]:
        """Return what a step needs at most whose parameters were all in measured ones, as where layers are dropped."""
        measured = {had: need for had, need in self._needs.items() if len(had) == len(key)}
        if not measured or not all(map(any, compress(zip(*measured, strict=True), key))):
            return math.inf, 0
        states, sizes = zip(*measured.values(), strict=True)
        wider = [size for had, (_, size) in measured.items() if all(compress(had, key))]
        return max(states), min(wider, default=sum(sizes))

    def drop_reservation(self) -> None:
        """Release the preparations for a step."""
        self._copy = None

    def take_undone(self) -> dict[int, int]:
        """Return once by id of each tensor how far the version counters have moved in a step that was undone."""
        undone, self._undone = self._undone, {}
        return undone

    def unscale_and_clip(self, correction: float | Tensor = 1.0) -> Tensor | None:
        """Multiply the gradients by a correction, unscale and clip them if asked to; return their norm."""
        if not isinstance(correction, float) or correction != 1.0:
            self._stage.phase = Phase.UNSCALE
            if gradients := self._gradients():
                torch._foreach_mul_(gradients, correction)
        if self.clip_grad_norm is None:
            return None
        norm = self.norm()
        self.clip(norm)
        return norm

    def norm(self) -> Tensor:
        """Unscale the gradients and return their norm before clipping, on the device."""
        if self._scaler is not None:
            self._stage.phase = Phase.UNSCALE
            self._scaler.unscale_(self._optimizer)
        self._stage.phase = Phase.CLIP
        return nn.utils.get_total_norm(self._gradients()).detach()

    def clip(self, norm: Tensor) -> None:
        """Clip the gradients, given their norm."""
        assert self.clip_grad_norm is not None
        if self.clip_grad_norm == math.inf:
            return  # it is only measured; the factor of 1 would cost as much again, and be NaN for an infinite norm
        self._stage.phase = Phase.CLIP
        nn.utils.clip_grads_with_norm_(self._held(), self.clip_grad_norm, norm)

    def commit(self) -> bool:
        """Step the optimizer; return whether the scaler skipped it.

        Raises:
            StateDamagedError: The optimizer, or a hook on its step, failed after it had begun to write. After any other
                error everything is as it was before.
        """
        self._stage.phase = Phase.OPTIMIZER
        copy, watch = self._copy, None if self._copy is None else Transients(self._memory.device.type)
        before: Any = copy or self._watched()
        coming = self.made + 1  # nothing is created after the step: there is no way back
        try:
            with nullcontext() if watch is None else uncompiled(self._optimizer), watch or nullcontext():
                is_skipped = self._step()
        except BaseException as error:
            if not before.undo():
                remedy = ", and leave more room (smaller micro-batches, or foreach=False in the optimizer)"
                raise StateDamagedError(
                    "the optimizer, or a hook on its step, failed after it had begun to write, so the parameters are "
                    f"part old, part new ({first_line(error)}); load a checkpoint{remedy if is_oom(error) else ''}"
                ) from error
            self._undone = {} if copy is None else copy.writes()
            raise
        self.made, self._copy, self._undone = coming, None, {}
        if copy is not None and watch is not None and not is_skipped:
            self._learn(copy, watch)
        return is_skipped

    def _watched(self) -> _Begun | _Written:
        """Return what shows after a step that failed whether it had begun to write."""
        optimizer = self._optimizer
        if not (self._is_nested or self._is_unseen) and _writes_in_order(optimizer) and all(optimizer.state.values()):
            if self._first is None:
                self._first = _beginnings(optimizer)
            begun = _Begun(optimizer, [optimizer.param_groups[group]["params"][place] for group, place in self._first])
            if begun.is_seen:
                return begun
        return _Written(optimizer, is_unseen=self._is_unseen, is_nested=self._is_nested)

    def _learn(self, copy: OptimizerCopy, watch: Transients) -> None:
        """Learn from a measured step what later ones need, and how they write."""
        optimizer = self._optimizer
        values = chain.from_iterable(state.values() for state in optimizer.state.values())
        try:
            self._needs[self._last] = len(optimizer.state), watch.transient_bytes()
            self._is_nested = any(isinstance(value, _CONTAINERS) for value in values) or any(
                isinstance(value, (Tensor, *_CHANGEABLE))
                for group in optimizer.param_groups
                for name, value in group.items()
                if name != "params"
            )
            # The step was measured by a dispatch mode, under which kernels over lists move no counters.
            if not any(group.get("fused") or _uses_lists(group) for group in optimizer.param_groups):
                self._is_unseen |= copy.was_written_unseen()
        except (RuntimeError, TypeError, MemoryError) as error:  # the step is done, so nothing may fail any more
            clear_traceback_frames(error)
            self._is_unseen = True

    def _held(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._held() if parameter.grad is not None]

    def _copied(self) -> OptimizerCopy | None:
        """Copy what the optimizer will write to host memory; None if only host memory is short."""
        try:
            with self._memory.elsewhere():
                return OptimizerCopy(self._optimizer, self._scaler)
        except Exception as error:
            # Lack of host memory says nothing about a step on another device: version counters have to suffice then.
            if self._memory.device.type == "cpu" or not is_oom(error):
                raise
        return None

    def _step(self) -> bool:
        """Step the optimizer; return whether the scaler skipped it."""
        optimizer, scaler = self._optimizer, self._scaler
        if scaler is None:
            optimizer.step()
            return False
        # A fused optimizer is always called and skips inside its kernel; only the lowered scale shows it.
        scale = scaler.get_scale() if getattr(optimizer, "_step_supports_amp_scaling", False) else None
        stepped: list[bool] = []
        # Not by register_step_post_hook, which moves torch's count of hooks, by which new ones are noticed.
        hooks, key = optimizer._optimizer_step_post_hooks, id(stepped)
        hooks[key] = lambda *_: stepped.append(True)
        try:
            scaler.step(optimizer)
        finally:
            hooks.pop(key, None)
            # What a step that failed has left here of the scale, the next one would multiply its own by.
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)
        scaler.update()
        return not stepped if scale is None else scaler.get_scale() < scale


def uncompiled(optimizer: torch.optim.Optimizer) -> AbstractContextManager[object]:
    """Return a context in which a step runs as it is written: the compiler refuses the mode that measures it.

    torch's own optimizers need none where nothing was compiled yet, and importing the compiler takes seconds.
    """
    parts = getattr(optimizer, "parts", None) or [optimizer]
    are_torchs = all(type(part).__module__.startswith("torch.optim") for part in parts)
    if are_torchs and "torch._dynamo" not in sys.modules:
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


class OptimizerCopy:
    """Copies in host memory of what an optimizer step writes: parameters, state, settings and the scaler's scale.

    Raises:
        torch.OutOfMemoryError: The host has no memory for all of them, so none is made.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._scaler_state = None if scaler is None else scaler.state_dict()
        self._holders = list(optimizer.state)
        leaves, self._form = tree_flatten((list(optimizer.state.values()), optimizer.param_groups))
        self._leaves = list(map(own_container, leaves))
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        # The kernel ends a process that writes more than the machine has.
        backend_for(torch.device("cpu")).ensure(sum(map(_own_bytes, tensors)))
        self._copies = [(tensor, tensor._version, aside(tensor)) for tensor in tensors]

    def undo(self) -> bool:
        """Restore the state at the time of the copy; tensors keep their identity."""
        with torch.no_grad():
            for tensor, _, value in self._copies:
                tensor.copy_(value)
        state, groups = tree_unflatten(self._leaves, self._form)
        restore(self._optimizer, zip(self._holders, state, strict=True), groups)
        if self._scaler is not None and self._scaler_state is not None:
            self._scaler.load_state_dict(self._scaler_state)
        return True

    def writes(self) -> dict[int, int]:
        """Return by id of each tensor how far its version counter has moved since the copy."""
        return {id(tensor): tensor._version - version for tensor, version, _ in self._copies}

    def was_written_unseen(self) -> bool:
        """Whether a parameter has changed without its version counter, as by `parameter.data.add_(...)`."""
        return any(
            tensor.requires_grad and tensor._version == version and not torch.equal(tensor.detach().cpu(), value)
            for tensor, version, value in self._copies
        )


def own_container(leaf: Any) -> Any:
    """Return a copy of a container that PyTorch's trees do not look into (a Counter, a set); anything else as it is."""
    return copy.copy(leaf) if isinstance(leaf, dict | list | set) else leaf


def restore(
    optimizer: torch.optim.Optimizer, state: Iterable[tuple[Tensor, Any]], groups: list[dict[str, Any]]
) -> None:
    """Give an optimizer this state and these settings, in the objects that it has for them."""
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.clear()
        group.update(settings)


def _writes_in_order(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is nothing but a loop of torch's own: over parameters, or over lists of one device and type."""
    if any(_HOOKS_OF_ALL):
        return False
    for one in [optimizer, *getattr(optimizer, "parts", ())]:  # of a list of optimizers
        step = vars(one).get("step")  # as schedulers wrap it
        if one._optimizer_step_pre_hooks or one._optimizer_step_post_hooks:
            return False
        if step is not None and getattr(step, "__wrapped__", None) is not type(one).step:
            return False
        if not type(one).__module__.startswith(("torch.optim.", "autoaccum.")):
            return False
    return True


def _beginnings(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Return the first parameter with a gradient in each group, of each device and type: its group, its place there."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        places = reversed([place for place, one in enumerate(group["params"]) if one.grad is not None])
        first = {(group["params"][place].device, group["params"][place].dtype): place for place in places}
        found += [(number, place) for place in first.values()]
    return found


class _Begun:
    """What a step of torch's own optimizers writes before all else: the first parameter of each loop, and its state.

    Before that it may make state, and change settings.

    Attributes:
        is_seen: Whether all of that is tensors, whose version counters move.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, first: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._settings, self._holders = list(map(dict, optimizer.param_groups)), len(optimizer.state)
        states = [optimizer.state[one].values() for one in first if one in optimizer.state]
        self._tensors = [*first, *chain.from_iterable(states)]
        self.is_seen = all(isinstance(one, Tensor) for one in self._tensors)
        self._versions = _read_versions(self._tensors)

    def undo(self) -> bool:
        """Remove newly created state and restore settings; return whether everything is as it was."""
        optimizer = self._optimizer
        if any(map(_moves_no_counters, optimizer.param_groups)) or _read_versions(self._tensors) != self._versions:
            return False
        kept = list(optimizer.state.items())[: self._holders]
        restore(optimizer, kept, self._settings)
        return True


class _Written:
    """The optimizer's state before its step, to determine afterwards whether it has begun to write.

    Relies on tensors' version counters. Fused kernels do not increment them, nor do kernels over lists of tensors
    (foreach) while a dispatch mode is active, so nothing can be proven for those, nor for an optimizer that writes
    through `.data` (`is_unseen`). State that `is_nested` has containers in it, or a group tensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, is_unseen: bool, is_nested: bool) -> None:
        self._optimizer = optimizer
        self._is_unseen = is_unseen
        # Step counters may be kept there.
        self._settings = list(map(dict, optimizer.param_groups))
        self._holders, self._entries = list(optimizer.state), list(map(dict, optimizer.state.values()))
        self._tensors = list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))
        if is_nested:
            self._entries = tree_map(own_container, self._entries)  # containers of their own
            for group in self._settings:
                group.update({name: tree_map(own_container, one) for name, one in group.items() if name != "params"})
            self._tensors += tree_leaves([self._entries, self._settings])
        else:
            self._tensors += chain.from_iterable(map(dict.values, self._entries))
        self._versions = _read_versions(self._tensors)

    def undo(self) -> bool:
        """Remove newly created state and restore settings; return whether everything is as it was."""
        if self._is_unseen or any(map(_moves_no_counters, self._optimizer.param_groups)):
            return False
        if _read_versions(self._tensors) != self._versions:
            return False
        restore(self._optimizer, zip(self._holders, self._entries, strict=True), self._settings)
        return True


def _read_versions(values: list[Any]) -> list[int]:
    try:
        return list(map(_VERSION, values))
    except AttributeError:  # some are numbers
        return [getattr(value, "_version", 0) for value in values]


def _moves_no_counters(group: dict[str, Any]) -> bool:
    return bool(group.get("fused")) or (_get_current_dispatch_mode() is not None and _uses_lists(group))


def _uses_lists(group: dict[str, Any]) -> bool:
    foreach = group.get("foreach", False)
    if foreach is None:  # the optimizer chooses: loops on the CPU, lists on a GPU
        return any(parameter.device.type != "cpu" for parameter in group["params"])
    return bool(foreach)


def _own_bytes(tensor: Tensor) -> int:
    """Return the bytes that this process holds of a tensor: none of a fake one, whose copy is fake."""
    return sum(part.nbytes for part in plain_parts(getattr(tensor, "_local_tensor", tensor)) if is_plain(part))


def aside(tensor: Tensor) -> Tensor:
    if is_traceable_wrapper_subclass(tensor) and not hasattr(tensor, "device_mesh"):  # but for DTensor
        # `to` of some, such as torchao's states of 8 bits, shares memory where the device stays the same.
        names, context = tensor.__tensor_flatten__()
        inner = {name: aside(getattr(tensor, name)) for name in names}
        made: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
        return made
    return tensor.detach().to("cpu", copy=True)
