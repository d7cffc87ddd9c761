"""The report itself: what was found and foreseen, whether it fits, and the ways to show it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum._report import document, page, table
from autoaccum._report.files import beside
from autoaccum._report.records import Findings

if TYPE_CHECKING:
    from os import PathLike

    from rich.console import RenderableType


@dataclass(frozen=True, repr=False)
class Report(Findings):
    """What will happen when a job is trained: measured on a device at hand, predicted for others, or both.

    It prints as a table and shows itself in notebooks.

    Attributes:
        subject: What is to be trained.
        measured: What was found on the device at hand; None where nothing was measured.
        predicted: What is foreseen, a card each.
        host: The host's memory.
        loader: How fast the loader is; None where that was not asked.
        warnings: What may go otherwise than expected, a text each.
        notes: What was chosen because nothing was said, and what is to be known about predictions, a text each.
        remedies: What would make a step smaller.
        remedies_on: The device on which it would.
        lengths: How long sequences are, and for which length all this is said; None where there are none.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON's types; `report/schema.json` and docs/report.md describe them."""
        return document.document_of(self)

    def to_html(self) -> str:
        """Return it as one page that needs nothing else: tables and a picture, light or dark as its reader likes."""
        return page.page_of(self)

    def save_html(self, path: str | PathLike[str]) -> None:
        """Write the page to a file, which is whole or not there."""
        with beside(path) as unfinished:
            unfinished.write_text(self.to_html(), encoding="utf-8")

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw memory over the micro-batch: limits, trials, plan and predictions.

        Args:
            path: The file; its ending says which kind (.png, .svg, .pdf).

        Raises:
            InvalidInputError: matplotlib is not there, or does not write such files.
        """
        # Here, because matplotlib is slow to import and few need it.
        from autoaccum._report import plotting  # noqa: PLC0415

        plotting.plot(self, Path(path))

    def __str__(self) -> str:
        return table.text_of(self)

    __repr__ = __str__

    def __rich__(self) -> RenderableType:
        return table.table_of(self)

    def _repr_html_(self) -> str:
        return page.fragment_of(self)
