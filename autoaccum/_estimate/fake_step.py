"""Runs one training step on fake tensors under the ledger, and returns its timeline.

The step is one from the middle of training: gradients and optimizer state exist, gradients are accumulated, then the
optimizer updates.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._data.nesting import copied, plain_parts, tensors_in
from autoaccum._engine.gradients import PartResult
from autoaccum._engine.optimizer_step import uncompiled
from autoaccum._engine.phases import Phase
from autoaccum._engine.precision import Precision
from autoaccum._estimate import cuda_dispatch
from autoaccum._estimate.allocation_trace import Category
from autoaccum._estimate.cuda_dispatch import CudaCalls, without_driver
from autoaccum._estimate.fake import ValuesAssumed
from autoaccum._estimate.fake_backward import loosened
from autoaccum._estimate.owners import Owners
from autoaccum._estimate.tracer import Ledger
from autoaccum._loss.loss_weights import Factors
from autoaccum._loss.objective import Objective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._estimate.allocation_trace import Storage, Timeline
    from autoaccum._estimate.card_properties import CardAnswers
    from autoaccum._estimate.cuda_kernels import Workspace
    from autoaccum._loss.objective import Source
    from autoaccum._loss.terms import Term

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

    def terms(self, source: Source, batch: Any, samples: int) -> tuple[list[Term], Any]:
        """Run one source on one micro-batch, like `Objective`."""
        terms, outputs = super().terms(source, batch, samples)
        for term in terms:
            if not term.is_reported:
                term.value = loosened(term.value)
        return terms, outputs


class Rehearsal:
    """Runs steps of several sizes.

    Args:
        step: The step, on fake tensors.
        device: The device that they claim to be on.
        clip_grad_norm: As for `fit`.
        workspace_of: Returns kernels' workspaces; None to leave them out.
        transfers: Whether the next micro-batch is transferred to the device during the step.
        answers: What the model is told of the card if it asks.
    """

    def __init__(
        self,
        step: TrainingStep,
        device: torch.device,
        *,
        clip_grad_norm: float | None,
        workspace_of: Callable[..., Workspace] | None,
        transfers: bool,
        answers: CardAnswers | None = None,
    ) -> None:
        self._step = step
        self._device = device
        self._clip_grad_norm = clip_grad_norm
        self._workspace_of = workspace_of
        self._transfers = transfers
        self._answers = answers
        self._owners = Owners(step.objective.modules)
        self._update: tuple[list[int], list[Storage]] | None = None
        self._trainable = [parameter for parameter in step.parameters if parameter.requires_grad]
        self._make_state()

    def run(self, batch: Any, size: int) -> Timeline:
        """Return the timeline of a step on `batch`, which holds `size` samples on the device."""
        timeline, arrived = self._traced(batch, size)
        used = [parameter for parameter in self._trainable if id(parameter) in arrived]
        if len(used) == len(self._trainable):
            return timeline
        # Parameters that get no gradient in a step have no optimizer state either.
        for parameter in self._trainable:
            if id(parameter) not in arrived:
                self._step.optimizer.state.pop(parameter, None)
        self._trainable, self._update = used, None
        return self._traced(batch, size)[0]

    def _traced(self, batch: Any, size: int) -> tuple[Timeline, set[int]]:
        step = self._step
        self._make_gradients()
        arrived: set[int] = set()
        watches = [_watched(parameter, arrived) for parameter in self._trainable]
        ledger = Ledger(size, self._device.type, self._workspace_of, lambda: step.phase, self._owners)
        with self._owners.watching():
            self._run(ledger, batch, size)
        for watch in watches:
            watch.remove()
        step.clear_gradients()
        return ledger.timeline, arrived

    def _run(self, ledger: Ledger, batch: Any, size: int) -> None:
        step = self._step
        for parameter in self._trainable:
            state = step.optimizer.state.get(parameter, {})
            self._owners.own(_tensors((parameter.grad, *state.values())), parameter)
        ledger.hold(step.parameters, Category.PARAMETERS)
        ledger.hold((buffer for module in step.objective.modules for buffer in module.buffers()), Category.BUFFERS)
        ledger.hold((p.grad for p in self._trainable if p.grad is not None), Category.GRADIENTS)
        ledger.hold(_state_of(step.optimizer), Category.OPTIMIZER)
        ledger.hold(tensors_in(batch), Category.INPUTS)
        following = copied(batch) if self._transfers else None
        if following is not None:
            ledger.hold(tensors_in(following), Category.INPUTS)
        ledger.enter("forward")
        step.stage.phase = Phase.FORWARD
        is_cuda = self._device.type == "cuda"
        there = without_driver(self._answers) if is_cuda else nullcontext()
        with there, CudaCalls() if is_cuda else nullcontext(), ledger:
            step.accumulate(batch, size, Factors(alone=True), PartResult())
            step.stage.phase = Phase.OPTIMIZER
            ledger.enter("optimizer")
            self._make_update(ledger.timeline)

    def _make_gradients(self) -> None:
        for parameter in self._trainable:
            parameter.grad = torch.zeros_like(parameter)

    def _make_state(self) -> None:
        """Create the optimizer's state, as the first update does."""
        self._make_gradients()
        optimizer = self._step.optimizer
        with _one_of_each(optimizer, lists_too=True) as others, _values_assumed(optimizer), uncompiled(optimizer):
            optimizer.step()
        if not others:
            return
        made = dict(optimizer.state)
        optimizer.state.clear()
        # In the parameters' order, in which the state would be allocated.
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            one = others.get(parameter, parameter)
            if one in made:
                optimizer.state[parameter] = made[one] if one is parameter else _copied(made[one])

    def _make_update(self, timeline: Timeline) -> None:
        """Trace the update, or repeat its timeline: it is the same for every size."""
        began, known = len(timeline.events), len(timeline.storages)
        if self._update is not None:
            events, storages = self._update
            timeline.storages += storages
            timeline.events += [event + known if event >= 0 else event - known for event in events]
            return
        step = self._step
        scaler = step.precision.scaler
        if scaler is not None:
            scaler.unscale_(step.optimizer)
        if self._clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(step.parameters, self._clip_grad_norm)
        # Not with the scaler, which would wait for the device to check for overflow.
        with _one_of_each(step.optimizer), _values_assumed(step.optimizer), uncompiled(step.optimizer):
            step.optimizer.step()
        if scaler is not None:
            scaler._per_optimizer_states.clear()
        events = timeline.events[began:]
        if all((event if event >= 0 else ~event) >= known for event in events):
            self._update = [e - known if e >= 0 else e + known for e in events], timeline.storages[known:]


@contextmanager
def _one_of_each(
    optimizer: torch.optim.Optimizer, *, lists_too: bool = False
) -> Iterator[dict[torch.nn.Parameter, torch.nn.Parameter]]:
    """Reduce an optimizer to one parameter of each form while entered; yield the others, each with that parameter.

    PyTorch's optimizers update parameters one by one unless they work on lists. The temporary memory of a step is then
    that of the largest parameter, and hundreds of others need not be traced.

    Args:
        optimizer: The optimizer.
        lists_too: Also reduce optimizers that work on lists; correct only for the state that the step creates.
    """
    others: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    every = [group["params"] for group in optimizer.param_groups]
    try:
        if _is_of_pytorch(optimizer):
            for group in optimizer.param_groups:
                if lists_too or not (group.get("foreach") or group.get("fused")):
                    group["params"] = _distinct(group["params"], others)
        yield others
    finally:
        for group, parameters in zip(optimizer.param_groups, every, strict=True):
            group["params"] = parameters


def _is_of_pytorch(optimizer: torch.optim.Optimizer) -> bool:
    module = type(optimizer).__module__
    return module == "torch.optim" or module.startswith("torch.optim.")


def _values_assumed(optimizer: torch.optim.Optimizer) -> AbstractContextManager[object]:
    """Let an optimizer read values of fakes, if it only scales an update by them."""
    return ValuesAssumed() if _is_of_pytorch(optimizer) else nullcontext()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    # Step counts have values even here.
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _distinct(
    parameters: list[torch.nn.Parameter], others: dict[torch.nn.Parameter, torch.nn.Parameter]
) -> list[torch.nn.Parameter]:
    first: dict[Any, torch.nn.Parameter] = {}
    for parameter in parameters:
        form = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device, parameter.grad is None)
        one = first.setdefault(form, parameter)
        if one is not parameter:
            others[parameter] = one
    return list(first.values())


def _watched(parameter: torch.nn.Parameter, arrived: set[int]) -> Any:
    """Record when a parameter gets a gradient; return the hook's handle."""
    return parameter.register_post_accumulate_grad_hook(lambda one: arrived.add(id(one)))  # type: ignore[no-untyped-call]


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return _tensors(value for state in optimizer.state.values() for value in state.values())


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield from plain_parts(value)
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
