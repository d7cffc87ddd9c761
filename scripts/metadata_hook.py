"""Hook of hatchling: what of the package's metadata follows from the repository's address."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class AddressHook(MetadataHookInterface):
    """Sets the readme, with absolute links, and the urls."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put them into the metadata."""
        root = Path(self.root)
        spec = importlib.util.spec_from_file_location("site_hooks", root / "scripts" / "site_hooks.py")
        site = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(site)
        _, address = site.project(root)
        text = site.with_address((root / "README.md").read_text(encoding="utf-8"), address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = (
            {}
            if not address
            else {
                "Repository": address,
                "Documentation": f"{address}/tree/{site.BRANCH}/docs",
                "Changelog": f"{address}/blob/{site.BRANCH}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
        )
