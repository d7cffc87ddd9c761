"""`verify` for a function, and `verify_command` for `autoaccum verify`: choose the splits, run them, compare."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import TYPE_CHECKING, Any

from autoaccum._arguments import check_bool, check_function, check_positive_int, check_positive_number
from autoaccum._launch.run import Options, check, sizes_within, world_size_of
from autoaccum._records import Verification
from autoaccum._system.output import log
from autoaccum.errors import DoesNotFitError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from autoaccum._launch.run import Sizes
    from autoaccum._verify.comparison import Ranks, Run

# Splits beside the largest, which are the next smaller ones.
_SPLITS = 4
TIMEOUT_S = 600.0


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
    """Check that a training makes the same gradient however its batch is split; `assert verify(train, 16)` in a test.

    `train(micro_batch, accum_steps)` is called twice with the whole batch and once with each of up to four smaller
    divisors of it, every time up to the gradient of its last optimizer step to be seen, from the same random state. It
    must make its model and optimizer itself. Dropout is turned off, and BatchNorm uses its running statistics. Faults
    that are the same in all splits cannot be seen.

    Args:
        train: A function that trains.
        target_batch: Samples per optimizer step.
        micro_batch: The largest micro-batch, which others are compared with; None for `target_batch`.
        steps: Optimizer steps to compare, for faults that appear later.
        keep_dropout: Whether to leave dropout as it is; the difference between two equal calls is then the noise.

    Raises:
        InvalidInputError: An argument is invalid; or nothing can be said, since `train` makes no optimizer step, ignores
            its arguments or makes gradients of NaN, or two equal calls differ too much.
    """
    import torch  # noqa: PLC0415 - as the command line starts without

    from autoaccum._data.random_state import RandomState  # noqa: PLC0415 - as above
    from autoaccum._verify.observer import Observer  # noqa: PLC0415 - as above

    check_function("train", train, "micro_batch, accum_steps")
    check_positive_int("target_batch", target_batch)
    check_positive_int("steps", steps)
    check_bool("keep_dropout", keep_dropout)
    if micro_batch is not None:
        check_positive_int("micro_batch", micro_batch)
    random = RandomState(torch.get_default_device())
    before = random.take()

    def observe(sizes: Sizes, again: bool) -> Ranks:
        def finish() -> None:
            for parameter in itertools.chain.from_iterable(one.parameters() for one in observer.optimizers):
                parameter.grad = None  # else the next call would add to it
            raise _Seen

        random.put_back(before)
        with Observer(steps=steps, keep_dropout=keep_dropout, again=again, finish=finish) as observer:
            with contextlib.suppress(_Seen):
                train(sizes.micro_batch, sizes.accum_steps)
            seen = observer.seen()
        made = max((len(one["steps"]) for one in seen["optimizers"]), default=0)
        if made < steps:
            raise InvalidInputError(
                f"train({sizes.micro_batch}, {sizes.accum_steps}) made {made} of {steps} steps of a "
                "torch.optim.Optimizer; it must make its model and optimizer, and step"
            )
        return [seen]

    return _verify(observe, target_batch, 1, micro_batch)


def verify_command(
    command: Sequence[str], options: Options, *, steps: int = 1, timeout_s: float = TIMEOUT_S, **settings: bool
) -> Verification:
    """Check a command, as `verify` does a function.

    Args:
        command: The command, with placeholders.
        options: The sizes, as for `autoaccum run`.
        steps: Optimizer steps to compare.
        timeout_s: Seconds that each run may take.
        settings: `keep_dropout`, and `deterministic` for torch's deterministic algorithms.

    Raises:
        InvalidInputError: An option or the command cannot be used, or nothing can be said.
        DoesNotFitError: Memory runs out in every split.
    """
    if options.target_batch is None:
        raise InvalidInputError("no target batch is known; pass --target-batch N, the samples of an optimizer step")
    check(command, options)
    check_positive_int("--steps", steps)
    if not math.isfinite(check_positive_number("--timeout", timeout_s)):
        raise InvalidInputError("--timeout inf must be a number of seconds")
    from autoaccum._verify.runs import observe  # noqa: PLC0415 - it needs what only Linux has

    numbers = itertools.count(1)
    each = {"keep_dropout": False, "deterministic": False, **settings, "steps": steps}

    def observe_and_tell(sizes: Sizes, again: bool) -> Ranks:
        log(f"run {next(numbers)}: {sizes.micro_batch} x {sizes.accum_steps}{' again' if again else ''}")
        return observe(command, sizes, timeout_s, {**each, "again": again})

    log("the command runs several times, each time to its first optimizer step, and writes its files each time")
    world_size = options.world_size or world_size_of(command)
    return _verify(observe_and_tell, options.target_batch, world_size, options.micro_batch)


def _verify(
    observe: Callable[[Sizes, bool], Ranks], target_batch: int, world_size: int, most: int | None
) -> Verification:
    from autoaccum._verify.comparison import Run, compare  # noqa: PLC0415 - it imports torch

    def run(sizes: Sizes, again: bool = False) -> Run:
        return Run(sizes.micro_batch, sizes.accum_steps, observe(sizes, again))

    candidates = list(_splits(target_batch, world_size, most))
    if len(candidates) == 1:
        raise InvalidInputError(
            f"there is one way to split a target batch of {target_batch} on {world_size} rank(s), in micro-batches of "
            f"{candidates[0].micro_batch}; choose a target batch with more divisors, such as {16 * world_size}"
        )
    while True:
        try:
            whole = run(candidates[0])
            break
        except DoesNotFitError:
            if len(candidates) == 2:  # noqa: PLR2004 - one must be left to compare with
                raise
            candidates.pop(0)
    again = run(candidates[0], again=True)
    splits = []
    for sizes in candidates[1 : 1 + _SPLITS]:
        splits.append(run(sizes))
        _check_follows(whole, splits[-1])
    checks, noise, notes = compare(whole, again, splits, world_size)
    first = (whole.micro_batch, whole.accum_steps)
    return Verification(target_batch, world_size, first, tuple(checks), noise, notes)


def _splits(target_batch: int, world_size: int, most: int | None) -> Iterator[Sizes]:
    """Return the ways to split a rank's share, from large micro-batches to small ones."""
    while most is None or most:
        sizes = sizes_within(target_batch, world_size, most)
        yield sizes
        most = sizes.micro_batch - 1


def _check_follows(whole: Run, split: Run) -> None:
    """Raise if a run is the same with other sizes."""
    if (whole.rows, whole.backwards) == (split.rows, split.backwards):
        raise InvalidInputError(f"{split.name} does the same as {whole.name}: micro_batch and accum_steps are ignored")
    if whole.rows and max(whole.rows) == max(split.rows, default=0) and sum(split.rows) > sum(whole.rows):
        raise InvalidInputError(
            f"{split.name} passes {max(split.rows)} samples at once, as {whole.name} does: micro_batch is ignored"
        )
