"""Makes one optimizer update from complete gradients: entirely, or not at all, or reported as damage.

Catches only what the optimizer itself raises. The transient memory of an optimizer step is measured once; later steps
reserve it first, and so fail before they write. For the measured step, and every step that creates optimizer state, a
copy of the parameters is kept in host memory.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
from torch.utils._python_dispatch import _get_current_dispatch_mode

from autoaccum._engine.optimizer_copy import OptimizerCopy
from autoaccum._engine.phases import Phase, Stage
from autoaccum._memory._storages import Transients
from autoaccum._oom import first_line, is_oom, let_go
from autoaccum.errors import StateDamagedError, UpdateCompleteError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from autoaccum._engine.bf16_weights import Bf16Weights
    from autoaccum._memory.base import MemoryBackend


_GRADIENT, _VERSION = attrgetter("grad"), attrgetter("_version")
# What a scaler gives a fused optimizer for the length of a step.
_GIVEN_BY_SCALER = ("grad_scale", "found_inf")


@dataclass(frozen=True, slots=True)
class Update:
    """The outcome of an update.

    Attributes:
        grad_norm: Norm of the gradient before clipping, on the device; None if it was not clipped.
        skipped: Whether the scaler skipped the update.
    """

    grad_norm: Tensor | None
    skipped: bool


@dataclass(frozen=True, slots=True)
class _Need:
    """The measured memory needs of an optimizer step.

    Attributes:
        states: How many parameters have state after it; a step before which fewer have is measured again.
        transient_bytes: Bytes that every step allocates and frees.
    """

    states: int
    transient_bytes: int


@dataclass(frozen=True, slots=True)
class _Ready:
    """Preparations for the next optimizer step.

    Attributes:
        key: Which parameters have a gradient, if the step is to be measured; None if it is not.
        copy: Copy of what the optimizer will write; None if version counters have to show what was written.
    """

    key: tuple[bool, ...] | None = None
    copy: OptimizerCopy | None = None


_READY = _Ready()


class Updates:
    """Makes updates with one optimizer: in one call, or in three parts if several processes update together.

    Args:
        optimizer: The optimizer.
        scaler: Its gradient scaler, if any.
        memory: The device.
        clip_grad_norm: Maximum norm of the gradient over all parameters that the optimizer holds; None for no clipping.
            Other parameters are neither unscaled by the scaler nor counted in the norm.
        stage: Records the current phase.

    Attributes:
        weights: Keeps weights in bf16; None if they are left as they are.
        has_other_gradients: Whether the last update had gradients of other parameters than the one before.
        made: Number of updates made. It rises as soon as the optimizer has stepped, whatever fails after that: a window
            that has raised it must never be retried.
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
        self._optimizer = optimizer
        self._scaler = scaler
        self._memory = memory
        self._clip_grad_norm = clip_grad_norm
        self._stage = stage
        self._needs: dict[tuple[bool, ...], _Need] = {}  # by which parameters have a gradient
        self._last: tuple[bool, ...] = ()
        self._is_unseen = False  # whether it was seen to write without version counters
        self._is_nested = False  # whether its state holds lists and the like, which it can change in place
        self.has_other_gradients = False
        self._ready: _Ready | None = None
        self.weights: Bf16Weights | None = None
        self.made = 0

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with another optimizer from now on; nothing is known about it yet."""
        if self.weights is not None:
            self.weights.begin(optimizer)
        self._optimizer = optimizer
        self._needs, self._ready = {}, None
        self._is_unseen = self._is_nested = False

    def make(self, correction: float | Tensor = 1.0) -> Update:
        """Make one update from the accumulated gradients.

        A failure in the phase "reserve" has touched nothing, not even the gradients: the update can be retried.

        Args:
            correction: Factor for the gradients, applied first.

        Raises:
            StateDamagedError: The optimizer failed after it had begun to write.
            UpdateCompleteError: The optimizer has stepped, and a user's hook on it failed.
        """
        try:
            self.reserve()
            return self.commit(self.unscale_and_clip(correction))
        finally:
            self._ready = None

    def reserve(self, more: Sequence[nn.Parameter] = ()) -> None:
        """Ensure that the optimizer's step will have the memory it needs, without touching anything.

        Args:
            more: Parameters that will have a gradient, beside those that have one now.
        """
        self._stage.phase = Phase.RESERVE
        self._ready = None
        groups = self._optimizer.param_groups
        held = groups[0]["params"] if len(groups) == 1 else self._held()
        if more:
            coming = set(map(id, more))
            key = tuple([parameter.grad is not None or id(parameter) in coming for parameter in held])
        else:
            key = tuple([gradient is not None for gradient in map(_GRADIENT, held)])
        self.has_other_gradients = key != self._last
        self._last = key
        need = self._needs.get(key)
        if need is not None and self._count_states() >= need.states:
            if need.transient_bytes:
                self._memory.reserve(need.transient_bytes)
            self._ready = _READY
        else:
            self._ready = _Ready(key, self._copy())

    def unscale_and_clip(self, correction: float | Tensor = 1.0) -> Tensor | None:
        """Bring the gradients into the form that the optimizer needs.

        Args:
            correction: Factor for the gradients, applied first.

        Returns:
            Their norm before clipping, on the device; None if they are not clipped.
        """
        if not isinstance(correction, float) or correction != 1.0:
            self._stage.phase = Phase.UNSCALE
            if gradients := self._gradients():
                torch._foreach_mul_(gradients, correction)
        if self._clip_grad_norm is None:
            return None
        norm = self.norm()
        if norm is not None:
            self.clip(norm)
        return norm

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self._clip_grad_norm is not None

    def norm(self) -> Tensor | None:
        """Unscale the gradients and return their norm, on the device; None if they are not to be clipped."""
        if self._clip_grad_norm is None:
            return None
        if self._scaler is not None:
            self._stage.phase = Phase.UNSCALE
            self._scaler.unscale_(self._optimizer)
        self._stage.phase = Phase.CLIP
        return nn.utils.get_total_norm(self._gradients()).detach()

    def clip(self, norm: Tensor) -> None:
        """Clip the gradients, given their norm."""
        assert self._clip_grad_norm is not None
        if self._clip_grad_norm == math.inf:
            return  # it is only measured; the factor of 1 would cost as much again, and be NaN for an infinite norm
        self._stage.phase = Phase.CLIP
        nn.utils.clip_grads_with_norm_(self._held(), self._clip_grad_norm, norm)

    def commit(self, norm: Tensor | None) -> Update:
        """Step the optimizer; if it fails without having written, this can be retried.

        Args:
            norm: What `unscale_and_clip` returned.

        Raises:
            StateDamagedError: The optimizer failed after it had begun to write.
            UpdateCompleteError: The optimizer has stepped, and a user's hook on it failed; this must not be retried.
        """
        assert self._ready is not None
        self._stage.phase = Phase.OPTIMIZER
        ready = self._ready
        watch = None if ready.key is None else Transients(self._memory.device.type)
        written: Any = ready.copy
        if written is None:
            written = _Written(self._optimizer, is_unseen=self._is_unseen, is_nested=self._is_nested)
        # Everything needed after the step is created before it: after it there is no way back.
        update, skipped, coming = Update(norm, skipped=False), Update(norm, skipped=True), self.made + 1
        hooks = _Hooks(self._optimizer)
        try:
            with nullcontext() if watch is None else watch:
                is_skipped = self._step(hooks)
        except BaseException as error:
            if not written.undo():
                remedy = ", and leave more room (smaller micro-batches, or foreach=False in the optimizer)"
                raise StateDamagedError(
                    f"the optimizer failed after it had begun to write, so the parameters are part old, part new "
                    f"({first_line(error)}); load a checkpoint{remedy if is_oom(error) else ''}"
                ) from error
            raise
        self.made = coming
        failure, hooks.failure = hooks.failure, None
        if failure is not None and not isinstance(failure, Exception):
            raise failure  # an interrupt stays one
        if failure is not None:
            raise UpdateCompleteError(
                "the optimizer has stepped, and a hook of it (register_step_post_hook) failed "
                f"({type(failure).__name__}: {first_line(failure)})"
            ) from failure
        if is_skipped:
            return skipped
        if watch is not None and ready.key is not None:
            self._learn(ready.copy)
            # If there is no memory left for the record, the next step is measured instead.
            with suppress(MemoryError):
                self._needs[ready.key] = _Need(self._count_states(), watch.transient_bytes())
        return update

    def _learn(self, copy: OptimizerCopy | None) -> None:
        """Learn from a step of which there is a copy how later ones write."""
        values = (value for state in self._optimizer.state.values() for value in state.values())
        self._is_nested = any(isinstance(value, list | tuple | dict | deque) for value in values)
        groups = self._optimizer.param_groups
        # The step was measured by a dispatch mode, under which kernels over lists move no counters.
        if copy is None or self._is_unseen or any(group.get("fused") or _uses_lists(group) for group in groups):
            return
        try:
            self._is_unseen = copy.was_written_unseen()
        except (RuntimeError, TypeError, MemoryError) as error:  # the step is done, so nothing may fail any more
            if is_oom(error):
                let_go(error)
            self._is_unseen = True

    def _count_states(self) -> int:
        return len(self._optimizer.state) if self.weights is None else int(self.weights.has_state(self._optimizer))

    def drop_reservation(self) -> None:
        """Release the preparations for a step."""
        self._ready = None

    def _held(self) -> list[nn.Parameter]:
        """Return the optimizer's current parameters, possibly more than at the last update."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._held() if parameter.grad is not None]

    def _copy(self) -> OptimizerCopy | None:
        """Copy what the optimizer will write to host memory; None if only host memory is short."""
        try:
            return OptimizerCopy(self._optimizer, self._scaler)
        except Exception as error:
            # Lack of host memory says nothing about a step on another device: version counters have to suffice then.
            if self._memory.device.type == "cpu" or not is_oom(error):
                raise
        return None

    def _step(self, hooks: _Hooks) -> bool:
        """Step the optimizer; return whether the scaler skipped it."""
        scaler = self._scaler
        if scaler is None:
            run = self._optimizer.step if not hooks.are_there else partial(_step_with, hooks, self._optimizer)
            if self.weights is None:
                run()
            else:
                self.weights.step(self._optimizer, run, at_once=hooks.are_there)
            return False
        before = scaler.get_scale() if _handles_scale_itself(self._optimizer) else None
        given = {name: value for name, value in vars(self._optimizer).items() if name in _GIVEN_BY_SCALER}
        try:
            with hooks:
                scaler.step(self._optimizer)
        except BaseException:
            self._take_back(given)
            raise
        if hooks.failure is not None:
            self._take_back({})
        scaler.update()
        # A fused optimizer is always called and skips inside its kernel; only the lowered scale shows it.
        return not hooks.stepped if before is None else scaler.get_scale() < before

    def _take_back(self, given: dict[str, Any]) -> None:
        """Leave a fused optimizer with what it had of a scaler, which multiplies its scale by one that is left over."""
        for name in _GIVEN_BY_SCALER:
            vars(self._optimizer).pop(name, None)
        vars(self._optimizer).update(given)


def _step_with(hooks: _Hooks, optimizer: torch.optim.Optimizer) -> None:
    with hooks:
        optimizer.step()


class _Hooks:
    """Separates an optimizer's own step, which is done or not, from the user's hooks that run after it.

    As a context, it records when the optimizer has stepped and keeps any error that a hook raises after that. Code of a
    derived optimizer that runs after those hooks is part of the step.

    Args:
        optimizer: The optimizer.

    Attributes:
        are_there: Whether any hooks run after its steps.
        stepped: Whether it has stepped.
        failure: The error that a hook raised.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.are_there = bool(getattr(optimizer, "_optimizer_step_post_hooks", True) or _global_optimizer_post_hooks)
        self.stepped = False
        self.failure: BaseException | None = None
        self._are_at_work = False

    def __enter__(self) -> None:
        first = self._optimizer.register_step_post_hook(self._begin)
        # Before the user's hooks: what fails from there on is not the optimizer.
        hooks = getattr(self._optimizer, "_optimizer_step_post_hooks", None)
        if isinstance(hooks, OrderedDict) and first.id in hooks:
            hooks.move_to_end(first.id, last=False)
        # After the last hook; global hooks run after this optimizer's own.
        has_global = bool(_global_optimizer_post_hooks)
        last = (register_optimizer_step_post_hook if has_global else self._optimizer.register_step_post_hook)(self._end)
        self._handles = (first, last)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        for handle in self._handles:
            handle.remove()
        if self._are_at_work:
            self.failure = error
        return self.failure is not None

    def _begin(self, *_: object) -> None:
        self.stepped = self._are_at_work = True

    def _end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer is self._optimizer:
            self._are_at_work = False


class _Written:
    """The optimizer's state before its step, to determine afterwards whether it has begun to write.

    Relies on tensors' version counters. Fused kernels do not increment them, nor do kernels over lists of tensors
    (foreach) while a dispatch mode is active, so nothing can be proven for those.

    Args:
        optimizer: The optimizer.
        is_unseen: Whether it writes without moving these counters, as through `.data`.
        is_nested: Whether its state holds containers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, is_unseen: bool, is_nested: bool) -> None:
        self._optimizer = optimizer
        self._is_unseen = is_unseen
        # Step counters may be kept there.
        self._settings = [dict(group) for group in optimizer.param_groups]
        self._holders, self._entries = list(optimizer.state), list(map(dict, optimizer.state.values()))
        self._tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._tensors += chain.from_iterable(map(dict.values, self._entries))
        if is_nested:
            self._entries = list(map(_with_own_containers, self._entries))
            self._tensors = list(_inside(self._tensors))
        self._versions = _read_versions(self._tensors)

    def undo(self) -> bool:
        """Remove newly created state and restore settings; return whether everything is as it was."""
        if self._is_unseen or any(_moves_no_counters(group) for group in self._optimizer.param_groups):
            return False
        if _read_versions(self._tensors) != self._versions:
            return False
        self._optimizer.state.clear()
        self._optimizer.state.update(zip(self._holders, self._entries, strict=True))
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.clear()
            group.update(settings)
        return True


def _with_own_containers(value: Any) -> Any:
    """Return a value in new containers, with the same tensors and numbers."""
    if type(value) in (list, tuple):
        return type(value)(map(_with_own_containers, value))
    if type(value) is deque:
        return deque(map(_with_own_containers, value), value.maxlen)
    if type(value) is dict:
        return {name: _with_own_containers(item) for name, item in value.items()}
    return value


def _inside(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple | dict | deque):
            yield from _inside(value.values() if isinstance(value, dict) else value)
        else:
            yield value


def _read_versions(values: list[Any]) -> list[int]:
    try:
        return list(map(_VERSION, values))
    except AttributeError:  # some are numbers
        return [getattr(value, "_version", 0) for value in values]


def _moves_no_counters(group: dict[str, Any]) -> bool:
    if group.get("fused"):
        return True
    return _get_current_dispatch_mode() is not None and _uses_lists(group)


def _uses_lists(group: dict[str, Any]) -> bool:
    foreach = group.get("foreach", False)
    if foreach is None:  # the optimizer chooses, based on the parameters' device
        kinds = _get_foreach_kernels_supported_devices()
        return any(parameter.device.type in kinds for parameter in group["params"])
    return bool(foreach)


def _handles_scale_itself(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
