"""What the parts of one call of `fit` have in common: its arguments once checked, and what was made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from autoaccum._callbacks import Callback
    from autoaccum._data.random_state import RandomState
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.noise_scale import NoiseScale
    from autoaccum._evaluation.metrics import Metric
    from autoaccum._saving.savings import Savings
    from autoaccum._system.notices import Notices
    from autoaccum._training.checkpoint_settings import Saving
    from autoaccum._training.lr_schedule import Schedule
    from autoaccum._training.rank_coordination import Coordinator


@dataclass(frozen=True)
class FitContext:
    """One call of `fit`. Attributes of its arguments' names are as there.

    Attributes:
        step: The training step: model, loss, optimizer, precision and device.
        world: The processes of the training.
        schedule: Moves the learning-rate scheduler.
        random: The generators that the training may draw from.
        notices: Reports choices made for the user.
        target_batch: Samples of a window over all processes, or tokens.
        counts: Which of both: "samples" or "tokens".
        steps_per_epoch: Number of windows per epoch; None if unknown.
        callbacks: Callbacks to notify, the progress display first.
        saving: Where and when checkpoints are written; None without `checkpoint`.
        limit_bytes: The memory limit, as the memory backend counts it.
        cap: Upper bound on the micro-batch, set or found; None for no bound.
        grows_from: The initial size if a size that does not fit would end the process. Nothing is then tried, and sizes
            grow by extrapolation from smaller ones. None if the process survives running out of memory.
        saves: What saves memory, as `fit` takes it in `save_memory`.
        savings: Saves it.
        noise: The gradient noise scale to measure; None without `noise_scale`.
    """

    step: TrainingStep
    world: Coordinator
    schedule: Schedule
    random: RandomState
    notices: Notices
    target_batch: int
    counts: str
    drop_last: bool
    epochs: int | None
    max_steps: int | None
    steps_per_epoch: int | None
    val_loader: Iterable[Any] | None
    val_every: int | None
    metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None
    callbacks: Sequence[Callback]
    saving: Saving | None
    limit_bytes: int | None
    cap: int | None
    grows_from: int | None
    saves: Sequence[str]
    savings: Savings
    noise: NoiseScale | None
