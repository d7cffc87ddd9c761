"""Determines how many ranks a command will have, from its launcher or from environment variables.

For `torchrun` (and `python -m torch.distributed.run`) these are its options, or the PET_ variables in their place. A
number that depends on another machine, or changes during the run, must be passed with --world-size.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autoaccum._system.environment import positive_int
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MODULES = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic")


def world_size_of(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that share a target batch; 1 by default.

    Raises:
        InvalidInputError: The launcher's options do not fix the number, or a variable is not a number.
    """
    options = _launcher_options(command)
    if options is None:
        return positive_int("WORLD_SIZE", environment) or positive_int("SLURM_NTASKS", environment) or 1
    nodes = _option(options, "nnodes", environment) or "1"
    here = _option(options, "nproc-per-node", environment) or "1"
    return _number(nodes, "--nnodes", {}) * _number(here, "--nproc-per-node", _counts())


def _launcher_options(command: Sequence[str]) -> Sequence[str] | None:
    """Return what follows the launcher in a command; None if there is no launcher."""
    for index, argument in enumerate(command):
        is_module = index > 0 and command[index - 1] == "-m" and argument in _MODULES
        if is_module or Path(argument).name == "torchrun":
            return command[index + 1 :]
    return None


def _option(options: Sequence[str], name: str, environment: Mapping[str, str]) -> str | None:
    spellings = {f"--{name}", f"--{name.replace('-', '_')}"}
    for index, argument in enumerate(options):
        before, equals, value = argument.partition("=")
        if before in spellings:
            return value if equals else next(iter(options[index + 1 : index + 2]), None)
    return environment.get(f"PET_{name.replace('-', '_').upper()}")


def _counts() -> dict[str, int]:
    """Return what torchrun's words mean: as many processes as devices. Counting makes no CUDA context."""
    cards = torch.accelerator.device_count()
    processors = os.cpu_count() or 1
    return {"cpu": processors, "auto": cards or processors} | ({"gpu": cards, "xpu": cards} if cards else {})


def _number(text: str, option: str, words: Mapping[str, int]) -> int:
    low, colon, high = text.partition(":")
    if text in words:
        return words[text]
    if colon and low == high:
        text = low
    if text.isascii() and text.isdigit() and int(text) >= 1:
        return int(text)
    raise InvalidInputError(f"{option}={text} does not fix the number of ranks; pass --world-size N")
