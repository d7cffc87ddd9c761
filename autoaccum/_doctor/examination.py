"""Examines everything, area by area."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoaccum._doctor.devices import of_devices
from autoaccum._doctor.findings import Fact, Problem
from autoaccum._doctor.installation import of_installation
from autoaccum._doctor.limits import of_limits
from autoaccum._doctor.machine import of_machine

if TYPE_CHECKING:
    from collections.abc import Mapping

_AREAS = {
    "installation": of_installation,
    "machine": of_machine,
    "limits": of_limits,
    "devices": of_devices,
}


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found.

    Attributes:
        areas: The facts of each area.
        problems: What does not fit together, and what to do.
    """

    areas: Mapping[str, tuple[Fact, ...]]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON document: an object for each area, and the list "problems"."""
        areas = {area: {fact.name: fact.value for fact in facts} for area, facts in self.areas.items()}
        return {**areas, "problems": list(self.problems)}


def examine(environment: Mapping[str, str] = os.environ) -> Examination:
    """Examine where this process runs.

    Args:
        environment: The variables of this process; others in tests.
    """
    found = {area: list(examine_area(environment)) for area, examine_area in _AREAS.items()}
    return Examination(
        {area: tuple(one for one in findings if isinstance(one, Fact)) for area, findings in found.items()},
        tuple(one.text for findings in found.values() for one in findings if isinstance(one, Problem)),
    )
