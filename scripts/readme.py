"""Hook of hatchling: the package's README has absolute links where the repository's address is known."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Readme(MetadataHookInterface):
    """Sets the readme."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put it into the metadata."""
        root = Path(self.root)
        spec = importlib.util.spec_from_file_location("site_hooks", root / "scripts" / "site.py")
        site = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(site)
        text = site.with_address((root / "README.md").read_text(encoding="utf-8"), site.project(root)[1])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
