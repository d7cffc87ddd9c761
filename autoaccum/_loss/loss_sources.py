"""What a loss that is given may be: a function of outputs, functions that run the model themselves, or a reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autoaccum._arguments import check_function, is_one_of, shown
from autoaccum._loss import calling_conventions
from autoaccum._loss.closures import Closure
from autoaccum._loss.explaining import OF_SPLIT
from autoaccum._loss.loss_values import TOTAL
from autoaccum._loss.summands import ADDED, BY_SAMPLES, Known
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._data.pieces import Split

CALLS_USER_CODE = True  # for own_code.raised_here

Loss = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Source:
    """One forward pass, which gives a mapping of raw losses by name, and the model's outputs if there are any.

    Attributes:
        run: Runs the pass; called with `Calls` and a batch.
        total: The name of the entry that is the total.
    """

    run: Callable[[Any, Any], tuple[dict[str, Any], Any]]
    total: str = TOTAL


def check_loss_reduction(loss_reduction: object) -> None:
    """Check the argument `loss_reduction`."""
    if loss_reduction is not None and not is_one_of(loss_reduction, ("mean", "sum")):
        raise InvalidInputError(f"loss_reduction={shown(loss_reduction)} is unknown; choose 'mean', 'sum' or None")


def stated_by(loss_reduction: str | None, split: Split | None) -> Known | None:
    """Return how the arguments put together every loss that is a number; None to find it out."""
    if loss_reduction == "sum":
        return ADDED
    if hasattr(split, "weight"):
        return replace(BY_SAMPLES, hints={OF_SPLIT: 1.0})
    return None if loss_reduction is None else BY_SAMPLES


def sources_of(losses: Sequence[Loss]) -> list[Source]:
    if len(losses) == 1 and isinstance(losses[0], Closure):
        return [Source(losses[0].source)]
    found: dict[str, Source] = {}
    for loss in losses:
        name = getattr(loss, "__name__", type(loss).__name__)
        name = name if name not in found else f"{name} {len(found) + 1}"
        found[name] = Source(_one_of_several(name, loss), total=f"{name}/{TOTAL}")
    return list(found.values())


def _one_of_several(name: str, loss: Loss) -> Callable[[Any, Any], tuple[dict[str, Any], Any]]:
    def run(calls: Any, batch: Any) -> tuple[dict[str, Any], Any]:
        try:
            raw = loss(calls.model, batch)
        except (AttributeError, TypeError) as error:
            calling_conventions.explain_list(error, loss, calls.model, batch)
            raise
        return (
            {f"{name}/{key}": value for key, value in raw.items()} if isinstance(raw, Mapping) else {name: raw}
        ), None

    return run


def check_loss(loss: object) -> None:
    if isinstance(loss, list | tuple):
        if not loss or not all(map(callable, loss)):
            raise InvalidInputError(f"loss={shown(loss)}: a list of losses must hold callables of (model, batch)")
        for one in loss:
            check_function("loss", one, "model, batch")
    elif loss is not None and not callable(loss):
        raise InvalidInputError(f"loss={shown(loss)} cannot be called; pass a torch.nn loss, a function or a list")
    elif loss is not None:
        check_function("loss", loss, "outputs, targets")


def no_gradient(names: Iterable[str]) -> InvalidInputError:
    """Return the error for losses of these names that have no graph."""
    return InvalidInputError(
        f"loss {'+'.join(names)!r} has no gradient: it does not depend on a trainable parameter; look for "
        ".detach(), .item() or torch.no_grad() in its computation"
    )
