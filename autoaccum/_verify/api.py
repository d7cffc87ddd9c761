"""`verify` for a function, and `verify_command` for `autoaccum verify`: choose the splits, run them, compare."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from autoaccum._arguments import check_bool, check_function, check_positive_int, check_positive_number, counted
from autoaccum._launch.run import Options, check, sizes_within, world_size_of
from autoaccum._records import Verification
from autoaccum._system.output import log
from autoaccum.errors import DoesNotFitError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from autoaccum._launch.run import Sizes
    from autoaccum._verify.comparison import Ranks, Run

TIMEOUT_S = 600.0
# Splits beside the largest: the next smaller ones.
_SPLITS = 4


class _Seen(BaseException):
    """Ends a function whose optimizer steps have been seen."""


def verify(
    train: Callable[[int, int], Any],
    target_batch: int,
    *,
    micro_batch: int | None = None,
    steps: int = 1,
    keep_dropout: bool = False,
) -> Verification:
    """Check that a training makes the same gradient however its batch is split.

    The record that it returns is true if so, so that `assert autoaccum.verify(train, 16)` is a test.
    `train(micro_batch, accum_steps)` is called twice with the whole batch, and once with each of up to four smaller
    splits, from the same random state and up to the gradient of its first optimizer step. It must make its model and
    optimizer itself. Dropout is off, BatchNorm uses its running statistics. A fault that all splits share is not seen.

    Args:
        train: The training.
        target_batch: Samples per optimizer step.
        micro_batch: The largest micro-batch, which others are compared with; None for the whole batch.
        steps: Optimizer steps to compare, for faults that appear later.
        keep_dropout: Whether to leave dropout on; by how much two equal calls differ is then the noise.

    Raises:
        InvalidInputError: An argument is invalid. Or nothing can be said: `train` makes no optimizer step, ignores its
            arguments or has gradients of NaN, or two equal calls differ too much.
    """
    import torch  # noqa: PLC0415 - the command line starts without

    from autoaccum._data.random_state import RandomState  # noqa: PLC0415 - as above
    from autoaccum._verify.observer import Observer  # noqa: PLC0415 - as above

    check_function("train", train, "micro_batch, accum_steps")
    check_positive_int("steps", steps)
    check_bool("keep_dropout", keep_dropout)
    check_positive_int("target_batch", target_batch)
    check_positive_int("micro_batch", target_batch if micro_batch is None else micro_batch)
    random = RandomState(torch.get_default_device())
    before = random.capture()

    def observe(sizes: Sizes, again: bool) -> Ranks:
        def finish() -> None:
            for parameter in itertools.chain.from_iterable(one.parameters() for one in observer.optimizers):
                parameter.grad = None  # else the next call would add to it
            raise _Seen

        random.restore(before)
        with Observer(steps, keep_dropout, again, finish) as observer, contextlib.suppress(_Seen):
            train(sizes.micro_batch, sizes.accum_steps)
        return [observer.seen()]

    return _verify_splits(observe, target_batch, 1, micro_batch, steps)


def verify_command(
    command: Sequence[str], options: Options, *, steps: int = 1, timeout_s: float = TIMEOUT_S, **settings: bool
) -> Verification:
    """Check a command, as `verify` does a function; `settings` are `keep_dropout` and `deterministic`.

    Raises:
        InvalidInputError: An option or the command cannot be used, or nothing can be said.
        DoesNotFitError: Memory runs out in all splits, or all but one.
    """
    if options.target_batch is None:
        raise InvalidInputError("no target batch is known; pass --target-batch N, the samples of an optimizer step")
    check(command, options)
    check_positive_int("--steps", steps)
    check_positive_number("--timeout", timeout_s)
    from autoaccum._verify.runs import observe  # noqa: PLC0415 - it needs what only Linux has

    numbers = itertools.count(1)
    each = {"keep_dropout": False, "deterministic": False, **settings, "steps": steps}

    def observe_and_tell(sizes: Sizes, again: bool) -> Ranks:
        log(f"run {next(numbers)}: {sizes.micro_batch} x {sizes.accum_steps}{' again' if again else ''}")
        return observe(command, sizes, timeout_s, {**each, "again": again})

    log("the command runs several times, each time to its first optimizer step, and writes its files each time")
    world_size = options.world_size or world_size_of(command)
    return _verify_splits(observe_and_tell, options.target_batch, world_size, options.micro_batch, steps)


def _verify_splits(
    observe: Callable[[Sizes, bool], Ranks], target_batch: int, world_size: int, most: int | None, steps: int
) -> Verification:
    from autoaccum._verify.comparison import Run, check_noise, compare  # noqa: PLC0415 - it imports torch

    def run(sizes: Sizes, again: bool = False) -> Run:
        ranks = observe(sizes, again)
        made = max((len(one["steps"]) for one in ranks[0]["optimizers"]), default=0)
        if made < steps:
            raise InvalidInputError(
                f"train, run as {sizes.micro_batch} x {sizes.accum_steps}, made {made} of {steps} steps of a "
                "torch.optim.Optimizer; it must make its model and optimizer, and step"
            )
        return Run(sizes.micro_batch, sizes.accum_steps, ranks)

    candidates = list(_splits(target_batch, world_size, most))
    if len(candidates) == 1:
        raise InvalidInputError(
            f"target_batch={target_batch} can be split in one way on {counted(world_size, 'rank')}, in micro-batches "
            f"of {candidates[0].micro_batch}; choose one with more divisors, such as {16 * world_size}"
        )
    while True:
        try:
            whole = run(candidates[0])
            break
        except DoesNotFitError:
            del candidates[0]
            if len(candidates) == 1:
                raise
    again, splits = run(candidates[0], again=True), []
    noises = check_noise(whole, again)
    for sizes in candidates[1 : 1 + _SPLITS]:
        splits.append(run(sizes))
        _check_follows(whole, splits[-1])
    checks, noise, notes = compare(whole, again, noises, splits, world_size)
    return Verification(target_batch, world_size, (whole.micro_batch, whole.accum_steps), tuple(checks), noise, notes)


def _splits(target_batch: int, world_size: int, most: int | None) -> Iterator[Sizes]:
    """Return the ways to split a rank's share, from large micro-batches to small ones."""
    while most is None or most:
        yield (sizes := sizes_within(target_batch, world_size, most))
        most = sizes.micro_batch - 1


def _check_follows(whole: Run, split: Run) -> None:
    """Raise if a run is the same with other sizes."""
    if set(whole.elements) == set(split.elements) and (whole.elements or whole.backwards == split.backwards):
        raise InvalidInputError(f"{split.name} passes as many samples at once as {whole.name}: micro_batch is ignored")
