"""Predicts the peak memory of a full training step on fake tensors, which have no memory and compute nothing.

The traced step is one that `fit` makes in the middle of training: gradients and optimizer state exist, gradients are
accumulated, outputs are freed before the backward pass, autocast caches cast weights, and the optimizer updates. Speed
is not predicted.

For a card the fakes claim to be CUDA tensors, which needs no driver, so that the dispatcher takes CUDA's paths. The
alternative, CPU fakes with rules for every difference, would have to rewrite dropout, batch norm and autocast's lists.
The parts that need a driver (autograd's engine, the choice of attention kernel) are replaced in
`_estimate/fake_backward.py` and `_estimate/cuda_dispatch.py`.
"""

from __future__ import annotations

import gc
import logging
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoaccum._arguments import check_positive_int
from autoaccum._data.batches import count
from autoaccum._data.nesting import map_tensors, tensors_in
from autoaccum._engine.forward_backward import TrainingStep
from autoaccum._engine.optimizers import resolve
from autoaccum._engine.options import Options
from autoaccum._engine.precision import PRECISIONS, Precision, own_half_type
from autoaccum._estimate import cudnn_recurrent
from autoaccum._estimate.card_properties import CardAnswers
from autoaccum._estimate.cuda_kernels import workspace
from autoaccum._estimate.fake import Stage, batch_like, built_on_meta, drops_layers, keep_every_layer, why_stuck
from autoaccum._estimate.fake_step import FakePrecision, LooseObjective, Rehearsal
from autoaccum._estimate.own_thread import ONE_AT_A_TIME
from autoaccum._estimate.step_sizes import TracedSizes
from autoaccum._estimate.trace import Traced
from autoaccum._estimate.uncertainty import margin_for
from autoaccum._loss.objective import Objective
from autoaccum._memory.simulated import Simulated
from autoaccum._system.notices import Notices
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from autoaccum._data.pieces import Split
    from autoaccum._engine.optimizers import MakesOptimizer
    from autoaccum._estimate.allocation_trace import Timeline
    from autoaccum._estimate.gpus import Card
    from autoaccum._estimate.trace import Estimate
    from autoaccum._loss.objective import Loss


__all__ = ["NotTracedError", "Traced", "estimate_step", "trace_step"]

# Dimensions of token tensors: samples and tokens.
_WITH_LENGTH = 2
_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_CONVOLUTIONS = torch.nn.modules.conv._ConvNd
_OF_LENGTHS = "; varying lengths fragment the cache (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help)"
_OF_LAYERS = "layers that training drops at random (layerdrop) are counted as kept; a step that drops some needs less"
# From the runs in docs/dev/estimates.md, "Against real cards".
_OF_CUDNN = (
    "cuDNN chooses its convolutions' workspace at run time; only Winograd's, in float32 without Tensor Cores, is "
    "counted, and measured runs (in fp32, on two cards) used from 11 % less to 20 % more than predicted"
)


class NotTracedError(InvalidInputError):
    """A step cannot be traced on fake tensors, which have no values."""


def trace_step(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    loss: Loss | Sequence[Loss] | None = None,
    optimizer: torch.optim.Optimizer | MakesOptimizer | None = None,
    precision: str = "fp32",
    forward: Callable[[nn.Module, Any], Any] | None = None,
    loss_reduction: str | None = None,
    clip_grad_norm: float | None = None,
    kind: str = "cpu",
    sizes: Sequence[int] | None = None,
    most: int | None = None,
    adapt: Callable[[nn.Module], AbstractContextManager[object]] | None = None,
    weights: torch.dtype | None = None,
    tensor_float: bool = True,
    split: Split | None = None,
    card: Card | None = None,
) -> Traced:
    """Trace a training step at a few sizes, without the device.

    Args:
        model: The model, which is not changed; or a function without arguments that makes it. The function is called on
            the meta device, so that the model can have any size; if it reads values of tensors, it is called again on
            the CPU.
        batch: A batch as the loader yields it; other sizes are made of its samples, with their lengths.
        loss: As for `fit`.
        optimizer: As for `fit`; an instance is copied without its state.
        precision: As for `fit`.
        forward: As for `fit`.
        loss_reduction: As for `fit`.
        clip_grad_norm: As for `fit`.
        kind: The kernels to trace: "cpu" or "cuda".
        sizes: The sizes to trace; None for a few from 1 to `most`.
        most: The largest size of interest; None means the batch's own length.
        adapt: Takes the traced copy of the model and returns a context in which it is changed, such as
            `checkpointing.checkpointed`. The copy is on the CPU or claims to be on "cuda:0".
        weights: The type of parameters, buffers, gradients, the optimizer's state and the model's inputs, as after
            `model.to(torch.bfloat16)` on model and loss. None keeps their types.
        tensor_float: With kind="cuda", whether the card computes float32 with Tensor Cores (TF32, from Ampere on).
        split: As for `fit`.
        card: With kind="cuda", the card whose capability, name and memory the model is told if it asks; None for any.
            `Traced.holds_for` says for which others the trace holds.

    Raises:
        InvalidInputError: An argument cannot be used.
        NotTracedError: The step cannot be traced without values.
    """
    samples = count(batch, split)
    largest = samples if most is None else check_positive_int("most", most)
    if kind not in ("cpu", "cuda"):
        raise InvalidInputError(f"kind={kind!r} is unknown; choose 'cpu' or 'cuda'")
    if precision not in PRECISIONS:
        raise InvalidInputError(f"precision={precision!r} is unknown; choose one of {', '.join(map(repr, PRECISIONS))}")
    for size in sizes or ():
        check_positive_int("each of sizes", size)
    asked = sorted(set(sizes)) if sizes else sorted({1, min(2, largest), -(-largest // 2), largest})
    notices = Notices(silent=True)
    made = model if isinstance(model, nn.Module) else built_on_meta(model, notices)
    if precision == "auto":
        precision = "bf16" if kind == "cuda" else "fp32"
    job = _Job(
        made,
        batch,
        loss,
        optimizer,
        precision,
        forward,
        loss_reduction,
        clip_grad_norm,
        kind,
        adapt,
        weights,
        tensor_float,
        split,
        CardAnswers(card, tensor_float=tensor_float),
    )
    try:
        step_of = TracedSizes(_OnFakes(job), min(2, asked[-1]) if len(asked) > 1 else asked[0], asked[-1])
        return job.traced(step_of, asked, notices.texts)
    except Exception as error:
        reason = why_stuck(error)
        if reason is None:
            raise
        raise NotTracedError(
            f"the model cannot be traced without values: {reason}; measure it on a device (preflight with device=, or "
            "autoaccum report without --gpu), or leave that part out of what is predicted"
        ) from error


def estimate_step(
    model: nn.Module | Callable[[], nn.Module], batch: Any, *, card: Card | None = None, **options: Any
) -> Estimate:
    """Predict the peak memory of a training step.

    Args:
        model: As for `trace_step`.
        batch: As for `trace_step`.
        card: The card; None for the CPU.
        options: As for `trace_step`, except `kind`, `tensor_float` and `card`.

    Raises:
        InvalidInputError: As for `trace_step`.
    """
    if card is not None and options.get("precision") == "auto":
        options["precision"] = "bf16" if card.bf16 else "fp16"
    if card is None:
        return trace_step(model, batch, kind="cpu", **options).estimate()
    return trace_step(model, batch, kind="cuda", tensor_float=card.tensor_float, card=card, **options).estimate(card)


@dataclass(frozen=True, slots=True)
class _Job:
    """The arguments of `trace_step`, ready to be traced."""

    model: nn.Module
    batch: Any
    loss: Any
    optimizer: Any
    precision: str
    forward: Any
    loss_reduction: str | None
    clip_grad_norm: float | None
    kind: str
    adapt: Callable[[nn.Module], AbstractContextManager[object]] | None = None
    weights: torch.dtype | None = None
    tensor_float: bool = True
    split: Split | None = None
    answers: CardAnswers = field(default_factory=CardAnswers)

    def adapted(self, step: TrainingStep) -> AbstractContextManager[object]:
        return nullcontext() if self.adapt is None else self.adapt(step.objective.model)

    def staged(self, device: torch.device) -> TrainingStep:
        notices = Notices(silent=True)
        stage = Stage(device, weights=self.weights)
        model = stage.copied(self.model)
        keep_every_layer(model)
        if self.weights is not None:
            model.register_forward_pre_hook(partial(_cast, self.weights), with_kwargs=True)
        loss = stage.copied(self.loss) if isinstance(self.loss, nn.Module) else self.loss
        kind = LooseObjective if device.type == "cuda" else Objective
        objective = kind(
            model, loss, forward=self.forward, loss_reduction=self.loss_reduction, notices=notices, split=self.split
        )
        given = self.optimizer
        made = stage.optimizer(given) if isinstance(given, torch.optim.Optimizer) else given
        chosen = resolve(made, objective.modules, notices)
        if device.type == "cuda":
            take_lists(chosen)
        own = own_half_type(model)
        how: Precision
        if device.type == "cuda":
            how = FakePrecision(own or self.precision, autocasts=own is None)
        else:
            how = Precision(own or self.precision, device, autocasts=own is None)
        options = Options(clip_grad_norm=self.clip_grad_norm)
        return TrainingStep(objective, chosen, how, Simulated(2**60), options)

    def traced(self, step_of: TracedSizes, sizes: Sequence[int], notes: Sequence[str]) -> Traced:
        """Return the traced step, with what is assumed of it and how uncertain it is."""
        assumed, share = self._notes(), 0.0
        if self.kind == "cuda":
            margin = margin_for(self.model.modules(), own_half_type(self.model) or self.precision)
            assumed, share = (*assumed, margin.basis), margin.share
        return Traced(
            step_of, tuple(sizes), self.kind, (*notes, *assumed), share, step_of.rough, told=self.answers.told
        )

    def _notes(self) -> tuple[str, ...]:
        """Return the assumptions."""
        lengths = {
            tensor.shape[1]
            for tensor in tensors_in(self.batch)
            if tensor.dim() == _WITH_LENGTH and not tensor.is_floating_point()
        }
        notes = []
        if lengths:
            told = f"sequences have the length of the batch passed: {', '.join(map(str, sorted(lengths)))}"
            notes.append(told + _OF_LENGTHS if self.kind == "cuda" else told)
        if drops_layers(self.model):
            notes.append(_OF_LAYERS)
        if self.kind == "cuda" and any(isinstance(part, _CONVOLUTIONS) for part in self.model.modules()):
            notes.append(_OF_CUDNN)
        if self.kind == "cuda" and any(isinstance(part, nn.RNNBase) for part in self.model.modules()):
            notes.append(cudnn_recurrent.NOTE)
        return tuple(notes)


def take_lists(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer work on lists of tensors, as on a card; with fakes it would not."""
    if isinstance(optimizer, torch.optim.Adafactor):  # uses them only on request
        return
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True


def _cast(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast a model's floating-point inputs; a forward pre-hook."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, args), map_tensors(cast, kwargs)


class _OnFakes:
    """Traces sizes of a step without memory, now or later."""

    def __init__(self, job: _Job) -> None:
        cuda = job.kind == "cuda"
        self._job = job
        self._device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        # Without fallback kernels, which would allocate memory.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        with _undisturbed(), self._mode:
            # PyTorch 2.8 calls the driver before each operator on a CUDA fake. Here that raises an error that can be
            # handled; inside some operators it ends the process.
            torch.empty(2, device=self._device)[:1]
            self._step = job.staged(self._device)
            with job.adapted(self._step):
                self._rehearsal = Rehearsal(
                    self._step,
                    self._device,
                    clip_grad_norm=job.clip_grad_norm,
                    workspace_of=partial(workspace, tensor_float=job.tensor_float) if cuda else None,
                    transfers=cuda,
                    answers=job.answers,
                )

    def __call__(self, size: int) -> Timeline:
        with _undisturbed(), self._mode, self._job.adapted(self._step):
            return self._rehearsal.run(batch_like(self._job.batch, size, self._device, self._job.split), size)


@contextmanager
def _undisturbed() -> Iterator[None]:
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
