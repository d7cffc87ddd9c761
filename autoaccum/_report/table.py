"""Renders the report as rich tables for a terminal, or as plain text of 80 columns without escape codes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoaccum._report.records import DOES_NOT_FIT, FITS, TIGHT
from autoaccum._report.wording import are_numbers, notes_of, sections_of, title_of, verdicts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from autoaccum._report.records import ReportContents
    from autoaccum._report.wording import Section

_WIDTH = 80
# Names of facts are wrapped to it.
_NAMES = 26
_MARKS = {
    FITS: ("  fits ", "bold green"),
    TIGHT: ("  tight", "bold yellow"),
    DOES_NOT_FIT: ("  fails", "bold red"),
}


def table_of(report: ReportContents) -> RenderableType:
    """Return the report for a rich console."""
    return Group(*_parts(report))


def text_of(report: ReportContents) -> str:
    """Return the report as plain text of at most 80 columns."""
    return plain_text(table_of(report))


def plain_text(shown: RenderableType) -> str:
    """Return what rich would print as plain text of at most 80 columns, without trailing spaces."""
    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None, force_terminal=False).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _parts(report: ReportContents) -> Iterator[RenderableType]:
    yield Text.assemble(("Pre-flight report: ", "bold"), (title_of(report), "bold"))
    answers = Table.grid(padding=(0, 1))
    for verdict in verdicts_of(report):
        mark = Text(*_MARKS[verdict.answer])
        answers.add_row(mark, Text(f"{verdict.found.name}: {verdict.text}"))
    yield answers
    for section in sections_of(report):
        yield Text()
        yield Text(section.title, style="bold")
        yield Padding(_table(section), (0, 0, 0, 2), expand=False)
    yield from listed("Warnings", report.warnings, "yellow")
    for title, notes in notes_of(report):
        yield from listed(title, notes, "dim")


def _table(section: Section) -> Table:
    if not section.header:
        return facts(section.rows)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for index, name in enumerate(section.header):
        numbers = are_numbers([row[index] for row in section.rows])
        table.add_column(Text(name), justify="right" if numbers else "left", overflow="fold")
    for row in section.rows:
        table.add_row(*map(Text, row))
    return table


def facts(rows: Sequence[tuple[str, ...]]) -> Table:
    """Return a table of names and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", max_width=_NAMES)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def listed(title: str, texts: Sequence[str], style: str) -> Iterator[RenderableType]:
    """Yield a title and the texts below it, one to a line; nothing without texts."""
    if not texts:
        return
    yield Text()
    yield Text(title, style="bold")
    items = Table.grid(padding=(0, 1))
    for text in texts:
        items.add_row(Text("  -", style=style), Text(text))
    yield items
