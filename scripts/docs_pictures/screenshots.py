"""Takes pictures of the built documentation, light, dark and on a phone, for a person to look at.

make docs && python scripts/docs_pictures/screenshots.py FOLDER [--site FOLDER] [PAGE ...]
"""

from __future__ import annotations

import argparse
import functools
import http.server
import itertools
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from tutorial import ROOT, browse

if TYPE_CHECKING:
    from collections.abc import Iterable

SITE = ROOT / "site"
PAGES = ("", "tutorial/", "how-it-works/", "losses/", "reference/")
LOOKS = {"light": ("1280,1600", False), "dark": ("1280,1600", True), "phone": ("500,1400", False)}


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site and says nothing of it."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def take(folder: Path, pages: Iterable[str] = PAGES, site: Path = SITE) -> list[Path]:
    """Write one picture a page and look; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    taken = []
    with server:
        for page, (look, (size, is_dark)) in itertools.product(pages, LOOKS.items()):
            picture = folder / f"{page.strip('/').replace('/', '-') or 'home'}-{look}.png"
            address = f"http://127.0.0.1:{server.server_address[1]}/{page}"
            with tempfile.TemporaryDirectory() as home:  # a browser of its own, since pages remember light or dark
                browse(address, picture, size, Path(home), is_dark=is_dark)
            taken.append(picture)
        server.shutdown()
    return taken


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write them")
    parser.add_argument("pages", nargs="*", default=PAGES, help="such as tutorial/")
    parser.add_argument("--site", type=Path, default=SITE, help="the built documentation")
    asked = parser.parse_intermixed_args()
    for made in take(asked.folder, asked.pages, asked.site):
        print(made)
