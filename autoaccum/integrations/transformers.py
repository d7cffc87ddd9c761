"""Trains with Transformers' `Trainer`, or a class made from it such as TRL's, in micro-batches that fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import mul
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from autoaccum._data.batches import Window
from autoaccum._data.packed_rows import PackedRows
from autoaccum._data.reading import refuse_flattened
from autoaccum._engine.dtensor import OTHERWISE, fsdp_modules
from autoaccum._engine.options import Options
from autoaccum._system.notices import Notices
from autoaccum._training.accumulator import Accumulator
from autoaccum.errors import InvalidInputError
from autoaccum.integrations._paired_rows import PairedRows
from autoaccum.integrations._trainer_evaluation import EvaluationInParts, own_tokens
from autoaccum.integrations._trainer_logs import held_logs, log_held
from autoaccum.integrations.accelerate import check_strategy, is_fsdp2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autoaccum._callbacks import Callback
    from autoaccum._data.pieces import Split
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import BackwardReport, Plan
    from autoaccum.integrations._trainer_logs import Held

_TrainerType = TypeVar("_TrainerType", bound=type[Trainer])

# Optimizers that step in the backward pass.
_STEP_EARLY = ("lomo", "adalomo")
# Collators of rows that hold several sequences each, or pairs of them.
_FLATTENED = "DataCollatorWithFlattening"
# TRL's trainers that were tried, and the losses of preferences that are no means over pairs.
_TRIED = {"SFTTrainer", "RewardTrainer", "DPOTrainer", "GRPOTrainer", "RLOOTrainer", "KTOTrainer"}
_WITH_FSDP2 = (None, "SFTTrainer")
# Sizes in Transformers' `distributed_config` of tensor, pipeline and expert parallelism.
_SHARED_SAMPLES = ("tp_size", "pp_size", "ep_size")
_NOT_OF_PAIRS = {"aot": "sorts all pairs", "aot_unpaired": "sorts all pairs", "sft": "is a mean over tokens"}
_GO_ON = "use it without auto_accumulate(), in a function with @autoaccum.find_executable_micro_batch(target=...)"
_PREFERENCES = ("DataCollatorForPreference", "DataCollatorForVisionPreference")


def auto_accumulate(
    trainer: _TrainerType,
    *,
    loss_reduction: str | None = None,
    split: Split | None = None,
    batchnorm: str = "keep",
    callbacks: Sequence[Callback] = (),
    device: MemoryBackend | None = None,
    micro_batch: int | str = "auto",
    memory_limit: float | str | None = None,
    save_memory: str | Sequence[str] | None = None,
) -> _TrainerType:
    """Return a trainer class that computes each optimizer step's gradient in micro-batches that fit.

        SFTTrainer = autoaccum.integrations.transformers.auto_accumulate(SFTTrainer)

    It is used as before. `per_device_train_batch_size` is now the batch that you mean for this device, whatever fits at
    once, and `gradient_accumulation_steps` multiplies it as before. When memory runs out, in training or evaluation,
    what failed is undone and restarted in smaller micro-batches. The loss of an optimizer step is a mean over all its
    tokens, on all ranks, also for models that take no `num_items_in_batch`. Trainers that generate (GRPO, RLOO) are cut
    after generation and scoring, each batch by itself. TRL's metrics are those of each micro-batch, as with
    accumulation.

    Args:
        trainer: `transformers.Trainer`, or a class made from it.
        loss_reduction: As for `fit`.
        split: Counts, cuts and joins the batches that the collator returns; None where samples run along the first
            dimension, for TRL's batches of preferences, and for packed rows of known collators
            (`autoaccum.PackedRows`).
        batchnorm: As for `fit`.
        callbacks: autoaccum's callbacks, called when memory runs out and when the plan changes.
        device: A memory backend that stands for the trainer's device, such as `autoaccum.Simulated`; None for the
            trainer's own.
        micro_batch: The most samples at once; "auto" finds it.
        memory_limit: As for `fit`.
        save_memory: As for `fit`.

    The class has one more attribute, `autoaccum`: what it found (`plan`), and `last_backward`, the `BackwardReport` of
    the last optimizer step.

    Raises:
        InvalidInputError: `trainer` is no such class, or has been passed to this function before, or another argument
            cannot be used. `train()` raises it for DeepSpeed, FSDP1 and other strategies, several GPUs in one process,
            optimizers that step in the backward pass, an optimizer step whose batches the class's `training_step` has
            not passed on to that of its base, and `Trainer.log` within `compute_loss`.
    """
    options = Options.of(auto_accumulate, locals())
    if not isinstance(trainer, type) or not issubclass(trainer, Trainer):
        raise InvalidInputError(
            f"auto_accumulate({trainer!r}) needs a class made from transformers.Trainer; pass the class, and create "
            "the trainer from what is returned"
        )
    if issubclass(trainer, _Innermost):
        raise InvalidInputError(f"{trainer.__name__} has been passed to auto_accumulate() already; use it as it is")
    kind = _of_trl(trainer)
    if kind is not None and kind not in _TRIED:
        raise InvalidInputError(
            f"{kind} was never tried with auto_accumulate(), and its loss may compare samples of a batch; {_GO_ON}"
        )
    # The innermost class comes last before `Trainer`, so that what TRL's trainers do around a training step stays.
    bases = (_Outermost, _Innermost) if trainer is Trainer else (_Outermost, trainer, _Innermost)
    names = {"__doc__": trainer.__doc__, "__module__": __name__, "_autoaccum_options": options}
    metaclass: Any = type(trainer)
    return metaclass(f"AutoAccumulate{trainer.__name__}", bases, names)  # type: ignore[no-any-return]


class TrainerGradients:
    """Computes the gradients of one trainer's optimizer steps.

    Args:
        trainer: The trainer.
        options: What `auto_accumulate` was called with.

    Attributes:
        last_backward: What was done for the last optimizer step; None before the first one.
        is_computed: Whether the gradient of the optimizer step to come has been computed here.
    """

    def __init__(self, trainer: Any, options: Options) -> None:
        self.last_backward: BackwardReport | None = None
        self.is_computed = False
        self._trainer = trainer
        self._notices = Notices()
        self._split = _split_of(trainer.data_collator) if options.split is None else options.split
        self._options = replace(options, split=self._split, notices=self._notices, precision="fp32")
        self._held: list[Held] = []  # of calls for this window
        self._model: nn.Module | None = None
        self._accumulator: Accumulator | None = None
        self._evaluation: EvaluationInParts | None = None
        self._pending: list[dict[str, Any]] = []
        self._counts: list[Any] = []
        self._items: Any = None
        # It makes its batches itself, with normalisers that belong to each as it was made.
        self._generates = _generates(trainer)

    @property
    def plan(self) -> Plan | None:
        """How batches are split; None before the first one."""
        return None if self._accumulator is None else self._accumulator.plan

    def begin(self) -> None:
        """Begin a training: nothing of an earlier one is left over.

        Raises:
            InvalidInputError: The gradient cannot be computed this way.
        """
        self.is_computed = False
        self._pending.clear()
        self._counts.clear()
        _check(self._trainer)

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], items: Any) -> torch.Tensor:
        """Take one batch; with the last one of an optimizer step, compute the gradient of them all.

        Args:
            model: The model, as the trainer has wrapped it.
            inputs: The batch.
            items: The trainer's `num_items_in_batch`.

        Returns:
            The optimizer step's loss, a scalar, for its last batch; 0 for the others.
        """
        trainer = self._trainer
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        self._pending.append(self._prepared(trainer._prepare_inputs(inputs)))
        # Batches that an epoch leaves over come with the next optimizer step, and have a count of their own.
        if not self._counts or items is not self._counts[-1]:
            self._counts.append(items)
        if not trainer.accelerator.sync_gradients and not self._generates:
            return torch.zeros((), device=trainer.args.device)
        batches, self._pending = self._pending, []
        counts, self._counts = self._counts, []
        self._items = self._over_all_ranks(None if any(one is None for one in counts) else sum(counts))
        if not self._generates:
            trainer.current_gradient_accumulation_steps = 1  # all are one here; TRL divides a router's loss by it
        accumulator = self._accumulator_of(_inner(model))
        self._held.clear()
        report = accumulator.backward(batches[0] if len(batches) == 1 else Window(batches, self._split))
        # Those before are of samples that the loss was checked on, and of attempts that failed.
        held = self._held[-len(report.micro_batches) :]
        log_held(trainer, held)
        self.last_backward, self.is_computed = report, True
        loss = report.loss - self._counted_again(accumulator, held, report.micro_batches)
        return torch.tensor(loss, device=trainer.args.device)

    def prediction_step(self, step: Callable[[Mapping[str, Any]], Any], inputs: Mapping[str, Any]) -> Any:
        """Run the trainer's `prediction_step` on a batch, in parts that fit.

        Args:
            step: The trainer's own, as a function of a batch.
            inputs: The batch.
        """
        if _is_sharded(self._trainer):
            return step(inputs)  # in which all ranks wait for each other
        if self._evaluation is None or self._evaluation.model is not self._trainer.model:
            self._evaluation = EvaluationInParts(self._trainer, self._options, self._notices)
        return self._evaluation.run(step, inputs)

    # --- a micro-batch ------------------------------------------------------------------------------------------------

    def _loss(self, batch: Mapping[str, Any]) -> Any:
        """Return the loss of a micro-batch, as the trainer computes it."""
        trainer = self._trainer
        with held_logs(trainer) as held, own_tokens(trainer.args), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(self._model, batch, num_items_in_batch=self._items)
        if self._generates and not self._is_scaled():
            loss = loss / trainer.current_gradient_accumulation_steps
        if self._accumulator is None or not self._accumulator._step.is_spare:
            self._held.append(held)
        return loss

    def _counted_again(self, accumulator: Accumulator, held: Sequence[Held], sizes: Sequence[int]) -> float:
        """Return by how much the report's loss exceeds the window's: beside a sum, a router's counts each time."""
        trainer = self._trainer
        losses = [value for one in held for value in one.get(("train", "aux_loss"), ())]
        if not losses or not accumulator._step.objective.knowledge.counts_again:
            return 0.0
        own = [sum(losses), sum(map(mul, losses, sizes)), sum(sizes)]
        of_ranks = trainer.accelerator.gather(torch.tensor([own], device=trainer.args.device))
        counted, weighed, samples = of_ranks.sum(0).tolist()
        coefficient = getattr(trainer, "router_aux_loss_coef", 0.0) / trainer.current_gradient_accumulation_steps
        return float(coefficient * (counted - weighed / samples))

    def _is_scaled(self) -> bool:
        """Whether the trainer does not divide losses by the number of accumulated batches, as `Trainer` decides it."""
        trainer = self._trainer
        said = getattr(trainer, "loss_is_scaled_for_ga", None)  # newer versions
        if said is not None:
            return bool(said)
        return trainer.compute_loss_func is not None or (trainer.model_accepts_loss_kwargs and self._items is not None)

    def _prepared(self, inputs: Any) -> dict[str, Any]:
        if not isinstance(inputs, Mapping):
            raise InvalidInputError(
                f"the trainer's batch is a {type(inputs).__name__}, and not a mapping with the model's arguments; let "
                "the data collator return a dictionary"
            )
        if self._split is None:
            try:
                refuse_flattened(inputs)
            except InvalidInputError as error:
                raise InvalidInputError(
                    "a batch is one row of several sequences (packing, padding_free), which cannot be split into "
                    "samples as it is; pass split=autoaccum.PackedRows() to auto_accumulate()"
                ) from error
        return dict(inputs)

    # --- the accumulator ----------------------------------------------------------------------------------------------

    def _accumulator_of(self, model: nn.Module) -> Accumulator:
        """Return what accumulates gradients in a model, newly made whenever the trainer has prepared another one."""
        if self._accumulator is None or self._model is not model:
            self._model = model
            accelerator = self._trainer.accelerator
            options = replace(self._options, device=self._options.device or self._trainer.args.device)
            # The model casts by itself.
            self._accumulator = Accumulator._of(
                model,
                options,
                closure=self._loss,
                scale=accelerator.scaler,
                half=accelerator.mixed_precision,
                is_models_own=True,
            )
        return self._accumulator

    def _over_all_ranks(self, items: Any) -> Any:
        """Return the items of an optimizer step on all ranks, where the trainer has counted this rank's alone."""
        trainer = self._trainer
        if items is None or trainer.accelerator.num_processes == 1 or trainer.args.average_tokens_across_devices:
            return items
        counted = torch.as_tensor(items, device=trainer.args.device)
        return trainer.accelerator.gather(counted.reshape(1)).sum()


class _Innermost(Trainer):
    """What stands between `Trainer` and a class made from it."""

    autoaccum: Any

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss: torch.Tensor = self.autoaccum.training_step(model, inputs, num_items_in_batch)
        return loss


class _Outermost:
    """What stands before the user's class."""

    _autoaccum_options: Options
    _autoaccum: TrainerGradients | None = None

    @property
    def autoaccum(self) -> TrainerGradients:
        """What computes the gradients."""
        if self._autoaccum is None:
            self._autoaccum = TrainerGradients(self, self._autoaccum_options)
        return self._autoaccum

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.autoaccum.begin()
        self.remove_callback(_Watch)  # type: ignore[attr-defined]
        self.add_callback(_Watch(self))  # type: ignore[attr-defined]
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        def step(part: Mapping[str, Any]) -> Any:
            return super(_Outermost, self).prediction_step(  # type: ignore[misc]
                model, part, prediction_loss_only, ignore_keys=ignore_keys
            )

        return self.autoaccum.prediction_step(step, inputs)


class _Watch(TrainerCallback):
    """Raises an error where an optimizer step is about to be made of a gradient that was not computed here."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, *_args: Any, **_kwargs: Any) -> None:
        windows = self._trainer.autoaccum
        if not windows.is_computed:
            raise InvalidInputError(
                f"{type(self._trainer).training_step.__qualname__} has not called super().training_step(...), so its "
                "batch was not run in micro-batches; let it call that, put what it does to the loss into compute_loss, "
                "or use the trainer without auto_accumulate()"
            )
        windows.is_computed = False


def _split_of(collator: Any) -> Split | None:
    """Return how the batches of a known collator are cut; None if by their rows."""
    name = type(collator).__name__
    if name in _PREFERENCES:
        return PairedRows()
    return PackedRows() if name == _FLATTENED or getattr(collator, "padding_free", False) is True else None


def _generates(trainer: Any) -> bool:
    """Whether the trainer makes its batches itself, as those of TRL do that generate."""
    is_own = type(trainer)._prepare_inputs is not Trainer._prepare_inputs
    return is_own and any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)


def _inner(model: nn.Module) -> nn.Module:
    """Return the model without the wrapper that reduces gradients in every backward pass."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _check(trainer: Any) -> None:
    """Check that gradients of a trainer can be computed micro-batch by micro-batch.

    Raises:
        InvalidInputError: They cannot.
    """
    args = trainer.args
    check_strategy(trainer.accelerator)
    if args.n_gpu > 1:
        raise InvalidInputError(
            f"this trainer spreads each batch over {args.n_gpu} GPUs of one process (DataParallel); start one process "
            "for each GPU (torchrun), or let it see one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if optim in _STEP_EARLY:
        raise InvalidInputError(
            f"optim={optim!r} steps in the backward pass, so it would step for each micro-batch; choose another one"
        )
    shares = getattr(getattr(trainer.model, "config", None), "distributed_config", None)
    for name in _SHARED_SAMPLES:
        if (number := getattr(shares, name, None) or 1) > 1:
            raise InvalidInputError(
                f"the model was loaded with distributed_config of {name}={number}, whose ranks share samples in every "
                f"pass; use fsdp_size= alone, or leave auto_accumulate() out, and {OTHERWISE}"
            )
    _check_trl(trainer)


def _is_sharded(trainer: Any) -> bool:
    """Whether Accelerate shards the model by `fully_shard`, or Transformers or the user has."""
    return is_fsdp2(trainer.accelerator) or bool(fsdp_modules([trainer.model]))


def _of_trl(trainer: type) -> str | None:
    """Return the name of the class of TRL that a trainer's class is made from; None if there is none."""
    return next((kind.__name__ for kind in trainer.__mro__ if kind.__module__.startswith("trl.")), None)


def _check_trl(trainer: Any) -> None:
    """Check what a trainer of TRL computes its loss by.

    Raises:
        InvalidInputError: Micro-batches do not give the gradient of the whole batch.
    """
    kind = _of_trl(type(trainer))
    if kind not in _WITH_FSDP2 and _is_sharded(trainer):
        raise InvalidInputError(f"{kind} was never tried with auto_accumulate() and FSDP2; {_GO_ON}")
    is_dpo, is_kto = kind == "DPOTrainer", kind == "KTOTrainer"
    asked = trainer.args.loss_type if is_dpo else []
    for loss_type in [asked] if isinstance(asked, str) else asked:
        if loss_type in _NOT_OF_PAIRS:
            raise InvalidInputError(
                f"loss_type={loss_type!r} {_NOT_OF_PAIRS[loss_type]}, so micro-batches do not give its gradient; "
                f"{_GO_ON}"
            )
    if is_kto and trainer.loss_type != "apo_zero_unpaired":
        raise InvalidInputError(
            f"loss_type={trainer.loss_type!r} of KTOTrainer compares each sample with the mean over the batch (KL), so "
            f"micro-batches do not give its gradient; pass loss_type='apo_zero_unpaired' to KTOConfig, or {_GO_ON}"
        )
    if (is_dpo or is_kto) and getattr(trainer, "aux_loss_enabled", False):
        raise InvalidInputError(
            f"{kind} adds a router's balancing loss, which is no mean over its rows; pass router_aux_loss_coef=0.0 "
            f"to {kind.replace('Trainer', 'Config')}, or {_GO_ON}"  # type: ignore[union-attr]
        )
    if getattr(trainer, "use_adaptive_entropy", False):
        raise InvalidInputError(
            "use_adaptive_entropy=True counts the entropies of every call of compute_loss, of which micro-batches make "
            "several; set entropy_coef= instead"
        )
