"""Checks that losses, gradients and checkpoint contents are finite, without waiting for the device.

A window's loss is copied to the host asynchronously and checked one window later. The contents of a checkpoint are
checked when one is written, which waits for the device anyway. Only values that were finite at the beginning have to
stay so: a mask of -inf in a buffer is not damage.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from autoaccum._arguments import listed
from autoaccum._data.nesting import plain_parts
from autoaccum._system.notices import Notices
from autoaccum.errors import NotFiniteError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._records import StepReport

_K = TypeVar("_K")
# Halving at every skipped window takes a scaler from 65,536 to under 1e-10 in this many windows.
_SKIPPED_IN_A_ROW = 50
# Devices other than CUDA's are asked once in so many windows, with one wait.
_ASKED_EVERY = 64


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
        # Separate from the progress output: problems are reported even with progress=False.
        self._notices = Notices(silent=not is_first)
        # Windows whose values are still to be read, with the event of their arrival on the host; None if they have to
        # be fetched.
        self._coming: deque[tuple[int, dict[str, Any], torch.cuda.Event | None]] = deque()
        waits = math.inf if is_alone else 1
        self._most_coming = waits if step.memory.device.type == "cuda" else _ASKED_EVERY
        self._skipped = 0
        self._has_state: bool | None = None
        self._was_finite: dict[str, bool] = {}

    # --- losses -------------------------------------------------------------------------------------------------------

    def see(self, report: StepReport) -> None:
        """Check the previous windows, and record the values of this one."""
        self._read(at_most=self._most_coming)
        self._skipped = self._skipped + 1 if report.skipped else 0
        if self._skipped == _SKIPPED_IN_A_ROW:
            self._notices.say(
                f"step {report.step}: the gradient scaler has skipped {self._skipped} optimizer steps in a row, so "
                "nothing is learned; look for NaN in the inputs or the loss, or try precision='bf16'",
                key="skipped",
            )
        if report.skipped:
            return
        values = {name: scalar.value for name, scalar in report.device_losses.items()}
        if report.device_grad_norm is not None:
            values["the gradient's norm"] = report.device_grad_norm.value
        devices = (value.device for value in values.values() if isinstance(value, Tensor))
        device = next((device for device in devices if device.type != "cpu"), None)
        if device is None:
            self._judge(report.step, values)
        else:
            self._coming.append((report.step, *coming(values, device)))

    def finish(self) -> None:
        """Check all remaining windows, which waits for the device."""
        self._read(at_most=0)

    def _read(self, *, at_most: float) -> None:
        """Check the windows that have arrived; all, with a wait, if so many are on their way."""
        waits = len(self._coming) >= at_most
        while self._coming:
            step, values, event = self._coming[0]
            if not (waits or (event is not None and event.query())):  # type: ignore[no-untyped-call]
                return
            if event is not None:
                event.synchronize()
            self._coming.popleft()
            self._judge(step, values)

    def _judge(self, step: int, values: dict[str, Any]) -> None:
        numbers = {name: float(value) for name, value in values.items()}
        found = ", ".join(f"{name}={number}" for name, number in numbers.items() if not math.isfinite(number))
        if not found:
            return
        text = (
            f"step {step}: not finite: {found}; look for NaN in the inputs, log(0) or a division by 0 in the loss, or "
            "too large a learning rate"
        )
        if self._on_nan == "stop":
            raise NotFiniteError(text)
        self._notices.say(
            f"WARNING: {text}; training goes on (on_nan='warn'), and checkpoints are written only of finite parameters",
            key="not finite",
            level=logging.WARNING,
        )

    # --- what a checkpoint holds --------------------------------------------------------------------------------------

    def note(self) -> None:
        """Note what is finite: at the beginning, and of the optimizer's state after the step that creates it."""
        has_state = bool(self._step.optimizer.state)
        if has_state == self._has_state:
            return
        self._has_state = has_state
        new = {name: tensor for name, tensor in self._held() if name not in self._was_finite and tensor.numel()}
        damaged = _not_finite(new)
        self._was_finite |= {name: name not in damaged for name in new}

    def damage(self) -> list[str]:
        """Return the names of values that are not finite now but were so when noted; waits for the device."""
        # Parameters that have come since are checked; buffers may hold anything.
        known, held = self._was_finite, self._held()
        return _not_finite({name: one for name, one in held if known.get(name, isinstance(one, torch.nn.Parameter))})

    def tell_refusal(self, names: list[str], step: int, newest: object) -> None:
        """Report that no checkpoint is written, once until one is written."""
        kept = "there is none yet" if newest is None else f"the last finite one stays: {newest}"
        self._notices.say(
            f"WARNING: step {step}: no checkpoint is written, since it would hold NaN or infinity "
            f"({listed(names)}); {kept}",
            key=f"refused {newest}",
            level=logging.WARNING,
        )

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a checkpoint holds, by name."""
        modules = self._step.objective.modules
        for number, module in enumerate(modules):
            prefix = "" if len(modules) == 1 else str(number)
            for named in (module.named_parameters(prefix), module.named_buffers(prefix)):
                yield from named
        for number, parameter in enumerate(self._step.held()):
            for name, value in self._step.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"the optimizer's {name} of parameter {number}", value


def coming(values: dict[_K, Any], device: torch.device) -> tuple[dict[_K, Any], torch.cuda.Event | None]:
    """Begin to copy values to the host; return the copies, and the event of their arrival, or else the values."""
    if device.type != "cuda":
        return values, None
    copies = {}
    for name, value in values.items():
        number = torch.as_tensor(value).detach()
        # In pinned memory, so that nothing waits for the copy.
        copies[name] = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return copies, event


@torch.no_grad()
def _not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors with values that are not finite.

    Checks the minimum and maximum (both are NaN if any value is), which needs no additional memory.
    """
    are_finite: list[tuple[str, Tensor]] = []
    parts = {name: plain_parts(one.to_local() if hasattr(one, "to_local") else one) for name, one in tensors.items()}
    for name, local in ((name, part) for name, own in parts.items() for part in own):
        if local.layout is not torch.strided or local.numel() == 0 or local.device.type == "meta":
            continue
        if local.is_complex():
            local = torch.view_as_real(local)  # noqa: PLW2901 - its numbers
        if local.is_floating_point() and local.dtype.itemsize > 1:  # nothing computes with 8 bits
            are_finite.append((name, torch.stack(torch.aminmax(local)).isfinite().all()))
    return list(dict.fromkeys(name for name, is_finite in are_finite if not is_finite))
