"""Accelerate's loops with batches of any size: each is run in micro-batches that fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accelerate.utils import extract_model_from_parallel
from torch.nn.parallel import DistributedDataParallel

from autoaccum._arguments import shown
from autoaccum._distributed.consistency import refuse_wrapped
from autoaccum._engine.dtensor import OTHERWISE
from autoaccum._engine.options import Options
from autoaccum._system.attributes import replaced
from autoaccum._training.accumulator import Accumulator
from autoaccum.errors import InvalidInputError
from autoaccum.integrations._refusals import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from accelerate import Accelerator
    from torch import nn

    from autoaccum._callbacks import Callback
    from autoaccum._data.pieces import Split
    from autoaccum._loss.loss_sources import Loss
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import BackwardReport

__all__ = ["auto_accumulate"]

_REFUSED = refusal(
    "Accelerator.log within the loss", "log what the function that auto_accumulate() returned has reported"
)


def auto_accumulate(
    accelerator: Accelerator,
    model: nn.Module,
    *,
    loss: Loss | Sequence[Loss] | None = None,
    closure: Callable[[Any], Any] | None = None,
    loss_reduction: str | None = None,
    loss_scope: str = "micro_batch",
    forward: Callable[[nn.Module, Any], Any] | None = None,
    split: Split | None = None,
    batchnorm: str = "keep",
    callbacks: Sequence[Callback] = (),
    device: MemoryBackend | None = None,
    micro_batch: int | str = "auto",
    memory_limit: float | str | None = None,
    save_memory: str | Sequence[str] | None = None,
) -> Callable[..., BackwardReport]:
    """Return a function of a batch that adds its gradient to `.grad`, whatever fits at once.

        backward = auto_accumulate(accelerator, model, closure=lambda batch: model(**batch).loss)
        for batch in loader:
            report = backward(batch)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    It takes the place of the forward pass, the loss and `accelerator.backward`, and is used as
    `autoaccum.Accumulator.backward`. The loader's batch is the batch of an optimizer step, of this process, or one of
    `gradient_accumulation_steps` within `accelerator.accumulate(model)`. Precision, the gradient scaler and these steps
    are the accelerator's. In several processes, gradients are reduced once a batch, weighted by what the loss runs over
    in all of them; the loss in the report is that of the batches of all processes. With FSDP2 (`fsdp_version=2`), they
    run all passes together.

    Args:
        accelerator: The accelerator.
        model: The model that `accelerator.prepare` returned.
        loss: As for `Accumulator`.
        closure: As for `Accumulator`: what the loop did with a batch, up to its loss. It may call the prepared model.
        loss_reduction: As for `Accumulator`.
        loss_scope: As for `Accumulator`.
        forward: As for `Accumulator`.
        split: As for `Accumulator`.
        batchnorm: As for `Accumulator`.
        callbacks: As for `Accumulator`.
        device: A memory backend that stands for the accelerator's device, such as `autoaccum.Simulated`; None for the
            accelerator's own.
        micro_batch: As for `Accumulator`.
        memory_limit: As for `Accumulator`.
        save_memory: As for `Accumulator`.

    Raises:
        InvalidInputError: An argument cannot be used, the model is not prepared, or the accelerator trains in a way
            that this does not hold for.
        DoesNotFitError: The model itself does not fit on the device.
    """
    options = Options.of(auto_accumulate, locals())
    check_strategy(accelerator)
    _check_prepared(accelerator, model)
    with _in_loss(accelerator, model):
        accumulator = Accumulator._of(
            # Not unwrapped from the autocast that `prepare` has put around its forward, by which the model casts.
            extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=True),
            replace(options, device=accelerator.device if device is None else device, precision="fp32"),
            closure=closure,
            scale=accelerator.scaler,
            half=accelerator.mixed_precision,
            batches=lambda: accelerator.gradient_accumulation_steps,
        )

    def backward(batch: Any, *, keep: str | None = None) -> BackwardReport:
        with _in_loss(accelerator, model):
            return accumulator.backward(batch, keep=keep)

    return backward


def _in_loss(accelerator: Accelerator, model: nn.Module) -> AbstractContextManager[None]:
    """Refuse logs in the block; let a closure that calls the prepared model run the module inside, unreduced."""
    methods: list[tuple[Any, str, Any]] = [(accelerator, "log", _REFUSED)]
    if isinstance(model, DistributedDataParallel):
        methods.append((model, "forward", model.module.__call__))
    return replaced(*methods)


def check_strategy(accelerator: Accelerator) -> None:
    """Check that an accelerator keeps parameters whole, or shards them by FSDP2.

    Raises:
        InvalidInputError: It does otherwise.
    """
    name = str(accelerator.distributed_type.value)
    is_parallel = getattr(accelerator, "parallelism_config", None) is not None
    if is_parallel or not (name.startswith(("NO", "MULTI_")) or is_fsdp2(accelerator)):
        raise InvalidInputError(
            f"the accelerator trains with {'a parallelism_config' if is_parallel else name}, which reduces or shards "
            "gradients in every backward pass, so a rank that fails in one would leave the others waiting; use one "
            "process for each GPU (torchrun), or FSDP with fsdp_version=2. For what stays as it is, leave "
            f"auto_accumulate() out, and {OTHERWISE}"
        )


def is_fsdp2(accelerator: Accelerator) -> bool:
    """Whether an accelerator shards models by `fully_shard`."""
    is_fsdp = str(accelerator.distributed_type.value) == "FSDP"
    return is_fsdp and getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", 1) == 2  # noqa: PLR2004 - its name


def _check_prepared(accelerator: Accelerator, model: nn.Module) -> None:
    whole = getattr(model, "_orig_mod", model)  # accelerators compile last, and keep models as they were before
    inside = whole.module if isinstance(whole, DistributedDataParallel) else whole
    if not any(prepared in (model, whole, inside) for prepared in accelerator._models):
        raise InvalidInputError(
            f"model={shown(model)} is not among the models that this accelerator has prepared; pass what "
            "accelerator.prepare(model, ...) returned"
        )
    if whole is not model:
        refuse_wrapped([whole])
