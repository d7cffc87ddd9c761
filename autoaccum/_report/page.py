"""Renders the report as one HTML document that needs no network, no script and no other file.

It follows the reader's light or dark setting and the width of the screen (`html_page.css`). Text from the user (names
of models, files, processes) is escaped.
"""

from __future__ import annotations

from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from autoaccum._report.drawing import ANSWERS, bars, curves
from autoaccum._report.wording import PLANS, alive_of, are_numbers, headline_of, notes_of, sections_of, title_of
from autoaccum._system.own_distribution import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autoaccum._report.records import ReportContents
    from autoaccum._report.wording import Section

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_of(report: ReportContents) -> str:
    """Return the report as a complete document."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>Pre-flight report: {escape(title_of(report))}</title>\n</head>\n<body>\n{fragment_of(report)}\n"
        "</body>\n</html>\n"
    )


def fragment_of(report: ReportContents) -> str:
    """Return the report as an element with its own style, for notebooks."""
    style = resources.files("autoaccum._report").joinpath("html_page.css").read_text(encoding="utf-8")
    body = "\n".join(_body(report))
    return f'<style>\n{style}</style>\n<article class="autoaccum">\n{body}\n</article>'


def _body(report: ReportContents) -> Iterator[str]:
    yield f'<header><p class="kind">Pre-flight report</p><h1>{escape(title_of(report))}</h1></header>'
    answer, headline, plan = headline_of(report)
    yield f'<p class="headline {ANSWERS[answer]}"><b>{escape(headline)}</b> {escape(plan)}</p>'
    yield from _list("Warnings", "warnings", report.warnings)
    yield bars(report)
    sections = sections_of(report)
    first = [section for section in sections if section.title == PLANS]
    for section in first:
        yield from _section(section)
    yield curves(report)
    for section in (alive_of(report), *(one for one in sections if one not in first)):
        yield from _section(section)
    for title, notes in notes_of(report):
        yield from _list(title, "notes", notes)
    yield f"<footer>autoaccum {escape(__version__)}</footer>"


def _section(section: Section) -> Iterator[str]:
    if not section.rows:
        return
    yield f"<section><h2>{escape(section.title)}</h2>"
    yield f'<div class="wide"><table class="{"columns" if section.header else "facts"}">'
    styles = [
        ' class="number"' if section.header and are_numbers([row[index] for row in section.rows]) else ""
        for index in range(len(section.rows[0]))
    ]
    if section.header:
        cells = (
            f'<th scope="col"{style}>{escape(name)}</th>' for name, style in zip(section.header, styles, strict=True)
        )
        yield f"<thead><tr>{''.join(cells)}</tr></thead>"
    yield "<tbody>"
    for first, *others in section.rows:
        cells = (f"<td{style}>{escape(text)}</td>" for text, style in zip(others, styles[1:], strict=True))
        yield f'<tr><th scope="row"{styles[0]}>{escape(first)}</th>{"".join(cells)}</tr>'
    yield "</tbody></table></div></section>"


def _list(title: str, kind: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        items = "".join(f"<li>{escape(text)}</li>" for text in texts)
        yield f'<section class="{kind}"><h2>{escape(title)}</h2><ul>{items}</ul></section>'
