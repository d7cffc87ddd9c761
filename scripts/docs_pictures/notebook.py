"""Makes examples/tutorial.ipynb from the tutorial's page: its text, its files, and the commands that run them."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from tutorial import ROOT

PAGE = ROOT / "docs" / "tutorial.md"
FILE = ROOT / "examples" / "tutorial.ipynb"
SITE = "../docs/"
# The page's pieces that a notebook runs instead of quoting: a file, and a command with what it printed.
_PIECE = re.compile(
    r'```python title="(?P<name>[\w.]+)"\n(?P<file>.*?)\n```|```text\n\$ python (?P<typed>[^\n]+)\n(?P<printed>.*?)```',
    re.DOTALL,
)


def notebook() -> str:
    """Return the notebook's JSON. The task comes first, since the others import it."""
    page = PAGE.read_text(encoding="utf-8")
    page, _, task = page.partition("## The task\n\n")
    page = re.sub(r"```console\n.*?```\n\nAll files .*?\n\n", "", page, flags=re.DOTALL)
    page = page.replace("## 1. ", f"Each file is a cell, and so is each command.\n\n{task}\n## 1. ", 1)
    page = page.replace("([`task.py`](#the-task))", "(`task.py`)")
    cells: list[dict[str, Any]] = []
    while found := _PIECE.search(page):
        cells += _told(page[: found.start()])
        source, printed = (
            (f"%%writefile {found['name']}\n{found['file']}", f"Writing {found['name']}\n")
            if found["name"]
            # By this kernel's own Python, without a progress bar.
            else (
                f"import sys\n\n!{{sys.executable}} {found['typed']} 2>&1 | cat",
                found["printed"].removesuffix("Killed\n"),
            )
        )
        cells.append(_code(source, printed, 1 + sum(cell["cell_type"] == "code" for cell in cells)))
        page = page[found.end() :]
    cells += _told(page)
    for number, cell in enumerate(cells):
        cell["id"] = f"step-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _told(words: str) -> list[dict[str, Any]]:
    """Return a cell of text; its pictures are within it, its links lead to the repository's pages."""
    attached: dict[str, Any] = {}

    def attach(found: re.Match[str]) -> str:
        picture = (ROOT / "docs" / found["path"]).read_bytes()
        name = found["path"].rsplit("/", 1)[-1]
        attached[name] = {"image/svg+xml": base64.b64encode(picture).decode()}
        return f"![{found['alt']}](attachment:{name})"

    words = re.sub(r"!\[(?P<alt>[^\]]*)\]\((?P<path>[^)]*\.svg)\)", attach, words.strip())
    words = re.sub(r"\]\((?!attachment:|https?:)([^)]+)\)", rf"]({SITE}\1)", words)
    if not words:
        return []
    cell: dict[str, Any] = {"cell_type": "markdown", "metadata": {}, "source": words}
    return [cell | {"attachments": attached} if attached else cell]


def _code(source: str, printed: str, number: int) -> dict[str, Any]:
    shown = {"name": "stdout", "output_type": "stream", "text": printed}
    return {"cell_type": "code", "execution_count": number, "metadata": {}, "outputs": [shown], "source": source}
