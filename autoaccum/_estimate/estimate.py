"""Predicts the peak memory of a full training step on fake tensors, which have no memory and compute nothing.

Speed is not predicted.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from autoaccum._arguments import check_positive_int
from autoaccum._data.batches import count
from autoaccum._data.nesting import tensors_in
from autoaccum._engine.precision import own_half_type
from autoaccum._estimate.fake import built_on_meta, why_stuck
from autoaccum._estimate.fake_step import FakeJob, FakeStep, take_lists
from autoaccum._estimate.gpu_properties import GPUAnswers
from autoaccum._estimate.trace import Traced, TracedSizes
from autoaccum._estimate.uncertainty import margin_for
from autoaccum._system.notices import Notices
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from autoaccum._data.pieces import Split
    from autoaccum._engine.optimizers import MakesOptimizer
    from autoaccum._estimate.allocation_trace import Timeline
    from autoaccum._estimate.fake_step import Adapt
    from autoaccum._estimate.gpus import GPU
    from autoaccum._estimate.trace import Estimate
    from autoaccum._loss.loss_sources import Loss


__all__ = ["NotTracedError", "Traced", "estimate_step", "take_lists", "trace_step"]

# Dimensions of token tensors: samples and tokens.
_WITH_LENGTH = 2
_OF_LENGTHS = "; varying lengths fragment the cache (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help)"
# From the runs in docs/dev/estimates.md, "Against real GPUs".
_OF_CUDNN = (
    "cuDNN chooses its convolutions' workspace at run time; only Winograd's, in float32 without Tensor Cores, is "
    "counted, and measured runs (in fp32, on two GPUs) used from 11% less to 20% more than predicted"
)


class NotTracedError(InvalidInputError):
    """A step cannot be predicted by fake tensors, which have no values."""


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
    adapts: Sequence[Adapt] = (),
    tensor_float: bool = True,
    split: Split | None = None,
    gpu: GPU | None = None,
) -> Traced:
    """Trace a training step at a few sizes, without the device.

    Args:
        model: The model, which is not changed; or a function without arguments that makes it. The function is called on
            the meta device, so that the model can have any size; if it reads values of tensors, it is called again on
            the CPU.
        batch: A batch as the loader yields it; other sizes are made of its samples, with their lengths.
        loss: As for `fit`.
        optimizer: As for `fit`; an instance is copied without its state.
        precision: As for `fit`, but for "auto".
        forward: As for `fit`.
        loss_reduction: As for `fit`.
        clip_grad_norm: As for `fit`.
        kind: The kernels to trace: "cpu" or "cuda".
        sizes: The sizes to trace; None for a few from 1 to `most`.
        most: The largest size of interest; None means the batch's own length.
        adapts: Each takes the traced copy of the model and returns a context in which it is changed, such as
            `checkpointing.checkpointed`. The copy is on the CPU or claims to be on "cuda:0".
        tensor_float: With kind="cuda", whether the GPU computes float32 with Tensor Cores (TF32, from Ampere on).
        split: As for `fit`.
        gpu: With kind="cuda", the GPU whose capability, name and memory the model is told if it asks; None for any.
            `Traced.holds_for` says for which others the trace holds.

    Raises:
        InvalidInputError: An argument cannot be used.
        NotTracedError: The step cannot be traced without values, or has recurrent layers on a GPU.
    """
    largest = count(batch, split) if most is None else check_positive_int("most", most)
    asked = sorted(set(sizes)) if sizes else sorted({1, min(2, largest), -(-largest // 2), largest})
    notices = Notices(silent=True)
    job = FakeJob(
        model=model if isinstance(model, nn.Module) else built_on_meta(model, notices),
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        precision=precision,
        forward=forward,
        loss_reduction=loss_reduction,
        clip_grad_norm=clip_grad_norm,
        kind=kind,
        tensor_float=tensor_float,
        split=split,
        answers=GPUAnswers(gpu, tensor_float=tensor_float),
    )
    if kind == "cuda" and (layer := next((one for one in job.model.modules() if isinstance(one, nn.RNNBase)), None)):
        raise NotTracedError(
            f"the memory of {type(layer).__name__} on a GPU is not predicted, since cuDNN does not say what it keeps; "
            "measure the model on the GPU, without its name"
        )
    with _in_words():
        step = FakeStep(job)
    notes, share = [*notices.texts, *_notes(job)], 0.0
    if kind == "cuda":
        margin = margin_for(job.model.modules(), own_half_type(job.model) or precision)
        notes.append(margin.basis)
        share = margin.share

    def traced(sizes: Sequence[int], adapts: Sequence[Adapt]) -> Traced:
        @_in_words()
        def run(size: int) -> Timeline:
            return step(size, adapts)

        step_of = TracedSizes(run, min(2, asked[-1]) if len(asked) > 1 else asked[0], asked[-1])
        return Traced(step_of, tuple(sizes), tuple(notes), share, job.answers.answered, changed_by)

    def changed_by(more: Sequence[Adapt]) -> Traced:
        return traced(asked[-1:], [*adapts, *more])

    return traced(asked, adapts)


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = why_stuck(error)
        if reason is None:
            raise
        raise NotTracedError(
            f"the model cannot be traced without values: {reason}; measure it on a device, without the name of a "
            "GPU, or leave that part out of what is predicted"
        ) from error


def estimate_step(
    model: nn.Module | Callable[[], nn.Module], batch: Any, *, gpu: GPU | None = None, **options: Any
) -> Estimate:
    """Predict the peak memory of a training step.

    Args:
        model: As for `trace_step`.
        batch: As for `trace_step`.
        gpu: The GPU; None for the CPU.
        options: As for `trace_step`, except `kind`, `tensor_float` and `gpu`.

    Raises:
        InvalidInputError: As for `trace_step`.
    """
    if gpu is None:
        return trace_step(model, batch, kind="cpu", **options).estimate()
    return trace_step(model, batch, kind="cuda", tensor_float=gpu.bf16, gpu=gpu, **options).estimate(gpu)


def _notes(job: FakeJob) -> Iterator[str]:
    """Yield what is assumed of a job."""
    is_cuda, modules = job.kind == "cuda", list(job.model.modules())
    lengths = {
        tensor.shape[1]
        for tensor in tensors_in(job.batch)
        if tensor.dim() == _WITH_LENGTH and not tensor.is_floating_point()
    }
    if lengths:
        text = f"sequences have the length of the batch passed: {', '.join(map(str, sorted(lengths)))}"
        yield text + _OF_LENGTHS if is_cuda else text
    if is_cuda and any(isinstance(part, nn.modules.conv._ConvNd) for part in modules):
        yield _OF_CUDNN
