"""Saves sharded tensors in a folder that every rank writes its part of (torch.distributed.checkpoint).

Any number of ranks can load them again, each its own part. The library checks no checksums: whoever calls does.
"""

from __future__ import annotations

import itertools
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

_METADATA = ".metadata"
# Stands in for a tensor that is in the folder, with its type.
_SPREAD = "autoaccum.spread"


def write(ranks: Ranks, tensors: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Write tensors, together with all ranks; return the names of this rank's files.

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
    return [path.name for path in own]


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
