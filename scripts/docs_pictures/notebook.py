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
# The page's pieces that a notebook runs instead of quoting: a file, and what a command printed.
_FILE = re.compile(r'```python title="(?P<name>[\w.]+)"\n--8<-- "(?P<path>[\w/.]+)"\n```')
_PRINTED = re.compile(r'```text\n--8<-- "(?P<path>[\w/.-]+)"\n```')
_CONSOLE = re.compile(r"```console\n.*?```\n\n", re.DOTALL)


def notebook() -> str:
    """Return the notebook's JSON."""
    page = _CONSOLE.sub("", PAGE.read_text(encoding="utf-8"))
    page = re.sub(
        r"Until version .*?\n\n--8<-- [^\n]*\n",
        "Each file is a cell, and so is each command.\n",
        page,
        flags=re.DOTALL,
    )
    page = re.sub(r'<div class="unbuilt".*?</div>\n\n', "", page, flags=re.DOTALL)
    # A notebook shows no screenshots of its own files.
    page = re.sub(r"`report\.html` is the [^!]*?\n\n!\[[^\]]*\]\([^)]*\.png\)\{[^}]*\}\n\n", "", page, flags=re.DOTALL)
    cells: list[dict[str, Any]] = []
    while found := min(
        filter(None, (_FILE.search(page), _PRINTED.search(page))), key=lambda hit: hit.start(), default=None
    ):
        cells += _told(page[: found.start()])
        source, printed = _file(found) if found.re is _FILE else _command(found["path"])
        cells.append(_code(source, printed, 1 + sum(cell["cell_type"] == "code" for cell in cells)))
        page = page[found.end() :]
    cells += _told(page)
    for number, cell in enumerate(cells):
        cell["id"] = f"step-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _file(found: re.Match[str]) -> tuple[str, str]:
    """Return a cell that writes a file, and what it prints."""
    content = (ROOT / found["path"]).read_text(encoding="utf-8").rstrip()
    return f"%%writefile {found['name']}\n{content}", f"Writing {found['name']}\n"


def _command(path: str) -> tuple[str, str]:
    """Return the command whose output the page shows, by this kernel's own Python without a progress bar, and it."""
    typed, _, printed = (ROOT / path).read_text(encoding="utf-8").partition("\n")
    command = typed.removeprefix("$ python ")
    return f"import sys\n\n!{{sys.executable}} {command} 2>&1 | cat", printed.removesuffix("Killed\n")


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
