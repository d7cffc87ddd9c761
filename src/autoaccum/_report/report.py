"""`Report`: the data, and the forms it takes."""

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
    """Whether and how a job can be trained: measured on a device at hand, predicted for others, or both.

    It prints as a table and shows itself in notebooks.

    Attributes:
        subject: What is to be trained.
        measured: What was measured on the device at hand; None where nothing was.
        predicted: Predictions, one for each card.
        host: The host's memory.
        loader: How fast the loader is; None where it was not timed.
        warnings: What may go wrong.
        notes: What was chosen by default, and the assumptions of the predictions.
        remedies: What would make a step smaller.
        remedies_on: The device that the remedies are for.
        lengths: The length of sequences that the report holds for; None where there are none.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON's types, which `_report/schema.json` and docs/report.md describe."""
        return document.document_of(self)

    def to_html(self) -> str:
        """Return it as one self-contained page: tables and a picture, light or dark as the reader's system is."""
        return page.page_of(self)

    def save_html(self, path: str | PathLike[str]) -> None:
        """Write the page to a file; on failure the file is unchanged."""
        with beside(path) as unfinished:
            unfinished.write_text(self.to_html(), encoding="utf-8")

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw memory over the micro-batch: limits, trials, plan and predictions.

        Args:
            path: The file; its suffix chooses the format (.png, .svg, .pdf).

        Raises:
            InvalidInputError: matplotlib is missing, or does not write such files.
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
