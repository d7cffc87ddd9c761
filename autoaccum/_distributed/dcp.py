"""Saves sharded tensors in a folder that every rank writes its part of (torch.distributed.checkpoint).

Any number of ranks can load them again, each its own part. The sizes and checksums of the files are recorded, since the
library itself does not check them.
"""

from __future__ import annotations

import itertools
import re
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._engine.dtensor import is_spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import nn

    from autoaccum._distributed.process_group import Ranks

# Size and checksum (CRC-32) of each file, by name.
Files = dict[str, tuple[int, int]]
_READ_BYTES = 1 << 22
_METADATA = ".metadata"
_NAME = re.compile(r"__\d+_\d+\.distcp|\.metadata")
# Stands in for a tensor that is in the folder, with its type.
_SPREAD = "autoaccum.spread"


def write(ranks: Ranks, tensors: Mapping[str, Tensor], folder: Path) -> Files:
    """Write tensors, together with all ranks; return the size and checksum of each file.

    Raises:
        Exception: Any rank's failure to write. Raised on every rank.
    """
    from torch.distributed import checkpoint  # noqa: PLC0415 - imports slowly, and is rarely needed

    folder.mkdir(exist_ok=True)
    ranks.exchange("shards")  # a rank that cannot begin tells the others here; inside, they would wait for it
    with _failures_told():
        checkpoint.save(  # type: ignore[attr-defined]
            dict(tensors), checkpoint_id=folder, process_group=ranks.hosts
        )
    own = [*folder.glob(f"__{ranks.rank}_*"), *([folder / _METADATA] if ranks.rank == 0 else [])]
    said = ranks.exchange("shards", {path.name: (path.stat().st_size, _sum(path)) for path in own})
    return {name: file for files in said for name, file in files.items()}


def read(ranks: Ranks, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Read tensors in place, together with all ranks. The number of ranks may differ from when they were written."""
    from torch.distributed import checkpoint  # noqa: PLC0415 - as above

    from autoaccum._distributed.dcp_metadata import Reader  # noqa: PLC0415 - as above

    with _failures_told():
        checkpoint.load(  # type: ignore[attr-defined]
            dict(tensors), storage_reader=Reader(folder), process_group=ranks.hosts
        )


@contextmanager
def _failures_told() -> Iterator[None]:
    """Convert the library's exception, which `except Exception` does not catch, into an ordinary one."""
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415 - as above

    try:
        yield
    except CheckpointException as error:
        who = "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items()))
        raise RuntimeError(who) from error


def are_files(value: Any) -> bool:
    """Whether a value read from a checkpoint is `Files` whose names stay within their folder."""
    return isinstance(value, dict) and all(
        isinstance(name, str)
        and _NAME.fullmatch(name) is not None
        and isinstance(file, list | tuple)
        and len(file) == 2  # noqa: PLR2004 - a pair
        and all(type(number) is int and number >= 0 for number in file)
        for name, file in value.items()
    )


def damage(folder: Path, files: Files) -> str | None:
    """Return what is wrong with a folder according to the sizes of its files; None if nothing is."""
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{folder.name}/{name} is missing"
        if path.stat().st_size != size:
            return f"{folder.name}/{name} has {path.stat().st_size} bytes in place of {size}"
    return None


def damage_of_part(ranks: Ranks, folder: Path, files: Files) -> str | None:
    """Return what is wrong with this rank's share of a folder's files, according to their checksums."""
    for number, (name, (_, checksum)) in enumerate(sorted(files.items())):
        if number % ranks.size == ranks.rank and _sum(folder / name) != checksum:
            return f"wrong checksum of {folder.name}/{name}"
    return None


def _sum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            found = zlib.crc32(piece, found)
    return found


# --- sharded tensors, by name -----------------------------------------------------------------------------------------


def of_modules(modules: list[nn.Module]) -> dict[str, Tensor]:
    """Return the sharded parameters of some modules."""
    return {
        f"model.{number}.{name}": parameter.detach()
        for number, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if is_spread(parameter)
    }


def of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the sharded tensors in an optimizer's state."""
    return {
        f"optimizer.{number}.{name}": value
        for number, parameter in enumerate(_parameters(optimizer))
        for name, value in optimizer.state.get(parameter, {}).items()
        if is_spread(value)
    }


def rest_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's `state_dict`, with placeholders for sharded tensors."""
    whole = optimizer.state_dict()
    state = {
        number: {name: {_SPREAD: str(value.dtype)} if is_spread(value) else value for name, value in values.items()}
        for number, values in whole["state"].items()
    }
    return {"state": state, "param_groups": whole["param_groups"]}


def put_rest_back(optimizer: torch.optim.Optimizer, kept: Mapping[str, Any]) -> None:
    """Restore what `rest_of_optimizer` returned, with empty tensors for those still to be read."""
    optimizer.state.clear()
    numbers = itertools.count()
    for group, saved in zip(optimizer.param_groups, kept["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
        for parameter in group["params"]:
            for name, value in kept["state"].get(next(numbers), {}).items():
                # Step counts stay on the host unless kernels read them.
                is_of_device = name != "step" or group.get("capturable") or group.get("fused")
                optimizer.state[parameter][name] = _made_again(value, parameter, is_of_device=bool(is_of_device))
    # Schedulers warn if they step before the optimizer has: it has, in an earlier process.
    optimizer._opt_called = True  # type: ignore[attr-defined]


def _made_again(value: Any, parameter: nn.Parameter, *, is_of_device: bool) -> Any:
    if isinstance(value, dict) and value.keys() == {_SPREAD}:
        return torch.zeros_like(parameter.detach(), dtype=getattr(torch, value[_SPREAD].removeprefix("torch.")))
    return value.to(parameter.device) if isinstance(value, Tensor) and is_of_device else value


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
