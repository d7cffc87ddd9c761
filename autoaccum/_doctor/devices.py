"""The accelerators: what the driver sees, what PyTorch sees, and why the two may differ.

Cards are read through NVML, which needs no context on them; PyTorch is only asked whether it could use them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from autoaccum._doctor.findings import Fact, Finding, Problem, fact
from autoaccum._memory import nvml
from autoaccum._memory.available_devices import find_accelerator
from autoaccum._memory.limits import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from autoaccum._memory.nvml import CardReading, Driver

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SYNCHRONOUS = "CUDA_LAUNCH_BLOCKING"
# Of a card's memory; with less free, other processes or a display hold the rest.
_LITTLE_FREE = 0.1
_NAMED = 3


def of_devices(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the devices.

    Args:
        environment: The variables of this process.
    """
    driver = nvml.read_driver()
    yield Fact("NVIDIA driver", "none" if driver is None else driver.text, None if driver is None else driver.version)
    every, seen = nvml.cards_of(None), nvml.cards_of(environment.get(_VISIBLE))
    for name in (_VISIBLE, *_ALLOCATOR, _SYNCHRONOUS):
        if name in environment:
            yield fact(name, environment[name])
    for number, card in enumerate(seen):
        yield from _of_card(number, card)
    there, warned = _asked()
    count = torch.accelerator.device_count() if there is not None else 0
    yield Fact("used by PyTorch", "the CPU alone" if there is None else f"{count} x {there}", count)
    if driver is not None and there is None:
        yield Problem(_why_unused(driver, every, seen, environment, warned))
    if environment.get(_SYNCHRONOUS, "0") not in ("", "0"):
        yield Problem(f"{_SYNCHRONOUS}={environment[_SYNCHRONOUS]} makes each kernel wait for its end; unset it")


def _of_card(number: int, card: CardReading) -> Iterator[Finding]:
    text = f"{card.name}, {format_bytes(card.free_bytes)} free of {format_bytes(card.total_bytes)}"
    holders = ", ".join(f"{other.name} (pid {other.pid})" for other in card.neighbours[:_NAMED])
    yield Fact(f"card {number}", f"{text}{f', used by {holders}' if holders else ''}", card.total_bytes)
    if card.free_bytes < _LITTLE_FREE * card.total_bytes:
        yield Problem(
            f"card {number} has {format_bytes(card.free_bytes)} of {format_bytes(card.total_bytes)} free"
            f"{f' ({holders} use it)' if holders else ''}; choose another card with {_VISIBLE}, or wait for its end"
        )


def _asked() -> tuple[str | None, str]:
    """Return the kind of device that PyTorch would use, and what it warns of where it uses none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        there = find_accelerator()
    return None if there is None else there.type, "; ".join(str(warning.message).split("\n")[0] for warning in caught)


def _why_unused(
    driver: Driver,
    every: Sequence[CardReading],
    seen: Sequence[CardReading],
    environment: Mapping[str, str],
    warned: str,
) -> str:
    cards = f"{len(every)} card{'s' if len(every) != 1 else ''}"
    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__} is built without CUDA, so it does not use the {cards} that the driver sees; "
            "install a build for CUDA"
        )
    if not every:
        return f"the NVIDIA driver {driver.version} is there and sees no card; have its kernel module and cards checked"
    if not seen:
        return f"{_VISIBLE}={environment.get(_VISIBLE, '')!r} hides the {cards} of this machine; unset or correct it"
    built = tuple(map(int, torch.version.cuda.split(".")[:2]))
    if driver.cuda is not None and built[0] > driver.cuda[0]:
        return (
            f"PyTorch {torch.__version__} is built for CUDA {torch.version.cuda}, and the driver {driver.version} "
            f"supports up to CUDA {'.'.join(map(str, driver.cuda))}; update the driver, or install a build for that"
        )
    return f"PyTorch does not use the {cards} that the driver sees ({warned or 'it gives no reason'})"
