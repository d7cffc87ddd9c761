"""Checks that losses, gradients and checkpoint contents are finite, without waiting for the device.

A window's loss is copied to the host asynchronously and checked one window later. The contents of a checkpoint are
checked when one is written, which waits for the device anyway. Only values that were finite at the beginning have to
stay so: a mask of -inf in a buffer is not damage.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._system.notices import Notices
from autoaccum.errors import NotFiniteError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._records import StepReport

# Halving at every skipped window takes a scaler from 65,536 to under 1e-10 in this many windows.
_SKIPPED_IN_A_ROW = 50
# Without pinned memory and events, the device is queried once per this many windows, with one wait.
_ASKED_EVERY = 64
# Names listed in a message.
_NAMED = 3


@dataclass(frozen=True)
class _Copy:
    """The values of one window, in transit to the host.

    Attributes:
        step: Number of the window.
        names: Names of the values.
        values: The values, on the host or still to be fetched.
        event: Recorded after the copy to the host; None if the values have yet to be fetched.
    """

    step: int
    names: tuple[str, ...]
    values: tuple[Tensor, ...]
    event: torch.cuda.Event | None

    def is_there(self) -> bool:
        return self.event is not None and bool(self.event.query())  # type: ignore[no-untyped-call]


class Finiteness:
    """Watches one training for values that are not finite.

    Args:
        step: The training step.
        on_nan: As for `fit`.
        is_first: Whether this process reports on behalf of all.
        is_alone: Whether this is the only process. Ranks wait for each other in every window, and so also for the
            values of the previous one: all ranks see the same values in the same window.
    """

    def __init__(self, step: TrainingStep, on_nan: str, *, is_first: bool, is_alone: bool) -> None:
        self._step = step
        self._on_nan = on_nan
        self._is_alone = is_alone
        # Separate from the progress output: problems are reported even with progress=False.
        self._notices = Notices(silent=not is_first)
        self._coming: deque[_Copy] = deque()
        self._spare: tuple[Tensor, ...] = ()  # host memory for the values of one window
        self._skipped = 0
        self._has_seen_state = False
        self._exempt: set[str] | None = None
        self._buffers: dict[str, torch.Size] = {}  # at the beginning: later ones may hold anything

    # --- losses -------------------------------------------------------------------------------------------------------

    def see(self, report: StepReport) -> None:
        """Check the previous windows, and record the values of this one.

        Raises:
            NotFiniteError: A value was not finite, and on_nan is "stop".
        """
        if self._on_nan == "ignore":
            return
        self._look(until=1 if self._is_asked_for() else 0)
        if self._counts_as_skipped(report):
            return
        scalars = {name: scalar.value for name, scalar in report.device_losses.items()}
        if report.device_grad_norm is not None:
            scalars["the gradient's norm"] = report.device_grad_norm.value
        there = {name: value for name, value in scalars.items() if not _is_on_device(value)}
        self._judge(report.step, {name: float(value) for name, value in there.items()})
        coming = {name: value for name, value in scalars.items() if _is_on_device(value)}
        if coming:
            self._coming.append(self._copied(report.step, coming))

    def finish(self) -> None:
        """Check all remaining windows, which waits for the device.

        Raises:
            NotFiniteError: As for `see`.
        """
        self._look(until=len(self._coming))

    def begin_anew(self) -> None:
        """Forget windows that will be repeated."""
        self._coming.clear()
        self._skipped = 0

    def _is_asked_for(self) -> bool:
        if not self._coming:
            return False
        if self._coming[0].event is None:
            return len(self._coming) >= _ASKED_EVERY
        return not self._is_alone

    def _look(self, *, until: int) -> None:
        """Check the oldest values: the first `until` in any case, then those that have arrived."""
        if until and self._coming and self._coming[0].event is None:
            until = len(self._coming)  # one wait for all
        while self._coming and (until > 0 or self._coming[0].is_there()):
            until -= 1
            copy = self._coming.popleft()
            if copy.event is not None:
                copy.event.synchronize()
            self._judge(copy.step, {n: float(value) for n, value in zip(copy.names, copy.values, strict=True)})
            if copy.event is not None:
                self._spare = copy.values

    def _copied(self, step: int, scalars: dict[str, Tensor]) -> _Copy:
        names, values = tuple(scalars), tuple(value.detach() for value in scalars.values())
        if values[0].device.type != "cuda":
            return _Copy(step, names, values, None)
        spare, self._spare = self._spare, ()
        if [host.dtype for host in spare] != [value.dtype for value in values]:
            spare = tuple(torch.empty((), dtype=value.dtype, pin_memory=True) for value in values)
        for host, value in zip(spare, values, strict=True):
            host.copy_(value, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(values[0].device))
        return _Copy(step, names, spare, event)

    def _counts_as_skipped(self, report: StepReport) -> bool:
        """Whether the scaler skipped the window because gradients overflowed; warns if it keeps doing so."""
        self._skipped = self._skipped + 1 if report.skipped else 0
        if self._skipped == _SKIPPED_IN_A_ROW:
            self._notices.say(
                f"step {report.step}: the gradient scaler has skipped {self._skipped} updates in a row, so nothing is "
                "learned; look for NaN in the inputs or the loss, or try precision='bf16'",
                key="skipped",
            )
        return report.skipped

    def _judge(self, step: int, values: dict[str, float]) -> None:
        if all(map(math.isfinite, values.values())):
            return
        found = ", ".join(f"{name}={value}" for name, value in values.items() if not math.isfinite(value))
        text = (
            f"step {step}: not finite: {found}; look for NaN in the inputs, log(0) or a division by 0 in the loss, or "
            "too large a learning rate"
        )
        if self._on_nan == "stop":
            raise NotFiniteError(text)
        self._notices.say(
            f"WARNING: {text}; training goes on (on_nan='warn'), and checkpoints are written only of finite parameters",
            key="not finite",
        )

    # --- what a checkpoint holds --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Record which values are not finite before the first window of this call; these are exempt from checks."""
        if self._on_nan != "ignore":
            self._buffers = {name: tensor.shape for name, tensor in self._of_modules("named_buffers")}
            self._exempt = set(_not_finite(dict(self._held())))
            self._has_seen_state = bool(self._step.optimizer.state)

    def note_new_state(self) -> None:
        """Record the same for the optimizer's state, which the first update creates."""
        if self._exempt is not None and not self._has_seen_state and self._step.optimizer.state:
            self._has_seen_state = True
            self._exempt |= set(_not_finite(dict(_state_of(self._step))))

    def damage(self) -> list[str]:
        """Return the names of values that are not finite now but were at the beginning; waits for the device."""
        if self._exempt is None:
            return []
        return _not_finite({name: tensor for name, tensor in self._held() if name not in self._exempt})

    def tell_refusal(self, names: list[str], step: int, newest: object) -> None:
        """Report that no checkpoint is written, once until one is written."""
        listed = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        kept = "there is none yet" if newest is None else f"the last finite one stays: {newest}"
        self._notices.say(
            f"WARNING: step {step}: no checkpoint is written, since it would hold NaN or infinity ({listed}); {kept} "
            "(on_nan='ignore' writes them all the same)",
            key=f"refused {newest}",
        )

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._of_modules("named_parameters")
        for name, tensor in self._of_modules("named_buffers"):
            if self._buffers.get(name) == tensor.shape:
                yield name, tensor
        yield from _state_of(self._step)

    def _of_modules(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        modules = self._step.objective.modules
        for number, module in enumerate(modules):
            for name, tensor in getattr(module, kind)():
                yield name if len(modules) == 1 else f"{number}.{name}", tensor


def _state_of(step: TrainingStep) -> Iterator[tuple[str, Tensor]]:
    for number, parameter in enumerate(p for group in step.optimizer.param_groups for p in group["params"]):
        for name, value in step.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"the optimizer's {name} of parameter {number}", value


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


@torch.no_grad()
def _not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors with values that are not finite.

    Checks the minimum and maximum (both are NaN if any value is), which needs no additional memory.
    """
    extremes: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.layout is not torch.strided or local.numel() == 0 or local.device.type == "meta":
            continue
        if local.is_complex():
            local = torch.view_as_real(local)
        if not local.is_floating_point() or local.dtype.itemsize < 2:  # noqa: PLR2004 - nothing computes with 8 bits
            continue
        extremes.setdefault(local.device, {})[name] = torch.stack(torch.aminmax(local)).isfinite().all()
    return [
        name
        for of_device in extremes.values()
        for name, is_finite in zip(of_device, torch.stack([*of_device.values()]).tolist(), strict=True)
        if not is_finite
    ]
