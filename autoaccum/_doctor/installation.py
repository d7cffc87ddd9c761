"""Which versions are installed, and whether PyTorch is one that autoaccum can use."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import torch

from autoaccum._doctor.findings import Fact, Finding, Problem, fact
from autoaccum._sizing.cache import folder_of_plans
from autoaccum._system.own_distribution import REQUIREMENTS, __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_OWN = "autoaccum"
# What a requirement begins with: the name of a distribution.
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_OF_EXTRA = re.compile(r"""extra\s*==\s*['"](?P<extra>[^'"]+)['"]""")
_LEAST_TORCH = re.compile(r"torch\s*>=\s*(?P<version>[0-9.]+)")
_FOR_DEVELOPMENT = ("bench", "examples")


def of_installation(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is installed.

    Args:
        environment: The variables of this process.
    """
    yield fact("autoaccum", __version__)
    yield fact("Python", f"{platform.python_version()}, {sys.executable}")
    yield fact("system", platform.platform())
    yield fact("PyTorch", f"{torch.__version__}, built for {_built_for()}")
    yield from _too_old(REQUIREMENTS)
    if REQUIREMENTS:
        yield from _optional(REQUIREMENTS)
    yield from _plans()
    own = sorted(f"{name}={value}" for name, value in environment.items() if name.startswith("AUTOACCUM_"))
    if own:
        yield Fact("variables", ", ".join(own), own)


def _built_for() -> str:
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return "the CPU alone" if torch.version.hip is None else f"ROCm {torch.version.hip}"


def _too_old(requirements: list[str]) -> Iterator[Problem]:
    least = next((found["version"] for text in requirements if (found := _LEAST_TORCH.match(text))), None)
    if least is not None and torch.__version__ < least:
        yield Problem(
            f"autoaccum needs PyTorch {least} or newer, and {sys.executable} imports {torch.__version__} from "
            f"{os.path.dirname(torch.__file__)}; upgrade it, or remove that folder from PYTHONPATH"  # noqa: PTH120
        )


def _optional(requirements: list[str]) -> Iterator[Fact]:
    """Yield which optional packages there are."""
    wanted: dict[str, str] = {}
    for text in requirements:
        extra, name = _OF_EXTRA.search(text), _NAME.match(text)
        if extra and name and extra["extra"] not in _FOR_DEVELOPMENT and name[0] != _OWN:
            wanted.setdefault(name[0], extra["extra"])
    there = {name: version for name in wanted if (version := _version(name)) is not None}
    yield Fact(
        "optional packages",
        ", ".join(f"{name} {version}" for name, version in there.items()) or "none",
        [f"{name} {version}" for name, version in there.items()],
    )
    if lacking := [name for name in wanted if name not in there]:
        extras = ",".join(dict.fromkeys(wanted[name] for name in lacking))
        yield Fact("not installed", f"{', '.join(lacking)} (pip install 'autoaccum[{extras}]')", lacking)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _plans() -> Iterator[Finding]:
    """Yield where plans of earlier runs are remembered."""
    folder = folder_of_plans()
    if folder is None:
        yield Fact("remembered plans", "none, as AUTOACCUM_CACHE_DIR is empty", 0)
        return
    try:
        place = folder.expanduser()
        count = len(list(place.glob("plan-*.json")))
        # The first run makes the folder.
        nearest = next((parent for parent in (place, *place.parents) if parent.exists()), place)
        is_writable = os.access(nearest, os.W_OK)
    except (OSError, RuntimeError):
        place, count, is_writable = folder, 0, False
    yield Fact("remembered plans", f"{count} in {place}", count)
    if not is_writable:
        yield Problem(
            f"plans cannot be remembered in {place}, so each start searches for the micro-batch; set "
            "AUTOACCUM_CACHE_DIR to a writable folder"
        )
