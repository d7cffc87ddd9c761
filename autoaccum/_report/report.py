"""`Report`: the data and its output formats."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from autoaccum._report import page, table
from autoaccum._report.records import ReportContents
from autoaccum._system.files import beside
from autoaccum._system.own_distribution import __version__

if TYPE_CHECKING:
    from os import PathLike

    from rich.console import RenderableType


_VERSION = 3


@dataclass(frozen=True, repr=False)
class Report(ReportContents):
    """Whether and how a job can be trained: measured on a device at hand, predicted for others, or both.

    It prints as a table and renders in notebooks.

    Attributes:
        subject: The job to train.
        measured: Measurements on the device at hand; None if nothing was measured.
        predicted: Predictions, one for each GPU.
        warnings: What may go wrong.
        notes: Choices made by default, and the assumptions of the predictions.
        remedies: What would reduce the memory of a step, by names of `save_memory`.
        remedies_on: The device that the remedies are for.
        required_micro_batch: The micro-batch that must fit everywhere; None if any will do.
        is_optimistic: Whether that is held against the largest size that is predicted to fit, not the safe one.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types, by the names of its attributes; docs/report.md describes them.

        Within a `version` keys are only added. NaN and infinity become None.
        """
        whole: dict[str, Any] = _plain(asdict(self))
        for one, record in zip(self.predicted, whole["predicted"], strict=True):
            record |= {"verdict": one.verdict, "peak_bytes": one.peak_bytes, "headroom_bytes": one.headroom_bytes}
        if self.measured is not None:
            peaks = {"peak_bytes": self.measured.peak_bytes, "headroom_bytes": self.measured.headroom_bytes}
            whole["measured"] |= {"fits": self.measured.plan is not None, **peaks}
        for place, record in zip(self.places, filter(None, [whole["measured"], *whole["predicted"]]), strict=True):
            if place.footprint is not None:
                record["footprint"]["outside_bytes"] = place.footprint.outside_bytes
        answers = {"fits": self.fits, "micro_batch": self.micro_batch, "safe_micro_batch": self.safe_micro_batch}
        return {"version": _VERSION, "autoaccum": __version__, **answers, **whole}

    def to_html(self) -> str:
        """Return the report as one self-contained page: pictures and tables, in the reader's light or dark setting."""
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


def _plain(value: Any) -> Any:
    """Return a record's value as JSON has it."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
