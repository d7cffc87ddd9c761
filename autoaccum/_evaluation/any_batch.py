"""Makes a function of one batch one that takes any batch: it is run on parts that fit, and the results are joined."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from autoaccum._arguments import check_function, check_positive_int
from autoaccum._data.batches import Window
from autoaccum._data.nesting import leaves_of, map_leaves, shapes_of
from autoaccum._data.splits import check_split
from autoaccum._engine import devices
from autoaccum._engine.does_not_fit import refusal
from autoaccum._engine.savepoint import Savepoint
from autoaccum._engine.step_limit import StepLimit
from autoaccum._evaluation.parts_that_fit import PartsThatFit
from autoaccum._loss.closures import modules_used_by
from autoaccum._sizing.events import Events
from autoaccum._system.notices import Notices
from autoaccum._system.reason_file import writes_reason
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autoaccum._data.pieces import Split
    from autoaccum._memory.base import MemoryBackend

_P = ParamSpec("_P")
_T = TypeVar("_T")


def batched(
    function: Callable[Concatenate[Any, _P], _T],
    *,
    split: Split | None = None,
    join: Callable[[Sequence[_T]], _T] | None = None,
    device: str | torch.device | MemoryBackend | None = None,
    micro_batch: int | None = None,
) -> Callable[Concatenate[Any, _P], _T]:
    """Return a function that takes batches of any size, and runs `function` on parts of them that fit.

        generate = autoaccum.batched(lambda batch: model.generate(**batch, max_new_tokens=20), join=padded)
        embed = autoaccum.batched(lambda images: model(images.to("cuda")))
        vectors = embed(images)  # (N, D), in order

    The whole batch is tried first. When memory runs out, the part that failed is run again in smaller ones; the size is
    kept for batches of as many samples, and grows back later (on the CPU, where a failure can crash, it stays).
    Gradients are off. Modules that the function refers to keep their modes; their state and random state are restored
    where a part is run again.

    Args:
        function: A function of a batch, and of other arguments that are passed on to each of its parts. It moves the
            batch to the device itself, and may be called again for the same samples.
        split: As for `fit`.
        join: A function of a list of results, in order; None where results hold one row or item for each sample, in
            tensors, lists, tuples and mappings. Sequences of unlike length need one that pads.
        device: The device, or its memory backend; None for that of the modules that the function refers to.
        micro_batch: The most samples at once; None for all.

    Raises:
        InvalidInputError: An argument cannot be used. When the function is called: the batch cannot be cut, or results
            have no row for each sample.
        DoesNotFitError: When the function is called: not even one sample fits.
    """
    check_function("function", function, "batch", takes_more=True)
    check_split(split)
    if join is not None:
        check_function("join", join, "results")
    if micro_batch is not None:
        check_positive_int("micro_batch", micro_batch)
    notices, found = Notices(), nn.ModuleList(modules_used_by(function))
    memory = devices.resolve(device, found, notices)
    limit = StepLimit(memory, None)
    remedies = ["lower precision", "shorter samples", "results that leave the device"]
    parts = PartsThatFit(
        memory,
        Savepoint(found, memory.device, [function]),
        lambda said, sample: refusal(memory, f"{sample} does not fit", said, remedies),
        Events(memory, notices=notices).ran_out,
    )
    parts.begin(micro_batch)
    at_work = threading.RLock()  # other threads wait: what a part that failed has moved is restored

    @functools.wraps(function)
    @writes_reason
    def of_any(batch: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        window = Window.of_checked([batch], split)

        def one(start: int, size: int) -> _T:
            return function(window.cut(start, start + size), *args, **kwargs)

        with at_work, limit.in_force(), torch.no_grad():
            done = [(result, size) for size, result in parts.of(window, one)]
            if not window.samples:
                done = [(function(batch, *args, **kwargs), 0)]
        return _joined(done) if join is None else join([result for result, _ in done])

    return of_any


def _joined(done: Sequence[tuple[Any, int]]) -> Any:
    """Return results of parts, each with its number of samples, as that of the batch."""
    columns = [[leaf for _, leaf in leaves_of(result)] for result, _ in done]
    if len(done) > 1 and all(_is_by_sample(*of_part) for of_part in done):
        result, size = done[0]
        raise InvalidInputError(
            f"the function returned {_described(result)} for {size} samples, a list which may hold one tensor for each "
            "of them or one for each output; return outputs in a tuple, or pass join=, a function of the list of "
            "results"
        )
    for leaves, (result, size) in zip(columns, done, strict=True):
        if len(leaves) != len(columns[0]) or not all(map(_has_rows, leaves, [size] * len(leaves))):
            raise InvalidInputError(
                f"the function returned {_described(result)} for {size} samples, which has not one row for each of "
                "them; return rows, or pass join=, a function of the list of results"
            )
    if len(done) == 1:
        return done[0][0]
    joined = iter([_joined_leaf(column) for column in zip(*columns, strict=True)])
    return map_leaves(lambda _: next(joined), done[0][0])


def _described(result: Any) -> str:
    shapes = shapes_of(result)
    return f"a {type(result).__name__}{shapes and f' with shapes {shapes}'}"


def _has_rows(leaf: Any, size: int) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0 and len(leaf) == size
    return leaf is None or (isinstance(leaf, list | tuple) and len(leaf) == size)


def _is_by_sample(result: Any, size: int) -> bool:
    """Whether a result may have a tensor for each sample, which need not have one row for each."""
    if isinstance(result, Mapping):
        return any(_is_by_sample(value, size) for value in result.values())
    return isinstance(result, list) and len(result) == size and any(isinstance(one, Tensor) for one in result)


def _joined_leaf(column: Sequence[Any]) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0] and type(column[0])(itertools.chain.from_iterable(column))
    if len({tensor.shape[1:] for tensor in column}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in column[:2])
        raise InvalidInputError(
            f"parts of the batch have results of shapes {shapes}, which cannot be joined; pass join=, a function of "
            "the list of results, which pads them or returns one item for each sample"
        )
    return torch.cat(list(column))
