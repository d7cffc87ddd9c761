"""`Report`: the data and its output formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoaccum._report import document, page, table
from autoaccum._report.records import Findings
from autoaccum._system.files import beside

if TYPE_CHECKING:
    from os import PathLike

    from rich.console import RenderableType


@dataclass(frozen=True, repr=False)
class Report(Findings):
    """Whether and how a job can be trained: measured on a device at hand, predicted for others, or both.

    It prints as a table and renders in notebooks.

    Attributes:
        subject: The job to train.
        measured: Measurements on the device at hand; None if nothing was measured.
        predicted: Predictions, one for each card.
        host: The host's memory.
        loader: The speed of the loader; None if it was not timed.
        warnings: What may go wrong.
        notes: Choices made by default, and the assumptions of the predictions.
        remedies: Changes that would reduce the memory of a step.
        remedies_on: The device that the remedies are for.
        lengths: The sequence length the report applies to; None without sequences.
        required_micro_batch: The micro-batch that must fit everywhere; None if any will do.
        is_optimistic: Whether that is held against the largest size that is predicted to fit, not the safe one.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types, which docs/report.md describes."""
        return document.document_of(self)

    def to_html(self) -> str:
        """Return the report as one self-contained page: pictures and tables, in the reader's light or dark setting.

        Pictures require `pip install altair vl-convert-python`; without it, the page has its tables, and says so.
        """
        return page.page_of(self)

    def save_html(self, path: str | PathLike[str]) -> None:
        """Write the page to a file; on failure the file is unchanged.

        Raises:
            InvalidInputError: It is no path, the folder does not exist, or permission to write there is missing.
        """
        with beside(path) as unfinished:
            unfinished.write_text(self.to_html(), encoding="utf-8")

    def __str__(self) -> str:
        return table.text_of(self)

    __repr__ = __str__

    def __rich__(self) -> RenderableType:
        return table.table_of(self)

    def _repr_html_(self) -> str:
        return page.fragment_of(self)
