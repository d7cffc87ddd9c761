"""Renders the report as one HTML document that needs no network and no other file.

It follows the reader's light or dark setting. Its only script sorts tables; the document allows no other by its
security policy, and reads well without it. Text from the user (names of models, files, processes) is escaped.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from autoaccum._report.html_page import article_of, document_of, figure_of, header_of, lacking_of
from autoaccum._report.records import DOES_NOT_FIT, FITS, TIGHT
from autoaccum._report.wording import (
    alive_of,
    are_numbers,
    headline_of,
    notes_of,
    sections_of,
    title_of,
    verdicts_of,
)
from autoaccum._system.own_distribution import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autoaccum._report.drawing import Drawing
    from autoaccum._report.records import Findings
    from autoaccum._report.wording import Section

# A class of the style, and the answer as text.
_ANSWERS = {FITS: ("fits", "fits"), TIGHT: ("tight", "is tight"), DOES_NOT_FIT: ("fails", "does not fit")}


def page_of(report: Findings) -> str:
    """Return the report as a complete document."""
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return document_of(f"Pre-flight report: {title_of(report)}", fragment_of(report), policy)


def fragment_of(report: Findings) -> str:
    """Return the report as an element with its own style, for notebooks."""
    drawings, style = _drawings(report)
    return article_of("\n".join(_body(report, drawings)), style)


def _body(report: Findings, drawings: Sequence[Drawing] | None) -> Iterator[str]:
    yield header_of("Pre-flight report", title_of(report))
    verdicts = verdicts_of(report)
    answer, told, largest = headline_of(report)
    yield f'<p class="headline {_ANSWERS[answer][0]}"><b>{escape(told)}.</b> {escape(largest)}</p>'
    if len(verdicts) > 1:
        yield '<ul class="verdicts">'
        for verdict in verdicts:
            kind, how = _ANSWERS[verdict.answer]
            yield f'<li class="{kind}"><b>{escape(verdict.place)} {how}</b> {escape(verdict.text)}</li>'
        yield "</ul>"
    yield from _list("Warnings", "warnings", report.warnings)
    if drawings is None:
        yield lacking_of("The tables below have the same numbers.")
    for drawing in drawings or ():
        yield figure_of(drawing)
    for section in (alive_of(report), *sections_of(report)):
        yield from _section(section)
    for title, notes in notes_of(report):
        yield from _list(title, "notes", notes)
    yield f"<footer>autoaccum {escape(__version__)}</footer>"
    yield f"<script>{_script()}</script>"


def _drawings(report: Findings) -> tuple[list[Drawing] | None, str]:
    """Return the pictures and their style; None where the extra is not installed."""
    # Here, because Altair is slow to import and few need it.
    try:
        from autoaccum._report import charts, drawing  # noqa: PLC0415
    except ImportError:
        return None, ""
    return list(charts.charts_of(report)), drawing.style_of(".autoaccum svg")


def _script() -> str:
    return resources.files("autoaccum._report").joinpath("sorting.js").read_text(encoding="utf-8")


def _section(section: Section) -> Iterator[str]:
    if not section.rows:
        return
    sorts = " sorts" if section.sorts_by else ""
    yield f"<section><h2>{escape(section.title)}</h2>"
    yield f'<div class="wide"><table class="{"columns" if section.header else "facts"}{sorts}">'
    numbers = [are_numbers([row[index] for row in section.rows]) for index in range(len(section.header))]
    if section.header:
        cells = (
            f'<th scope="col"{_class(is_number=number)}>{escape(name)}</th>'
            for name, number in zip(section.header, numbers, strict=True)
        )
        yield f"<thead><tr>{''.join(cells)}</tr></thead>"
    # Rows that sort are bodies of their own, which keeps the lines below with them.
    yield "" if sorts else "<tbody>"
    for row, (first, *others) in enumerate(section.rows):
        keys = section.sorts_by[row] if sorts else ()
        cells = (
            f"<td{_class(is_number=bool(numbers) and numbers[index])}{_key(keys, index)}>{escape(text)}</td>"
            for index, text in enumerate(others, start=1)
        )
        is_number = bool(numbers) and numbers[0]
        yield "<tbody>" if sorts else ""
        yield f'<tr><th scope="row"{_class(is_number=is_number)}>{escape(first)}</th>{"".join(cells)}</tr>'
        for name, text in section.below[row] if section.below else ():
            cell = f'<td colspan="{len(section.header)}"><i>{escape(name)}</i> {escape(text)}</td>'
            yield f'<tr class="below">{cell}</tr>'
        yield "</tbody>" if sorts else ""
    yield f"{'' if sorts else '</tbody>'}</table></div></section>"


def _class(*, is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _key(keys: Sequence[float | None], index: int) -> str:
    return "" if not keys or keys[index] is None else f' data-number="{keys[index]}"'


def _list(title: str, kind: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        items = "".join(f"<li>{escape(text)}</li>" for text in texts)
        yield f'<section class="{kind}"><h2>{escape(title)}</h2><ul>{items}</ul></section>'
