"""A call of `fit` that is not made yet: the arguments, kept together and named as `fit` names them.

What `fit` would refuse is not refused here: a job is checked when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import nn

from autoaccum._arguments import check_call
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from os import PathLike

    import torch

    from autoaccum._callbacks import Callback
    from autoaccum._engine.evaluation import Metric
    from autoaccum._engine.optimizers import MakesOptimizer
    from autoaccum._loss.objective import Loss
    from autoaccum._memory.base import MemoryBackend


@dataclass(frozen=True, eq=False)
class Job:
    """What `autoaccum.fit` needs, as a recipe function returns it.

    Attributes:
        model: The module, or a function without arguments that makes it; then it is made only when it is
            needed, and where (such as on the meta device).
        loader: The batches.
        target_batch: Samples an optimizer update is made from.
        loss: As for `fit`.
        optimizer: As for `fit`; for a model that a function makes, give a function of its parameters.
        scheduler: As for `fit`, and so are all that follow.
    """

    model: nn.Module | Callable[[], nn.Module]
    loader: Iterable[Any]
    target_batch: int
    loss: Loss | Sequence[Loss] | None = None
    optimizer: torch.optim.Optimizer | MakesOptimizer | None = None
    scheduler: Any = None
    scheduler_interval: str = "step"
    epochs: int | None = None
    max_steps: int | None = None
    device: str | torch.device | MemoryBackend | None = None
    precision: str = "auto"
    micro_batch: int | str = "auto"
    probe: str = "inline"
    strategy: str | None = None
    cache: bool = True
    compile: bool | Mapping[str, Any] = False
    memory_limit: float | str | None = None
    clip_grad_norm: float | None = None
    last_window: str = "step"
    lr_scaling: str | None = None
    base_batch: int | None = None
    val_loader: Iterable[Any] | None = None
    metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None = None
    forward: Callable[[nn.Module, Any], Any] | None = None
    loss_reduction: str | None = None
    loss_scope: str = "micro_batch"
    batchnorm: str = "keep"
    fallback: str | Sequence[str] | None = None
    callbacks: Sequence[Callback] = ()
    seed: int | None = None
    checkpoint: str | PathLike[str] | None = None
    checkpoint_steps: int | None = None
    checkpoint_minutes: float | None = 10.0
    resume: bool | str = "auto"
    oom_report: str | PathLike[str] | None = None
    shard: bool = False
    shares: str = "equal"
    overlap: bool = False
    on_nan: str = "warn"

    def fit_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for `fit`, the model made.

        Raises:
            InvalidInputError: `model` is neither a module nor a function that returns one.
        """
        arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        arguments["model"] = self._made_model()
        return arguments

    def _made_model(self) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return self.model
        if callable(self.model):
            check_call("model", self.model, "")
        made = self.model() if callable(self.model) else self.model
        if not isinstance(made, nn.Module):
            how = "a function that returned" if made is not self.model else "a value of type"
            raise InvalidInputError(
                f"a job's model must be a torch.nn.Module or a function without arguments that makes one; "
                f"this one is {how} {type(made).__name__}"
            )
        return made
