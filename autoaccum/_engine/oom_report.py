"""Writes down what is on the device when memory first runs out, before anything is freed."""

from __future__ import annotations

import gc
import os
import weakref
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autoaccum._oom import first_line
from autoaccum._system import files
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._system.notices import Notices

_LARGEST = 40  # tensors that are listed


class OomReport:
    """Writes one report: a text, and on CUDA a snapshot for PyTorch's memory viewer."""

    def __init__(self, folder: Path, step: GradientStep, notices: Notices) -> None:
        self._folder = folder
        self._step: GradientStep = weakref.proxy(step)
        self._notices = notices
        self._is_written = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInputError(f"oom_report='{folder}' is no folder ({error.strerror}); pass another") from error

    def see(
        self, error: BaseException, *, phase: str, size: int | None, step: int | None = None, is_trial: bool = False
    ) -> None:
        """Write the report. Call it where `error`, whose frames hold the tensors, has just been caught."""
        if self._is_written or (is_trial and size is not None and size > 1):
            return
        self._is_written = True
        what = f"{phase}, {'all' if size is None else size} samples{'' if step is None else f', step {step}'}"
        try:
            outcome = f"what was alive is in {self._write(f'{what}: {first_line(error)}')}"
        except Exception as problem:  # noqa: BLE001 - whatever it is, training matters more
            outcome = f"no report of it could be written to {self._folder} ({first_line(problem)})"
        self._notices.say(f"memory ran out; {outcome}")

    def _write(self, what: str) -> Path:
        memory, found, seen = self._step.memory, [], {0}
        lines = [what, f"{memory.name}: {memory.reading()}, peak_bytes={memory.peak_bytes()}"]
        with memory.lifted():
            for tensor, owner in self._tensors():
                local = getattr(tensor, "_local_tensor", tensor)  # what FSDP2 keeps here
                with suppress(RuntimeError):  # sparse tensors, and wrappers, have no storage of their own
                    address = local.untyped_storage().data_ptr()
                    if local.device == memory.device and address not in seen:
                        seen.add(address)
                        found.append((local.untyped_storage().nbytes(), f"{tuple(local.shape)} {local.dtype} {owner}"))
            total = sum(size for size, _ in found)
            lines += map(str, memory.neighbours())
            lines += [f"{len(found)} tensors that Python holds take {total:,} bytes; the largest:"]
            lines += [f"{size:>18,} {text}" for size, text in sorted(found, reverse=True)[:_LARGEST]]
            path = self._folder.resolve() / f"oom-{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{os.getpid()}.txt"
            files.write(path, "\n".join([*lines, ""]).encode())
            if memory.device.type == "cuda":
                with files.replacing(path.with_suffix(".pickle")) as unfinished:
                    torch.cuda.memory._dump_snapshot(str(unfinished))  # type: ignore[no-untyped-call]
        return path

    def _tensors(self) -> Iterator[tuple[Tensor, str]]:
        """Yield tensors and their owners, those that are owned first."""
        names: dict[object, str] = {}
        for module in self._step.objective.modules:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                names.setdefault(tensor, name)
                yield tensor, names[tensor]
                if tensor.grad is not None:
                    yield tensor.grad, f"gradient of {names[tensor]}"
        optimizer = self._step.optimizer
        for parameter, state in () if optimizer is None else optimizer.state.items():
            for entry, value in state.items():
                if isinstance(value, Tensor):
                    yield value, f"{entry} of {names.get(parameter, 'other')}"
        # By type: `isinstance` would run code of proxies.
        yield from ((one, "other") for one in gc.get_objects() if issubclass(type(one), Tensor))
