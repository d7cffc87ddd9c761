"""Shows an examination as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from autoaccum._report.table import facts, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from autoaccum._doctor.examination import Examination

_FINE = "Nothing was found that does not fit together."


def table_of(examination: Examination) -> RenderableType:
    """Return the examination for a rich console."""
    return Group(*_parts(examination))


def _parts(examination: Examination) -> Iterator[RenderableType]:
    for area, found in examination.areas.items():
        yield Text(area.capitalize(), style="bold")
        yield Padding(facts([(one.name, one.text) for one in found]), (0, 0, 1, 2), expand=False)
    if not examination.problems:
        yield Text(_FINE, style="bold green")
        return
    yield from listed("What does not fit together", examination.problems, "yellow")
