"""What a search for the micro-batch found, kept for the next start of the same job: one small JSON file a job.

A job comes in as a `Key`, which is the same in every process that starts it; out comes what was kept, or nothing. What
is kept is a hint, to be confirmed by a trial: nothing here raises because of a file or a folder, and nothing is taken
from a file that is not exactly as it was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import platform
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import platformdirs
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autoaccum._arguments import check_positive_int
from autoaccum._oom import first_line
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._loss.objective import Objective
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._system.notices import Notices

FOLDER_VARIABLE = "AUTOACCUM_CACHE_DIR"

# Raised whenever the fields of a file change, or what they mean.
_FORMAT = 1
_NAME = re.compile(r"plan-[0-9a-f]{32}\.json(\.[^.]+\.unfinished)?")
_UNFINISHED = ".unfinished"
_UNUSED_S = 90 * 24 * 3600
# A writer takes milliseconds: what is older was left by one that was killed.
_UNFINISHED_S = 3600
_MOST_FILES = 500
# A file as written here has about 1 KiB.
_MOST_BYTES = 1 << 16
_MOST = 1 << 63
# Modules whose code is known by torch's and Python's versions.
_TOLD_BY_VERSION = ("torch", "builtins", "typing", "abc")


@dataclass(frozen=True, slots=True)
class Key:
    """Names one job: equal for every start of it, in whatever process, and different where memory or speed may be.

    Attributes:
        digest: SHA-256 of all that the job was described by.
        target_batch: Samples an update is made from.
        about: What a person wants to know of the job.
    """

    digest: str
    target_batch: int
    about: Mapping[str, str | int | None] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Remembered:
    """What is kept of a search.

    Attributes:
        micro_batch: The largest size that was tried and fits.
        fixed_bytes: Peak memory at size 0, by a line through the peaks; None if unknown.
        bytes_per_sample: Memory that each further sample takes; None if unknown.
        fastest: The size that the clock has chosen; None if it has not yet.

    Raises:
        InvalidInputError: One of them cannot be.
    """

    micro_batch: int
    fixed_bytes: int | None = None
    bytes_per_sample: int | None = None
    fastest: int | None = None

    def __post_init__(self) -> None:
        check_positive_int("micro_batch", self.micro_batch)
        if self.fastest is not None and check_positive_int("fastest", self.fastest) > self.micro_batch:
            raise InvalidInputError(f"fastest={self.fastest} is more than micro_batch={self.micro_batch}, which fits")
        for name in ("fixed_bytes", "bytes_per_sample"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value < _MOST):
                raise InvalidInputError(f"{name}={value!r} is no number of bytes; pass an int of at least 0, or None")


class _UselessError(Exception):
    """A file is none that could have been written here for this job."""


class PlanCache:
    """Keeps what searches found, in a folder that all processes of a user share.

    Args:
        notices: Where it is said, once, that the folder cannot be used, or that a file is of no use.
        folder: Where the files are; None for the one that AUTOACCUM_CACHE_DIR names, or else autoaccum's in the user's
            cache directory. It is made when something is kept.
    """

    def __init__(self, notices: Notices, folder: Path | None = None) -> None:
        self._notices = notices
        self._given = folder

    def find(self, key: Key) -> Remembered | None:
        """Return what was kept for a job; None where there is nothing, or nothing of use."""
        with self._told("read in"):
            path = self._path(key)
            data = _read(path)
            if data is None:
                return None
            remembered = _understood(data, key, path)
            with contextlib.suppress(OSError):  # of a read-only folder
                os.utime(path)  # what is used is not deleted
            return remembered
        return None

    def keep(self, key: Key, remembered: Remembered) -> None:
        """Keep what was found for a job, in place of what was kept before, and delete what nobody has used for long."""
        with self._told("written to"):
            path = self._path(key)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(path, _written(key, remembered))
            _tidy(path)

    def forget(self, key: Key) -> None:
        """Keep nothing for a job any more."""
        with self._told("deleted in"):
            self._path(key).unlink(missing_ok=True)

    @property
    def _folder(self) -> Path:
        named = self._given or os.environ.get(FOLDER_VARIABLE)
        return Path(named) if named else platformdirs.user_cache_path("autoaccum")

    def _path(self, key: Key) -> Path:
        return self._folder.expanduser() / f"plan-{key.digest[:32]}.json"

    @contextlib.contextmanager
    def _told(self, done: str) -> Iterator[None]:
        try:
            yield
        except _UselessError as error:
            self._notices.say(f"plan cache: {error}; the micro-batch is searched for", key="plan cache file")
        # Besides what the system says: a null byte in a name, a ~ of a user without a home, no memory left.
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
            self._notices.say(
                f"plan cache: nothing could be {done} {self._folder} ({reason}), so the next start searches for the "
                f"micro-batch again; {FOLDER_VARIABLE} names another folder",
                key="plan cache folder",
            )


# --- files ------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> bytes | None:
    """Return what is in a file; None where there is none.

    Raises:
        _UselessError: It is no plain file.
    """
    if path.is_symlink():
        raise _UselessError(f"{path} is a link")
    # O_NONBLOCK: a pipe of that name would be waited for.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _UselessError(f"{path} is no plain file")
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def _write(path: Path, data: bytes) -> None:
    """Write a file that only its user can read, beside its place, then rename it."""
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=_UNFINISHED, dir=path.parent)
    unfinished = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _tidy(kept: Path) -> None:
    """Delete what was not used for long, what there is too much of, and what a writer that was killed left."""
    now_s = time.time()
    unused: list[tuple[float, Path]] = []
    with os.scandir(kept.parent) as entries:
        for entry in entries:
            if entry.name == kept.name or not _NAME.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):  # another process was faster
                if entry.is_file(follow_symlinks=False):
                    unused_s = now_s - entry.stat(follow_symlinks=False).st_mtime
                    unused.append((unused_s, Path(entry.path)))
    unused.sort()
    plans = [(unused_s, path) for unused_s, path in unused if path.suffix != _UNFINISHED]
    old = [path for unused_s, path in plans[: _MOST_FILES - 1] if unused_s > _UNUSED_S]
    left = [path for unused_s, path in unused if path.suffix == _UNFINISHED and unused_s > _UNFINISHED_S]
    for path in (*old, *(path for _, path in plans[_MOST_FILES - 1 :]), *left):
        with contextlib.suppress(OSError):
            path.unlink()


def _written(key: Key, remembered: Remembered) -> bytes:
    content = {"format": _FORMAT, "key": key.digest, "about": dict(key.about), "found": asdict(remembered)}
    return json.dumps({**content, "checksum": _digest(content)}, indent=1).encode() + b"\n"


def _understood(data: bytes, key: Key, path: Path) -> Remembered:
    """Return what a file of this job holds.

    Raises:
        _UselessError: It is damaged, of another format or of another job.
    """
    try:
        content = json.loads(data)
        checksum = content.pop("checksum")
        form, found = content["format"], content["found"]
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        raise _UselessError(f"{path} is damaged, or no file of autoaccum's") from None
    if type(form) is not int or form != _FORMAT:
        raise _UselessError(f"{path} was written by another version of autoaccum (format {str(form)[:20]})")
    if checksum != _digest(content) or not isinstance(found, dict):
        raise _UselessError(f"{path} is damaged")
    if content.get("key") != key.digest:
        raise _UselessError(f"{path} belongs to another job")
    try:
        remembered = Remembered(**found)
    except (InvalidInputError, TypeError) as error:
        raise _UselessError(f"{path} holds what cannot be ({first_line(error)})") from None
    if remembered.micro_batch > key.target_batch:
        raise _UselessError(f"{path} holds a micro_batch={remembered.micro_batch} above {key.target_batch}")
    return remembered


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --- keys -------------------------------------------------------------------------------------------------------------


class Described(Protocol):
    """What of a training step a key describes."""

    @property
    def objective(self) -> Objective: ...

    @property
    def memory(self) -> MemoryBackend: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def precision(self) -> Any: ...


def key_of(
    step: Described,
    batch: Any,
    *,
    target_batch: int,
    limit_bytes: int | None,
    loss_scope: str,
    forward: Callable[..., Any] | None = None,
    cap: int | None = None,
) -> Key:
    """Describe a job by whatever may change how much memory a training step takes, or how long; nothing is changed.

    Values of parameters and of data are not looked at, nor are learning rates.

    Args:
        step: The training step; its model is on the device already.
        batch: One that is tried; only the form of a sample counts, not how many there are.
        target_batch: Samples an update is made from.
        limit_bytes: In the memory backend's terms; None for what there is.
        loss_scope: As for `fit`.
        forward: As for `fit`.
        cap: The most samples at once that were allowed; what was found under it says nothing of what fits without.
    """
    modules, memory, optimizer = step.objective.modules, step.memory, step.optimizer
    model = modules[0]
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    total_bytes = memory.reading().total_bytes
    about: dict[str, str | int | None] = {
        "model": _class_name(model),
        "parameters": sum(_numel(parameter) for parameter in model.parameters()),
        "optimizer": _class_name(optimizer),
        "precision": step.precision.name,
        "device": memory.name,
        "device_bytes": total_bytes,
        "limit_bytes": limit_bytes,
        "target_batch": target_batch,
        "loss_scope": loss_scope,
        "torch": str(torch.version.__version__),
        "autoaccum": version("autoaccum"),
    }
    described = {
        "about": about,
        "modules": [_structure(module, held) for module in modules],
        "code": _code_of_classes(part for module in modules for part in module.modules()),
        "batch": _form(batch),
        "optimizer": _settings(optimizer),
        "casts": [step.precision.scaler is not None, type(step.precision.autocast()).__name__],
        "loss": _callables(step.objective.loss),
        "forward": _callables(forward),
        "system": _machine(memory.device),
    } | ({} if cap is None else {"cap": cap})
    return Key(_digest(described), target_batch, about)


def key_of_command(described: Mapping[str, Any], target_batch: int, about: Mapping[str, str | int | None]) -> Key:
    """Name a job of which no more is known than the command that runs it.

    Args:
        described: Whatever tells it from others, in values that JSON has.
        target_batch: The most that could be remembered of it.
        about: What a person wants to know of the job.
    """
    return Key(_digest({"command": dict(described)}), target_batch, about)


def _structure(model: nn.Module, held: set[Any]) -> dict[str, Any]:
    configs: dict[int, Any] = {}
    return {
        "modules": [
            [name, _class_name(module), _said_by(module), _flags(module), _config(module, configs)]
            for name, module in model.named_modules()
        ],
        "parameters": [
            [name, *_tensor(parameter), parameter.requires_grad, parameter in held]
            for name, parameter in model.named_parameters()
        ],
        "buffers": [[name, *_tensor(buffer)] for name, buffer in model.named_buffers()],
    }


def _said_by(module: nn.Module) -> str:
    """Return what a module says of itself: kernel sizes, numbers of heads."""
    try:
        return _steady(module.extra_repr())
    except Exception:  # noqa: BLE001 - the user's own, and of no use to anybody else
        return ""


def _flags(module: nn.Module) -> dict[str, Any]:
    """Return a module's own switches: its mode, `gradient_checkpointing`, a chunk size, a forward of its own."""
    hooks = [len(module._forward_hooks), len(module._forward_pre_hooks)]  # some checkpoint, some keep what they see
    return {**_plain(vars(module)), "hooks": hooks, "forward": _callables(vars(module).get("forward"))}


def _config(module: nn.Module, seen: dict[int, Any]) -> Any:
    """Return what is plain in a module's `config`, where Transformers keeps which attention runs.

    Args:
        module: The module.
        seen: By identity, those that were described: all modules of a model may share one.
    """
    config = vars(module).get("config")
    if id(config) not in seen:
        seen[id(config)] = _plain(config if isinstance(config, dict) else getattr(config, "__dict__", {}))
        return seen[id(config)]
    return None


def _plain(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        str(name): _steady(value) if type(value) is str else value
        for name, value in values.items()
        if value is None or type(value) in (bool, int, str)
    }


def _tensor(tensor: Tensor) -> list[Any]:
    kind = [type(tensor).__name__, str(tensor.dtype), str(tensor.layout)]
    if is_lazy(tensor):
        return [*kind, "not made yet"]
    # Convolutions run differently where the channels come last.
    return [*kind, list(tensor.shape), tensor.layout is not torch.strided or tensor.is_contiguous()]


def _numel(parameter: nn.Parameter) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()


def _form(batch: Any) -> Any:
    """Return nesting, types and shapes of one sample."""
    if isinstance(batch, Tensor):
        return [str(batch.dtype), batch.device.type, batch.dim(), list(batch.shape[1:])]
    if isinstance(batch, np.ndarray):
        return ["array", str(batch.dtype), batch.ndim, list(batch.shape[1:])]
    if isinstance(batch, Mapping):
        items = sorted((str(name), value) for name, value in batch.items())
        return [_class_name(batch), [[name, _form(value)] for name, value in items]]
    if isinstance(batch, tuple | list) and not all(isinstance(item, str | int | float | None) for item in batch):
        return [_class_name(batch), [_form(item) for item in batch]]
    return _class_name(batch)  # a list of file names is as long as the batch, and takes nothing on the device


def _settings(optimizer: torch.optim.Optimizer) -> list[Any]:
    groups = [
        [len(group["params"]), _switches({name: group.get(name) for name in optimizer.defaults})]
        for group in optimizer.param_groups
    ]
    return [_switches(optimizer.defaults), groups, _code_of_classes([optimizer])]


def _switches(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides which state and which copies there are; of a number only whether it is 0, as a momentum."""
    return {
        name: bool(value) if type(value) in (int, float) else value
        for name, value in settings.items()
        if name not in ("lr", "initial_lr") and (value is None or type(value) in (bool, int, float, str))
    }


def _machine(device: torch.device) -> dict[str, Any]:
    told = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "machine": platform.machine(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cpu":
        return told | {"threads": torch.get_num_threads(), "processor": torch.backends.cpu.get_cpu_capability()}
    return told | {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "benchmark": torch.backends.cudnn.benchmark,
        "allocator": [os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")],
    }


# --- names that are the same in every process -------------------------------------------------------------------------


def _class_name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _steady(text: str) -> str:
    """Return the text without addresses."""
    return re.sub(r"\b0x[0-9a-fA-F]{4,}", "0x", text)


def _callables(given: Any) -> Any:
    """Describe a function, several, or an object that can be called, by name and by code."""
    if isinstance(given, list | tuple):
        return [_callables(one) for one in given]
    if isinstance(given, partial):
        return ["partial", _callables(given.func), sorted(given.keywords)]
    if given is None or isinstance(given, nn.Module):
        return _class_name(given)  # what is in a module is described with the model
    function = getattr(given, "__func__", given)
    if isinstance(function, FunctionType):
        return [function.__module__, function.__qualname__, _code(function)]
    if hasattr(function, "__qualname__"):
        return [getattr(function, "__module__", None), function.__qualname__]
    return [_class_name(function), _code_of_classes([function])]


def _code_of_classes(things: Iterable[Any]) -> list[Any]:
    """Describe the functions in the users' own classes: who puts checkpointing into a forward starts another job."""
    classes = {kind for thing in things for kind in type(thing).__mro__}
    return sorted(
        [f"{kind.__module__}.{kind.__qualname__}", name, _code(value)]
        for kind in classes
        if kind.__module__.partition(".")[0] not in _TOLD_BY_VERSION
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType)
    )


def _code(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else _digest(_described_code(code))


def _described_code(code: CodeType) -> list[Any]:
    constants = [
        _described_code(one)
        if isinstance(one, CodeType)
        else sorted(map(repr, one))  # whose own order changes from process to process
        if isinstance(one, frozenset)
        else repr(one)
        for one in code.co_consts
    ]
    return [code.co_code.hex(), code.co_names, constants]
