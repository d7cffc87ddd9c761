"""Makes the pictures, the outputs and the notebook that the documentation shows, but for two pictures.

docs/window.svg and images/timeline.svg stay as the scripts of commit 973a532 drew them, the bands of the latter darker.

python scripts/docs_pictures            # run the tutorial, measure, and draw all (two minutes)
python scripts/docs_pictures --draw     # draw from what was measured before
python scripts/docs_pictures --check    # write nothing; exit with 1 if a drawing is out of date
"""

from __future__ import annotations

import argparse
import json
import sys

import charts
import notebook
import packages
from tutorial import IMAGES, MEASURED, PAGE, ROOT, page


def drawings() -> dict[str, str]:
    """Return each picture by its path from the repository's root."""
    measured = json.loads((MEASURED / "tutorial.json").read_text(encoding="utf-8"))
    images = IMAGES.relative_to(ROOT)
    return {
        f"{images}/packages.svg": packages.picture(),
        f"{images}/memory-by-size.svg": charts.memory_by_size(measured["report"], 256),
        f"{images}/losses.svg": charts.losses(measured["undisturbed"], measured["attempts"]),
    }


def main() -> int:
    """Make the files, or say which are out of date; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--draw", action="store_true", help="draw from what was measured before")
    only.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a drawing is out of date")
    asked = parser.parse_args()
    if not (asked.draw or asked.check):
        import preflight  # noqa: PLC0415 - only to run, as the next two
        import terminal  # noqa: PLC0415
        import tutorial  # noqa: PLC0415

        tutorial.run()
        preflight.run()
        terminal.run()
    old = []
    for name, svg in drawings().items():
        file = ROOT / name
        if not asked.check:
            file.write_text(svg, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != svg:
            old.append(name)
    if not asked.check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        old.append(str(PAGE.relative_to(ROOT)))
    # It holds the pictures, so it comes after them.
    if not asked.check:
        notebook.FILE.write_text(notebook.notebook(), encoding="utf-8")
    elif not notebook.FILE.is_file() or notebook.FILE.read_text(encoding="utf-8") != notebook.notebook():
        old.append(str(notebook.FILE.relative_to(ROOT)))
    for name in old:
        print(f"{name} is out of date; run python scripts/docs_pictures", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
