"""Runs the how-to pages whose output they show, each by itself in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tutorial import OUTPUT, ROOT

PAGES = ROOT / "docs" / "howto"
SHOWN = ("dies-late", "shared-card", "lengths")


def code_of(page: Path) -> str:
    """Return a page's Python, in order."""
    return "\n\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL))


def run() -> None:
    """Write docs/output/howto-PAGE.txt for each page."""
    for name in SHOWN:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "page.py").write_text(code_of(PAGES / f"{name}.md"), encoding="utf-8")
            done = subprocess.run(
                [sys.executable, "page.py"], cwd=folder, stdout=subprocess.PIPE, text=True, check=True,
                env=os.environ | {"AUTOACCUM_CACHE_DIR": folder},
            )  # fmt: skip
        (OUTPUT / f"howto-{name}.txt").write_text(done.stdout, encoding="utf-8")
