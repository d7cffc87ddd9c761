"""`autoaccum run`: runs a command, and restarts it with a smaller micro-batch if it ran out of memory.

Any other end is passed on. The command receives its sizes in placeholders and environment variables. They are exact:
`micro_batch * accum_steps * world_size` is the target batch. If the target batch is unknown, the command receives the
largest micro-batch allowed, which `fit` obeys. `diagnosis.py` judges an end. This module does not import torch.
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoaccum._arguments import check_positive_int, counted
from autoaccum._launch.diagnosis import Diagnosis, diagnose, passed_on
from autoaccum._memory import _linux
from autoaccum._sizing.cache import Key, PlanCache, Remembered, digest_of
from autoaccum._system import launched, reason_file
from autoaccum._system.notices import Notices
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autoaccum._launch.supervisor import Ended, Supervisor

RETRIES = 5
# The default of Kubernetes before it kills a container, and of torchrun before it kills a worker.
GRACE_S = 30
# What torchrun reads as the seconds that its ranks have, and how long before this process it is to kill them.
_TORCHRUN_GRACE, _BEFORE_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 2.0
# More samples than any training has; divisors are searched up to its square root.
_MOST = 10**12
_MOST_GRACE_S = 7 * 24 * 60 * 60
# More than any size in the cache, if there is no target batch to bound it.
_NO_TARGET = 1 << 62
_PLACEHOLDERS = {"micro_batch", "accum_steps", "target_batch", "world_size"}
_PLACEHOLDER = re.compile(rf"\{{({'|'.join(sorted(_PLACEHOLDERS))})\}}")
_LIKE_ONE = re.compile(r"\{(\w+)\}")
_OF_A_SIZE = {"micro_batch", "accum_steps"}
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
# These take the number of ranks from configuration files, or from the GPUs that they find.
_OTHER_LAUNCHERS = {"accelerate", "deepspeed", "horovodrun", "mpiexec", "mpirun"}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `autoaccum run`.

    Attributes:
        target_batch: Samples per optimizer step, over all ranks; None if the command knows it itself.
        micro_batch: The largest micro-batch to start with; None for what worked before, or all samples.
        world_size: Ranks; None to detect them.
        retries: Restarts after memory ran out.
        grace_s: Seconds from a signal that asks for the end to SIGKILL.
        cache: Whether to start with what worked before, and to remember what works.
        no_placeholder: Whether the command reads the sizes from variables, and has no placeholder.
    """

    target_batch: int | None = None
    micro_batch: int | None = None
    world_size: int | None = None
    retries: int = RETRIES
    grace_s: float = GRACE_S
    cache: bool = True
    no_placeholder: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one optimizer step, under the names of their placeholders."""

    target_batch: int
    micro_batch: int
    accum_steps: int
    world_size: int

    def __str__(self) -> str:
        ranks = "" if self.world_size == 1 else f" on each of {self.world_size} ranks"
        steps = f"{self.accum_steps} per optimizer step{ranks}"
        return f"target batch {self.target_batch}: micro-batches of {counted(self.micro_batch, 'sample')}, {steps}"


def sizes_within(target_batch: int, world_size: int, most: int | None = None) -> Sizes:
    """Return the largest equal micro-batches of at most `most` samples; None for a rank's whole share.

    Raises:
        InvalidInputError: The ranks cannot have equal shares.
    """
    share, rest = divmod(target_batch, world_size)
    if rest or not share:
        near = [samples for samples in (share * world_size, (share + 1) * world_size) if samples]
        raise InvalidInputError(
            f"--target-batch {target_batch} cannot be divided by {world_size} ranks; choose a multiple of "
            f"{world_size}, such as {' or '.join(map(str, near))}"
        )
    most = min(most or share, share)
    root = math.isqrt(share)
    # By number of parts, then by size: the search is short even for a large prime.
    by_parts = (share // parts for parts in range(-(-share // most), root + 1) if share % parts == 0)
    by_size = (size for size in range(min(most, root), 0, -1) if share % size == 0)
    size = next(itertools.chain(by_parts, by_size))
    return Sizes(target_batch, size, share // size, world_size)


def fill_in(command: Sequence[str], numbers: Mapping[str, int]) -> list[str]:
    """Return a command with numbers in place of its placeholders."""
    return [_PLACEHOLDER.sub(lambda found: str(numbers[found[1]]), argument) for argument in command]


def variables_of(sizes: Sizes) -> dict[str, str]:
    """Return the environment variables that hold the sizes."""
    return {f"AUTOACCUM_{name.upper()}": str(number) for name, number in asdict(sizes).items()}


def until_done(command: Sequence[str], options: Options) -> int:
    """Run a command until it ends for another reason than lack of memory, or no smaller size is left.

    Returns:
        The command's exit code, 128 + N if signal N ended it; 4 if it runs out of memory at every size, and its own
        exit code says no more than that.

    Raises:
        InvalidInputError: An option, a placeholder or a variable cannot be used; nothing has been started.
    """
    return _Run(command, options).until_done()


class _Run:
    """A command and its state."""

    def __init__(self, command: Sequence[str], options: Options) -> None:
        check(command, options)
        self._command = list(command)
        self._options = options
        self._notices = Notices()
        is_needed = options.target_batch is not None or any("{world_size}" in argument for argument in command)
        self._world_size = options.world_size or (world_size_of(command) if is_needed else 1)
        self._cache = PlanCache(self._notices) if options.cache else None
        self._key = self._named()
        self._most = self._first_most()  # the largest micro-batch allowed; None for any
        self._sizes: Sizes | None = None
        if options.target_batch is not None:
            self._set(sizes_within(options.target_batch, self._world_size, self._most))
        self._has_shrunk = False

    def until_done(self) -> int:
        """Run the command as often as necessary; return the exit code."""
        from autoaccum._launch.supervisor import Supervisor  # noqa: PLC0415 - it needs what only Linux has

        with Supervisor(self._options.grace_s) as supervisor, _folder() as folder:
            attempt = 0
            while True:
                if self._sizes is not None:
                    self._notices.say(str(self._sizes))
                elif self._most is not None:
                    self._notices.say(
                        f"micro-batches of at most {counted(self._most, 'sample')} ({launched.MAX_MICRO_BATCH})"
                    )
                ended, diagnosis = self._attempt(supervisor, attempt, Path(folder) / f"reason-{attempt}.json")
                if supervisor.ended_by is not None:
                    return ended.code
                if not diagnosis.is_oom:
                    return self._passed_on(ended, diagnosis)
                final = self._shrink(ended, diagnosis, attempt)
                if final is not None:
                    return final
                supervisor.end_rest()
                if supervisor.ended_by is not None:
                    return 128 + supervisor.ended_by
                attempt += 1

    def _attempt(self, supervisor: Supervisor, attempt: int, path: Path) -> tuple[Ended, Diagnosis]:
        numbers = {"world_size": self._world_size}
        variables = {launched.ATTEMPT: str(attempt), launched.REASON_FILE: str(path)}
        if self._most is not None:
            numbers["micro_batch"] = self._most
            variables[launched.MAX_MICRO_BATCH] = str(self._most)
        if self._sizes is not None:
            numbers = asdict(self._sizes)
            variables |= variables_of(self._sizes)
        before = _linux.read_kills()
        arguments = fill_in(self._command, numbers)
        # torchrun would kill its ranks 30 s after it was asked to end, whatever grace they were promised.
        patience = {_TORCHRUN_GRACE: str(max(1, round(self._options.grace_s - _BEFORE_S)))}
        ended = supervisor.run(arguments, patience | os.environ | variables)
        return ended, diagnose(ended, reason_file.read(path), _linux.risen(before, _linux.read_kills()))

    def _passed_on(self, ended: Ended, diagnosis: Diagnosis) -> int:
        name = self._command[0]
        if ended.refusal and Path(name).suffix == ".py" and Path(name).is_file():
            self._notices.say(f"{name!r} is not executable; write: autoaccum run ... -- python {name} ...")
            return 126
        if ended.refusal:
            self._notices.say(f"{name!r} cannot be started ({ended.refusal})")
        elif ended.code == 0:
            self._keep()
        elif diagnosis.evidence != f"exit code {ended.code}":
            self._notices.say(f"the command ended with {diagnosis.evidence}; it is not restarted")
        return ended.code

    def _shrink(self, ended: Ended, diagnosis: Diagnosis, attempt: int) -> int | None:
        """Choose a smaller size; return the exit code if there is none."""
        what = f"memory ran out ({diagnosis.evidence})"
        known = [size for size in (diagnosis.micro_batch, self._most) if size is not None]
        if not known:
            self._notices.say(
                f"{what}, but the command's micro-batch is unknown, so it cannot be reduced; pass --target-batch and "
                "write {micro_batch} and {accum_steps} in the command, or, if the script trains with autoaccum, which "
                "reads the size, pass --micro-batch"
            )
            return ended.code
        failed = min(known)
        if failed == 1:
            self._notices.say(f"{what} with micro-batches of 1, and there is nothing smaller to try")
            return passed_on(ended.code)
        if attempt >= self._options.retries:
            made = f"--retries={self._options.retries}"
            self._notices.say(
                f"{what} with micro-batches of {failed}, and no retry is left ({made}); allow more if a smaller size "
                "would fit, and see `autoaccum doctor` if memory runs out at any size"
            )
            return passed_on(ended.code)
        retry = f"retry {attempt + 1} of {self._options.retries}"
        self._notices.say(f"{what} with micro-batches of {failed}; restarting, {retry}")
        self._has_shrunk = True
        self._most = failed // 2
        if self._sizes is not None:
            self._set(sizes_within(self._sizes.target_batch, self._world_size, self._most))
        return None

    def _set(self, sizes: Sizes) -> None:
        share = sizes.micro_batch * sizes.accum_steps
        most = min(self._most or share, share)
        if sizes.micro_batch * 2 <= most:
            fewest = -(-share // most)
            self._notices.say(
                f"of the sizes up to {most} only {sizes.micro_batch} divides the {share} samples of a rank; "
                f"--target-batch {round(share / fewest) * fewest * sizes.world_size} leaves more choice",
                key="few divisors",
            )
        self._sizes, self._most = sizes, sizes.micro_batch

    # --- what is remembered for the next start ------------------------------------------------------------------------

    def _first_most(self) -> int | None:
        if self._options.micro_batch is not None:
            return self._options.micro_batch
        found = None if self._cache is None else self._cache.find(self._key)
        if found is not None:
            self._notices.say(f"micro-batches of {found.micro_batch} worked before")
        bounds = (None if found is None else found.micro_batch, launched.max_micro_batch())
        return min((bound for bound in bounds if bound is not None), default=None)

    def _keep(self) -> None:
        if self._cache is None or self._most is None or (self._sizes is None and not self._has_shrunk):
            return
        kept = self._cache.find(self._key)
        # Success with a smaller size that was asked for says nothing about a larger one.
        if self._has_shrunk or kept is None or kept.micro_batch < self._most:
            self._cache.keep(self._key, Remembered(self._most))

    def _named(self) -> Key:
        target = self._options.target_batch
        about = {"folder": str(Path.cwd()), "target_batch": target, "world_size": self._world_size}
        limits = [group.limit_bytes for group in _linux.group_limits()]
        host = min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *limits])
        # The models of the GPUs as the kernel tells them: NVML takes a while to load.
        files = Path("/proc/driver/nvidia/gpus").glob("*/information")
        gpus = sorted(line for path in files for line in path.read_text().splitlines() if line.startswith("Model"))
        described = {"arguments": self._command, "host": host, "gpus": gpus, **about}
        return Key(digest_of(described), target or _NO_TARGET, about)


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for reason files: where ranks on other nodes can write too, if that is possible."""
    is_shared = (launched.whole_number("SLURM_JOB_NUM_NODES") or 1) > 1
    for place in (Path.cwd(), None) if is_shared else (None,):
        try:
            return tempfile.TemporaryDirectory(prefix=".autoaccum-", dir=place, ignore_cleanup_errors=True)
        except OSError as error:
            reason = error.strerror or str(error)
    raise InvalidInputError(
        f"no temporary folder can be made ({reason}); set TMPDIR to a folder that can be written to"
    )


def world_size_of(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that share a target batch, by torchrun's options or by variables; 1 by default.

    Raises:
        InvalidInputError: torchrun's options do not fix the number, a variable is not a number, or another launcher
            decides.
    """
    for index, argument in enumerate(command):
        is_module = index > 0 and command[index - 1] == "-m" and argument in _TORCHRUN_MODULES
        if is_module or Path(argument).name == "torchrun":
            options = command[index + 1 :]
            return _ranks(options, "nnodes") * _ranks(options, "nproc-per-node")
        if argument.endswith(".py"):
            break  # what follows is the script's
        if Path(argument).name in _OTHER_LAUNCHERS:
            raise InvalidInputError(f"how many ranks {Path(argument).name} starts is unknown; pass --world-size N")
    return launched.whole_number("WORLD_SIZE", environment) or launched.whole_number("SLURM_NTASKS", environment) or 1


def _ranks(options: Sequence[str], name: str) -> int:
    found = "1"
    for option, following in zip(options, [*options[1:], ""], strict=True):
        before, equals, value = option.partition("=")
        if before.replace("_", "-") == f"--{name}":
            found = value if equals else following
            break
    low, _, high = found.partition(":")
    if found in ("gpu", "auto"):
        import torch  # noqa: PLC0415 - takes seconds; no context is made

        found = str(torch.accelerator.device_count() or os.cpu_count() or 1)
    elif low == high:
        found = low
    if not (found.isascii() and found.isdigit() and 0 < int(found) <= _MOST):
        raise InvalidInputError(f"--{name}={found} does not fix the number of ranks; pass --world-size N")
    return int(found)


def check(command: Sequence[str], options: Options) -> None:
    """Raise if a command or an option cannot be used."""
    if sys.platform != "linux":
        raise InvalidInputError(f"autoaccum run needs Linux, and this is {sys.platform}; start the command directly")
    if not command or not command[0]:
        raise InvalidInputError("there is no command; write one after the options, as in -- python train.py")
    try:
        Path.cwd()
    except OSError as error:
        raise InvalidInputError("the current folder is gone; change to one that exists") from error
    for name in ("target_batch", "micro_batch", "world_size"):
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is not None and check_positive_int(option, value) > _MOST:
            raise InvalidInputError(f"{option} {value!s:.20} is too large; pass at most {_MOST}")
    if options.retries < 0:
        raise InvalidInputError(f"--retries {options.retries} must be 0 or more")
    if not 0 <= options.grace_s <= _MOST_GRACE_S:
        raise InvalidInputError(f"--grace {options.grace_s:g} must be a number of seconds from 0 to {_MOST_GRACE_S}")
    _check_placeholders(command, options)


def _check_placeholders(command: Sequence[str], options: Options) -> None:
    found = {name for argument in command for name in _PLACEHOLDER.findall(argument)}
    for name in {name for argument in command for name in _LIKE_ONE.findall(argument)} - _PLACEHOLDERS:
        for near in difflib.get_close_matches(name, _PLACEHOLDERS, n=1, cutoff=0.8):
            raise InvalidInputError(f"there is no placeholder {{{name}}}; write {{{near}}}")
    if options.target_batch is None:
        missing = found - {"world_size"} - ({"micro_batch"} if options.micro_batch is not None else set())
        if missing:
            raise InvalidInputError(
                f"the command has the placeholder {{{min(missing)}}}, but no target batch is known; "
                "pass --target-batch N"
            )
    elif not found & _OF_A_SIZE and not options.no_placeholder:
        raise InvalidInputError(
            "the command has no placeholder, so its sizes would never change; write {micro_batch} and {accum_steps} "
            "where it takes these numbers, or pass --no-placeholder if it reads AUTOACCUM_MICRO_BATCH and "
            "AUTOACCUM_ACCUM_STEPS"
        )
