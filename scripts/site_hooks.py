"""Hooks of mkdocs: the site's version and links to the repository come from pyproject.toml.

The one setting is `address` in `[tool.autoaccum]`, or the variable AUTOACCUM_ADDRESS, by which a workflow says where it
runs. Without it the site has no links to the repository, and links from pages to files outside docs/ are plain words.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BRANCH = "main"
# Links of pages to files of the repository that are not pages.
_OUTSIDE = re.compile(r"(?<!!)\[(?P<words>[^\]]+)\]\((?:\.\./)+(?P<path>[\w./-]+)\)")


def project(root: Path = ROOT) -> tuple[str, str]:
    """Return the version, and the repository's address or an empty text."""
    table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    address = os.environ.get("AUTOACCUM_ADDRESS") or table["tool"]["autoaccum"]["address"]
    return table["project"]["version"], address.rstrip("/")


def with_files(markdown: str, address: str) -> str:
    """Return a page whose links to files of the repository lead there, or are words where no address is known."""

    def link(found: re.Match[str]) -> str:
        if not (ROOT / found["path"]).exists():
            return found[0]
        return f"[{found['words']}]({address}/blob/{BRANCH}/{found['path']})" if address else found["words"]

    return _OUTSIDE.sub(link, markdown)


def with_address(markdown: str, address: str) -> str:
    """Return the README with absolute links, for a package index; as it is where no address is known."""
    if not address:
        return markdown
    pictures = re.sub(r"(!\[[^\]]*\]\()(?!https?:)([^)]+)", rf"\1{address}/raw/{BRANCH}/\2", markdown)
    links = re.sub(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)([^)]+)", rf"\1{address}/blob/{BRANCH}/\2", pictures)
    return links.replace("git clone ADDRESS", f"git clone {address}").replace("  # not on a package index yet", "")


def on_config(config: Any) -> Any:
    """Set the links to the repository."""
    _, address = project()
    if address:
        config.repo_url, config.repo_name = address, config.site_name
        config.edit_uri = f"edit/{BRANCH}/docs/"
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to files of the repository there."""
    _, address = project()
    markdown = with_files(markdown, address)
    return markdown.replace("git clone ADDRESS", f"git clone {address}") if address else markdown


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Show the version beside the name, and make links of pages that docstrings name."""
    version, _ = project()
    name = config.site_name
    if page.url == "reference/":
        output = re.sub(r"docs/([\w-]+)\.md", r'<a href="../\1/">\1</a>', output)
    return re.sub(
        rf'(<span class="md-ellipsis">\s*{name})(\s*</span>)', rf"\1 <small>{version}</small>\2", output, count=1
    )
