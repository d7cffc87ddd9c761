"""Tensors that are spread over ranks, in a folder of which each rank writes its part (torch.distributed.checkpoint).

Any number of ranks can read them again, each what is its own then. What the files were when they were written is noted
by their sizes and checksums, since the library itself does not look.
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

# By name, the size and the checksum (CRC-32) of a file.
Files = dict[str, tuple[int, int]]
_READ_BYTES = 1 << 22
_METADATA = ".metadata"
_NAME = re.compile(r"__\d+_\d+\.distcp|\.metadata")
# In place of a tensor that is in the folder: its type.
_SPREAD = "autoaccum.spread"


def write(ranks: Ranks, tensors: Mapping[str, Tensor], folder: Path) -> Files:
    """Write tensors, together with all ranks; return what each file is.

    Raises:
        Exception: Whatever a rank met in writing, on every rank.
    """
    from torch.distributed import checkpoint  # noqa: PLC0415 - takes long, and few need it

    folder.mkdir(exist_ok=True)
    ranks.exchange("shards")  # one that cannot even begin has told the others now, who would wait for it in there
    with _failures_told():
        checkpoint.save(  # type: ignore[attr-defined]
            dict(tensors), checkpoint_id=folder, process_group=ranks.hosts
        )
    own = [*folder.glob(f"__{ranks.rank}_*"), *([folder / _METADATA] if ranks.rank == 0 else [])]
    said = ranks.exchange("shards", {path.name: (path.stat().st_size, _sum(path)) for path in own})
    return {name: file for files in said for name, file in files.items()}


def read(ranks: Ranks, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Read tensors in place, together with all ranks, of which there may be another number than wrote them."""
    from torch.distributed import checkpoint  # noqa: PLC0415 - as above

    from autoaccum._distributed.dcp_metadata import Reader  # noqa: PLC0415 - as above

    with _failures_told():
        checkpoint.load(  # type: ignore[attr-defined]
            dict(tensors), storage_reader=Reader(folder), process_group=ranks.hosts
        )


@contextmanager
def _failures_told() -> Iterator[None]:
    """Make an ordinary error of the library's, which `except Exception` would let pass."""
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415 - as above

    try:
        yield
    except CheckpointException as error:
        who = "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items()))
        raise RuntimeError(who) from error


def are_files(value: Any) -> bool:
    """Whether a value read from a checkpoint is `Files`, of names that stay within their folder."""
    return isinstance(value, dict) and all(
        isinstance(name, str)
        and _NAME.fullmatch(name) is not None
        and isinstance(file, list | tuple)
        and len(file) == 2  # noqa: PLR2004 - a pair
        and all(type(number) is int and number >= 0 for number in file)
        for name, file in value.items()
    )


def damage(folder: Path, files: Files) -> str | None:
    """Return what is wrong with a folder by the sizes of its files; None where nothing is."""
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{folder.name}/{name} is missing"
        if path.stat().st_size != size:
            return f"{folder.name}/{name} has {path.stat().st_size} bytes in place of {size}"
    return None


def damage_of_part(ranks: Ranks, folder: Path, files: Files) -> str | None:
    """Return what is wrong with those files of a folder, by their checksums, that this rank is to look at."""
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


# --- what is spread, by name ------------------------------------------------------------------------------------------


def of_modules(modules: list[nn.Module]) -> dict[str, Tensor]:
    """Return the parameters of some modules that are spread over ranks."""
    return {
        f"model.{number}.{name}": parameter.detach()
        for number, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if is_spread(parameter)
    }


def of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return what an optimizer keeps that is spread over ranks."""
    return {
        f"optimizer.{number}.{name}": value
        for number, parameter in enumerate(_parameters(optimizer))
        for name, value in optimizer.state.get(parameter, {}).items()
        if is_spread(value)
    }


def rest_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's `state_dict`, with marks for what is spread over ranks."""
    whole = optimizer.state_dict()
    state = {
        number: {name: {_SPREAD: str(value.dtype)} if is_spread(value) else value for name, value in values.items()}
        for number, values in whole["state"].items()
    }
    return {"state": state, "param_groups": whole["param_groups"]}


def put_rest_back(optimizer: torch.optim.Optimizer, kept: Mapping[str, Any]) -> None:
    """Give an optimizer what `rest_of_optimizer` has kept, with room for what is still to be read."""
    optimizer.state.clear()
    numbers = itertools.count()
    for group, saved in zip(optimizer.param_groups, kept["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
        for parameter in group["params"]:
            for name, value in kept["state"].get(next(numbers), {}).items():
                # Counts of steps stay on the host but where kernels read them.
                is_of_device = name != "step" or group.get("capturable") or group.get("fused")
                optimizer.state[parameter][name] = _made_again(value, parameter, is_of_device=bool(is_of_device))
    # Schedulers warn when they move before the optimizer has: it has, in an earlier process.
    optimizer._opt_called = True  # type: ignore[attr-defined]


def _made_again(value: Any, parameter: nn.Parameter, *, is_of_device: bool) -> Any:
    if isinstance(value, dict) and value.keys() == {_SPREAD}:
        return torch.zeros_like(parameter.detach(), dtype=getattr(torch, value[_SPREAD].removeprefix("torch.")))
    return value.to(parameter.device) if isinstance(value, Tensor) and is_of_device else value


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
