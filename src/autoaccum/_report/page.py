"""Renders the report as one HTML document that needs no network, no script and no other file.

It follows the reader's light or dark setting. Text from the user (names of models, files, processes) is escaped.
"""

from __future__ import annotations

from html import escape
from importlib.metadata import version
from typing import TYPE_CHECKING

from autoaccum._report.curves import picture_of
from autoaccum._report.records import DOES_NOT_FIT, FITS, TIGHT
from autoaccum._report.svg import COLOURS, svg_of
from autoaccum._report.wording import are_numbers, notes_of, sections_of, title_of, verdicts_of
from autoaccum._system.html_page import article_of, document_of, header_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autoaccum._report.curves import Picture
    from autoaccum._report.records import Findings
    from autoaccum._report.wording import Section

# A class of the style, and the answer as text.
_ANSWERS = {FITS: ("fits", "fits"), TIGHT: ("tight", "is tight"), DOES_NOT_FIT: ("fails", "does not fit")}


def page_of(report: Findings) -> str:
    """Return the report as a complete document."""
    return document_of(f"Pre-flight report: {title_of(report)}", fragment_of(report))


def fragment_of(report: Findings) -> str:
    """Return the report as an element with its own style, for notebooks."""
    return article_of("\n".join(_body(report)))


def _body(report: Findings) -> Iterator[str]:
    yield header_of("Pre-flight report", title_of(report))
    yield '<ul class="verdicts">'
    for verdict in verdicts_of(report):
        kind, answer = _ANSWERS[verdict.answer]
        yield f'<li class="{kind}"><b>{escape(verdict.place)} {answer}</b> {escape(verdict.text)}</li>'
    yield "</ul>"
    yield from _list("Warnings", "warnings", report.warnings)
    yield from _figure(picture_of(report))
    for section in sections_of(report):
        yield from _section(section)
    for title, notes in notes_of(report):
        yield from _list(title, "notes", notes)
    yield f"<footer>autoaccum {escape(version('autoaccum'))}</footer>"


def _figure(picture: Picture) -> Iterator[str]:
    yield f'<figure><div class="wide">\n{svg_of(picture)}\n</div><figcaption>'
    for index, line in enumerate(picture.lines):
        kind = "measured" if line.first.is_measured else "predicted"
        yield f'<span class="key {kind}" style="--c: var(--c{index % COLOURS})">{escape(line.label)}</span>'
    yield "<span>Memory of a step against micro-batch size. Diamonds are the plans, crosses did not fit.</span>"
    yield "</figcaption></figure>"


def _section(section: Section) -> Iterator[str]:
    yield f"<section><h2>{escape(section.title)}</h2>"
    yield f'<div class="wide"><table class="{"columns" if section.header else "facts"}">'
    numbers = [are_numbers([row[index] for row in section.rows]) for index in range(len(section.header))]
    if section.header:
        cells = (
            f'<th scope="col"{_class(is_number=number)}>{escape(name)}</th>'
            for name, number in zip(section.header, numbers, strict=True)
        )
        yield f"<thead><tr>{''.join(cells)}</tr></thead>"
    yield "<tbody>"
    for row, (first, *others) in enumerate(section.rows):
        cells = (
            f"<td{_class(is_number=bool(numbers) and numbers[index])}>{escape(text)}</td>"
            for index, text in enumerate(others, start=1)
        )
        is_number = bool(numbers) and numbers[0]
        yield f'<tr><th scope="row"{_class(is_number=is_number)}>{escape(first)}</th>{"".join(cells)}</tr>'
        for name, text in section.below[row] if section.below else ():
            cell = f'<td colspan="{len(section.header)}"><i>{escape(name)}</i> {escape(text)}</td>'
            yield f'<tr class="below">{cell}</tr>'
    yield "</tbody></table></div></section>"


def _class(*, is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _list(title: str, kind: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        items = "".join(f"<li>{escape(text)}</li>" for text in texts)
        yield f'<section class="{kind}"><h2>{escape(title)}</h2><ul>{items}</ul></section>'
