"""Runs a job's training steps on fake tensors, and returns the timeline of each size.

A step is one that `fit` makes in the middle of training: gradients and optimizer state exist, gradients are
accumulated, outputs are freed before the backward pass, autocast caches cast weights, and the optimizer steps.

For a GPU the fakes claim to be CUDA tensors, which needs no driver, so that the dispatcher takes CUDA's paths. The
parts that need a driver (autograd's engine, the choice of attention kernel) are replaced in
`_estimate/fake_backward.py` and `_estimate/cuda_dispatch.py`.
"""

from __future__ import annotations

import gc
import logging
import warnings
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoaccum._data.nesting import copied, plain_parts, tensors_in
from autoaccum._engine.forward_backward import TrainingStep
from autoaccum._engine.gradients import PartResult
from autoaccum._engine.optimizer_step import uncompiled
from autoaccum._engine.optimizers import resolve
from autoaccum._engine.options import Options
from autoaccum._engine.out_of_memory import Phase
from autoaccum._engine.precision import Precision, own_half_type
from autoaccum._estimate import cuda_dispatch
from autoaccum._estimate.allocation_trace import Category
from autoaccum._estimate.cuda_dispatch import CudaCalls, without_driver
from autoaccum._estimate.cuda_kernels import workspace
from autoaccum._estimate.fake import FakeCopies, ValuesAssumed, batch_like, keep_every_layer
from autoaccum._estimate.fake_backward import loosened
from autoaccum._estimate.own_thread import ONE_AT_A_TIME
from autoaccum._estimate.owners import Owners
from autoaccum._estimate.tracer import Ledger
from autoaccum._loss.calls import Calls
from autoaccum._loss.known_shares import SingleMicroBatch
from autoaccum._loss.objective import Objective
from autoaccum._memory.simulated import Simulated
from autoaccum._system.notices import Notices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from autoaccum._data.pieces import Split
    from autoaccum._estimate.allocation_trace import Timeline
    from autoaccum._estimate.gpu_properties import GPUAnswers
    from autoaccum._loss.loss_sources import Source
    from autoaccum._loss.loss_values import LossValue

    Adapt = Callable[[nn.Module], AbstractContextManager[object]]

_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FakePrecision(Precision):
    """A precision for CUDA that does not need CUDA.

    Args:
        name: "fp32", "bf16" or "fp16".
        autocasts: As for `Precision`.
    """

    def __init__(self, name: str, *, autocasts: bool = True) -> None:
        super().__init__("fp32", torch.device("cpu"))
        self.name = name
        self._dtype = _HALVES.get(name) if autocasts else None
        if self._dtype is torch.float16:
            # A scaler for CUDA disables itself without CUDA; its tensors are created on the loss's device.
            self.scaler = torch.amp.GradScaler("cpu")

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for a forward pass."""
        return nullcontext() if self._dtype is None else cuda_dispatch.autocast(self._dtype)


class LooseObjective(Objective):
    """An objective whose losses do not hold the graph, for `_estimate/fake_backward.py`."""

    def values(self, source: Source, batch: Any, samples: int) -> tuple[list[LossValue], Any]:
        """Run one source on one micro-batch, like `Objective`."""
        losses, outputs = super().values(source, batch, samples)
        for loss in losses:
            if not loss.is_reported:
                loss.value = loosened(loss.value)
        return losses, outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeJob:
    """What is traced: the arguments of `trace_step`, which documents them."""

    model: nn.Module
    batch: Any
    loss: Any
    optimizer: Any
    precision: str
    forward: Any
    loss_reduction: str | None
    clip_grad_norm: float | None
    kind: str
    tensor_float: bool
    split: Split | None
    answers: GPUAnswers


class FakeStep:
    """Runs the step of a job in any size.

    Args:
        job: The job, which is copied and not changed.
    """

    def __init__(self, job: FakeJob) -> None:
        self._job = job
        self._is_cuda = job.kind == "cuda"
        self._device = torch.device("cuda", 0) if self._is_cuda else torch.device("cpu")
        # Without fallback kernels, which would allocate memory.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        with undisturbed(), self._mode:
            # PyTorch 2.8 calls the driver before each operator on a CUDA fake. Here that raises an error that can be
            # handled; inside some operators it ends the process.
            torch.empty(2, device=self._device)[:1]
            self._step = self._staged()
            self._owners = Owners(self._step.objective.modules)
            self._trainable = [parameter for parameter in self._step.parameters if parameter.requires_grad]
            self._make_gradients()
            self._step_optimizer()

    def __call__(self, size: int, adapts: Sequence[Adapt] = ()) -> Timeline:
        """Return the timeline of a step with `size` samples, with the model changed in the contexts of `adapts`."""
        with undisturbed(), self._mode, ExitStack() as changed:
            for adapt in adapts:
                changed.enter_context(adapt(self._step.objective.calls.model))
            batch = batch_like(self._job.batch, size, self._device, self._job.split)
            timeline, arrived = self._traced(batch, size)
            without = [parameter for parameter in self._trainable if id(parameter) not in arrived]
            if not without:
                return timeline
            # Parameters that get no gradient in a step have no optimizer state either.
            for parameter in without:
                self._step.optimizer.state.pop(parameter, None)
            self._trainable = [parameter for parameter in self._trainable if id(parameter) in arrived]
            return self._traced(batch, size)[0]

    def _staged(self) -> TrainingStep:
        job, notices = self._job, Notices(silent=True)
        stage = FakeCopies(self._device)
        model = stage.copied(job.model)
        keep_every_layer(model)
        loss = stage.copied(job.loss) if isinstance(job.loss, nn.Module) else job.loss
        calls = Calls(model, loss, forward=job.forward, split=job.split, notices=notices)
        kind = LooseObjective if self._is_cuda else Objective
        objective = kind(calls, loss_reduction=job.loss_reduction, notices=notices)
        is_made = isinstance(job.optimizer, torch.optim.Optimizer)
        chosen = resolve(stage.optimizer(job.optimizer) if is_made else job.optimizer, objective.modules, notices)
        if self._is_cuda:
            take_lists(chosen)
        own = own_half_type(model)
        name, autocasts = own or job.precision, own is None
        precision: Precision
        if self._is_cuda:
            precision = FakePrecision(name, autocasts=autocasts)
        else:
            precision = Precision(name, self._device, autocasts=autocasts)
        options = Options(clip_grad_norm=job.clip_grad_norm)
        return TrainingStep(objective, chosen, precision, Simulated(2**60), options)

    def _traced(self, batch: Any, size: int) -> tuple[Timeline, set[int]]:
        """Return the timeline, and the ids of the parameters that got a gradient."""
        step = self._step
        self._make_gradients()
        arrived: set[int] = set()

        def arrives(parameter: Tensor) -> None:
            arrived.add(id(parameter))

        watches = [
            parameter.register_post_accumulate_grad_hook(arrives)  # type: ignore[no-untyped-call]
            for parameter in self._trainable
        ]
        takes = partial(workspace, tensor_float=self._job.tensor_float) if self._is_cuda else None
        ledger = Ledger(size, self._device.type, takes, lambda: step.stage.phase, self._owners)
        with self._owners.watching():
            self._run(ledger, batch, size)
        for watch in watches:
            watch.remove()
        step.clear_gradients()
        return ledger.timeline, arrived

    def _run(self, ledger: Ledger, batch: Any, size: int) -> None:
        step, state = self._step, self._step.optimizer.state
        for parameter in self._trainable:
            self._owners.own(_tensors((parameter.grad, *state.get(parameter, {}).values())), parameter)
        ledger.hold(step.parameters, Category.PARAMETERS)
        ledger.hold((buffer for module in step.objective.modules for buffer in module.buffers()), Category.BUFFERS)
        ledger.hold((p.grad for p in self._trainable if p.grad is not None), Category.GRADIENTS)
        ledger.hold(_tensors(value for of_one in state.values() for value in of_one.values()), Category.OPTIMIZER)
        # On a GPU the next micro-batch is transferred during the step.
        following = copied(batch) if self._is_cuda else None
        for inputs in (batch, following):
            ledger.hold(tensors_in(inputs), Category.INPUTS)
        ledger.enter("forward")
        step.stage.phase = Phase.FORWARD
        driver = without_driver(self._job.answers) if self._is_cuda else nullcontext()
        with driver, CudaCalls() if self._is_cuda else nullcontext(), ledger:
            step.accumulate(batch, size, SingleMicroBatch(step.objective.knowledge), PartResult(size))
            step.stage.phase = Phase.OPTIMIZER
            ledger.enter("optimizer")
            self._make_optimizer_step()

    def _make_gradients(self) -> None:
        for parameter in self._trainable:
            parameter.grad = torch.zeros_like(parameter)

    def _make_optimizer_step(self) -> None:
        scaler = self._step.precision.scaler
        if scaler is not None:
            scaler.unscale_(self._step.optimizer)
        if self._job.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._step.parameters, self._job.clip_grad_norm)
        # Not with the scaler, which would wait for the device to check for overflow.
        self._step_optimizer()
        if scaler is not None:
            scaler._per_optimizer_states.clear()

    def _step_optimizer(self) -> None:
        optimizer = self._step.optimizer
        # PyTorch's own only scale an optimizer step by the values that they read.
        is_of_pytorch = type(optimizer).__module__.startswith("torch.optim")
        with ValuesAssumed() if is_of_pytorch else nullcontext(), uncompiled(optimizer):
            optimizer.step()


def take_lists(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer work on lists of tensors, as on a GPU; with fakes it would not."""
    if isinstance(optimizer, torch.optim.Adafactor):  # uses them only on request
        return
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True


@contextmanager
def undisturbed() -> Iterator[None]:
    """Pause the garbage collector, torch's warnings about a missing device, and its log of errors that are raised."""
    with ONE_AT_A_TIME, warnings.catch_warnings():
        enabled, logs = gc.isenabled(), _LOG.disabled
        gc.disable()
        _LOG.disabled = True
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            _LOG.disabled = logs
            if enabled:
                gc.enable()


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield from plain_parts(value)
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
