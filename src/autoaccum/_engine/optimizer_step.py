"""One update of the optimizer from gradients that lie ready: made whole, or not begun, or told as damage.

Nothing is caught here but what the optimizer itself raises. What a step of the optimizer takes beside what it leaves is
measured once; from then on it is asked for before the step, which so fails before it writes. The step that is measured,
and every step that makes the optimizer's state, works on parameters of which a copy is kept in host memory.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
from torch.utils._python_dispatch import _get_current_dispatch_mode

from autoaccum._engine.phases import Phase, Stage
from autoaccum._memory._storages import Transients
from autoaccum._oom import first_line, is_oom
from autoaccum._snapshot import OptimizerSnapshot
from autoaccum.errors import StateDamagedError, UpdateCompleteError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._memory.base import MemoryBackend


@dataclass(frozen=True, slots=True)
class Update:
    """What became of an update.

    Attributes:
        grad_norm: Norm of the gradient before clipping, on the device; None where it was not clipped.
        skipped: Whether the scaler skipped it.
    """

    grad_norm: Tensor | None
    skipped: bool


@dataclass(frozen=True, slots=True)
class _Need:
    """What a step of the optimizer takes.

    Attributes:
        gradients: Parameters with a gradient when it was measured; with others the step is another one.
        held: The parameters that the optimizer held then.
        keeps_state: Whether it leaves anything behind.
        state_bytes: What the measured step left behind.
        transient_bytes: What every step takes and gives back.
    """

    gradients: int
    held: Sequence[nn.Parameter]
    keeps_state: bool
    state_bytes: int
    transient_bytes: int

    def is_of(self, gradients: int, held: Sequence[nn.Parameter]) -> bool:
        """Whether this is what a step over these parameters takes, so many of which have a gradient."""
        return self.gradients == gradients and len(self.held) == len(held) and all(map(is_, self.held, held))


@dataclass(frozen=True, slots=True)
class _Ready:
    """What a step of the optimizer that is to come was made ready with.

    Attributes:
        gradients: Parameters with a gradient.
        copy: Of what the optimizer will write; None where version counters have to tell.
        is_measured: Whether what it takes is to be measured.
    """

    gradients: int
    copy: OptimizerSnapshot | None
    is_measured: bool


class Updates:
    """Makes updates of one optimizer: all at once, or in three parts where several processes update alike.

    Args:
        optimizer: The optimizer.
        scaler: Its gradient scaler, if there is one.
        memory: The device.
        clip_grad_norm: Norm to which the gradient is clipped, of all parameters that the optimizer holds; None leaves
            it. Others are not its to step: the scaler does not unscale them, and they do not count.
        stage: Where it is noted what is being done.

    Attributes:
        made: Updates made so far. It rises as soon as the optimizer has stepped, whatever fails after that: a window
            for which it has risen must never be tried again.
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
        self._need: _Need | None = None
        self._ready: _Ready | None = None
        self.made = 0

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with another optimizer from now on, of which nothing is known yet."""
        self._optimizer = optimizer
        self._need = self._ready = None

    def make(self, correction: float | Tensor = 1.0) -> Update:
        """Make one update from the accumulated gradients.

        What fails in the phase "reserve" has touched nothing, the gradients included: the update can be tried again.

        Args:
            correction: What the gradients are multiplied by first.

        Raises:
            StateDamagedError: The optimizer failed after it had begun to write.
            UpdateCompleteError: It has stepped, and a hook that the user gave it failed.
        """
        try:
            self.reserve()
            return self.commit(self.prepare(correction))
        finally:
            self._ready = None

    def reserve(self, gradients: int | None = None) -> None:
        """See that the optimizer's step will have what it takes, and touch nothing.

        Args:
            gradients: How many parameters will have a gradient; None for as many as have one now.
        """
        if gradients is None:
            gradients = len(self._gradients())
        self._stage.phase = Phase.RESERVE
        self._ready = None
        need = self._need if self._need is not None and self._need.is_of(gradients, self._held()) else None
        makes_state = need is not None and need.keeps_state and not self._optimizer.state
        if need is not None:
            self._memory.reserve(need.transient_bytes + (need.state_bytes if makes_state else 0))
        copy = self._copy() if need is None or makes_state else None
        self._ready = _Ready(gradients, copy, is_measured=need is None)

    def prepare(self, correction: float | Tensor = 1.0) -> Tensor | None:
        """Bring the gradients to what the optimizer is to be given.

        Args:
            correction: What they are multiplied by first.

        Returns:
            Their norm before clipping, on the device; None where they are not clipped.
        """
        if not isinstance(correction, float) or correction != 1.0:
            self._stage.phase = Phase.UNSCALE
            if gradients := self._gradients():
                torch._foreach_mul_(gradients, correction)
        norm = self.norm()
        if norm is not None:
            self.clip(norm)
        return norm

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self._clip_grad_norm is not None

    def norm(self) -> Tensor | None:
        """Return the norm of the gradients, unscaled before, on the device; None where they are not to be clipped."""
        if self._clip_grad_norm is None:
            return None
        if self._scaler is not None:
            self._stage.phase = Phase.UNSCALE
            self._scaler.unscale_(self._optimizer)
        self._stage.phase = Phase.CLIP
        return nn.utils.get_total_norm(self._gradients()).detach()

    def clip(self, norm: Tensor) -> None:
        """Clip the gradients, of which this is the norm."""
        assert self._clip_grad_norm is not None
        self._stage.phase = Phase.CLIP
        nn.utils.clip_grads_with_norm_(self._held(), self._clip_grad_norm, norm)

    def commit(self, norm: Tensor | None) -> Update:
        """Step the optimizer; where it fails without having written, this can be tried again.

        Args:
            norm: What `prepare` returned.

        Raises:
            StateDamagedError: The optimizer failed after it had begun to write.
            UpdateCompleteError: It has stepped, and a hook that the user gave it failed; this must not be tried again.
        """
        assert self._ready is not None
        self._stage.phase = Phase.OPTIMIZER
        ready, device = self._ready, self._memory.device.type
        watch = Transients(device) if ready.is_measured else nullcontext()
        written = _Written(self._optimizer) if ready.copy is None else ready.copy
        # Whatever is needed after the step is made before it: from there on there is no way back.
        update, skipped, coming = Update(norm, skipped=False), Update(norm, skipped=True), self.made + 1
        hooks = _Hooks(self._optimizer)
        is_skipped = self._guarded(written, watch, hooks)
        self.made = coming
        failure, hooks.failure = hooks.failure, None
        if failure is not None:
            raise UpdateCompleteError(
                "the optimizer has stepped, and a hook of it (register_step_post_hook) failed "
                f"({type(failure).__name__}: {first_line(failure)})"
            ) from failure
        if is_skipped:
            return skipped
        if isinstance(watch, Transients):
            self._note_need(ready, watch)
        return update

    def _note_need(self, ready: _Ready, watch: Transients) -> None:
        """Note what the step took; where no memory is left for that, the next step is measured instead."""
        try:
            left = bool(self._optimizer.state)
            self._need = _Need(ready.gradients, self._held(), left, watch.left_bytes(), watch.transient_bytes())
        except MemoryError:
            self._need = None

    def let_go(self) -> None:
        """Let go of what a step was made ready with."""
        self._ready = None

    def _held(self) -> list[nn.Parameter]:
        """Return what the optimizer holds now, which can be more than at the last update."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._held() if parameter.grad is not None]

    def _copy(self) -> OptimizerSnapshot | None:
        """Copy what the optimizer will write to host memory; None where only that memory lacks."""
        try:
            return OptimizerSnapshot(self._optimizer, self._scaler)
        except Exception as error:
            # Lack of host memory says nothing of a step on another device: then version counters have to tell.
            if self._memory.device.type == "cpu" or not is_oom(error):
                raise
        return None

    def _guarded(self, written: _Written | OptimizerSnapshot, watch: Any, hooks: _Hooks) -> bool:
        """Step, and take back what a failed step did; return whether the scaler skipped it."""
        try:
            with watch:
                return self._step(hooks)
        except BaseException as error:
            if not written.undo():
                remedy = ", and leave more room (a smaller micro_batch, or foreach=False in the optimizer)"
                raise StateDamagedError(
                    f"the optimizer failed after it had begun to write, so the parameters are part old, part new "
                    f"({first_line(error)}); load a checkpoint{remedy if is_oom(error) else ''}"
                ) from error
            raise

    def _step(self, hooks: _Hooks) -> bool:
        """Step the optimizer; return whether the scaler skipped it."""
        scaler = self._scaler
        if scaler is None:
            if not hooks.are_there:
                self._optimizer.step()
                return False
            with hooks:
                self._optimizer.step()
            return False
        before = scaler.get_scale() if _handles_scale_itself(self._optimizer) else None
        with hooks:
            scaler.step(self._optimizer)
        if hooks.failure is not None:
            for name in ("grad_scale", "found_inf"):  # which a fused step was given, and is to be given only once
                vars(self._optimizer).pop(name, None)
        scaler.update()
        # A fused optimizer is always called and skips inside its kernel; then only the lowered scale tells.
        return not hooks.stepped if before is None else scaler.get_scale() < before


class _Hooks:
    """Tells an optimizer's own step, which is done or not, from the hooks that the user has had follow it.

    As a context it tells when the optimizer has stepped, and keeps what a hook raises after that. What it does
    in its own step behind those hooks (one that is derived from another, say) is a part of the step.

    Args:
        optimizer: The optimizer.

    Attributes:
        are_there: Whether any hook follows its steps.
        stepped: Whether it has stepped.
        failure: What a hook has raised.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.are_there = bool(getattr(optimizer, "_optimizer_step_post_hooks", True) or _global_optimizer_post_hooks)
        self.stepped = False
        self.failure: Exception | None = None
        self._are_at_work = False

    def __enter__(self) -> None:
        first = self._optimizer.register_step_post_hook(self._begin)
        # Before the user's: what fails then is no longer the optimizer's.
        hooks = getattr(self._optimizer, "_optimizer_step_post_hooks", None)
        if isinstance(hooks, OrderedDict) and first.id in hooks:
            hooks.move_to_end(first.id, last=False)
        # Behind the last of them; those of all optimizers follow those of this one.
        has_global = bool(_global_optimizer_post_hooks)
        last = (register_optimizer_step_post_hook if has_global else self._optimizer.register_step_post_hook)(self._end)
        self._handles = (first, last)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        for handle in self._handles:
            handle.remove()
        if self._are_at_work and isinstance(error, Exception):
            self.failure = error
        return self.failure is not None

    def _begin(self, *_: object) -> None:
        self.stepped = self._are_at_work = True

    def _end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer is self._optimizer:
            self._are_at_work = False


class _Written:
    """What the optimizer holds before its step, to tell afterwards whether it has begun to write.

    Tensors' version counters tell. Fused kernels do not move them, nor do those over lists of tensors (foreach) while a
    dispatch mode is active, so with those nothing can be proven.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # Counters of steps may be kept there.
        self._settings = [dict(group) for group in optimizer.param_groups]
        self._parameters = [(p, p._version) for group in optimizer.param_groups for p in group["params"]]
        self._state = [
            (parameter, name, value, value._version if isinstance(value, Tensor) else 0)
            for parameter, state in optimizer.state.items()
            for name, value in state.items()
        ]

    def undo(self) -> bool:
        """Take back state that was newly made, and settings; return whether everything is as it was."""
        if any(_moves_no_counters(group) for group in self._optimizer.param_groups):
            return False
        if any(parameter._version != version for parameter, version in self._parameters):
            return False
        if any(isinstance(value, Tensor) and value._version != version for _, _, value, version in self._state):
            return False
        self._optimizer.state.clear()
        for parameter, name, value, _ in self._state:
            self._optimizer.state[parameter][name] = value
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.clear()
            group.update(settings)
        return True


def _moves_no_counters(group: dict[str, Any]) -> bool:
    if group.get("fused"):
        return True
    if _get_current_dispatch_mode() is None:
        return False
    foreach = group.get("foreach", False)
    if foreach is None:  # the optimizer chooses, by where the parameters are
        kinds = _get_foreach_kernels_supported_devices()
        return any(parameter.device.type in kinds for parameter in group["params"])
    return bool(foreach)


def _handles_scale_itself(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
