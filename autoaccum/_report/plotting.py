"""Draws the report's memory against micro-batch size to a file, whose suffix sets the format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum._system.files import beside
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from autoaccum._report.records import Findings


def plot(report: Findings, path: Path) -> None:
    """Draw the report to a file, whose suffix sets the format; on failure the file is unchanged.

    Raises:
        InvalidInputError: Altair or vl-convert is missing or does not support the format, or the file cannot be
            written.
    """
    charts, drawing = _library_for(path)
    with beside(path) as unfinished:
        unfinished.write_bytes(drawing.file_of(charts.memory_by_size(report), _suffix(path)))


def check_plot(path: Path) -> None:
    """Raise if the file could not be drawn.

    Raises:
        InvalidInputError: Altair or vl-convert is missing, or does not support the format.
    """
    _library_for(path)


def _library_for(path: Path) -> tuple[ModuleType, ModuleType]:
    """Return the modules that draw."""
    try:
        # Here, because Altair is slow to import and few need it.
        from autoaccum._report import charts, drawing  # noqa: PLC0415
    except ImportError as error:
        raise InvalidInputError(
            f"a plot needs Altair and vl-convert, and {error.name} is not installed; "
            "pip install altair vl-convert-python, or use --html, whose tables need neither"
        ) from error
    if _suffix(path) not in drawing.FORMATS:
        raise InvalidInputError(
            f"a picture cannot have the format of {str(path)!r}; end its name in one of .{', .'.join(drawing.FORMATS)}"
        )
    return charts, drawing


def _suffix(path: Path) -> str:
    return path.suffix.lstrip(".").lower()
