"""Verifies trainers in releases before and after a fix of how they accumulate, each in an environment of its own.

python scripts/verify_releases             # all, and the table of docs/clusters.md; each environment has 5 GB
python scripts/verify_releases NAME ...    # some, printed

Environments are in .venv-releases/; uv makes them, and links what it has in its cache.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from releases import RELEASES, Release

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clusters.md"
BEGIN, END = "<!-- releases: begin -->\n", "<!-- releases: end -->\n"
TARGET_BATCH = 4


def environment(release: Release) -> Path:
    """Make the environment of a release, or raise CalledProcessError; return its Python."""
    folder = ROOT / ".venv-releases" / release.name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, folder], check=True, capture_output=True)  # noqa: S607, S603
    install = ["uv", "pip", "install", "--quiet", "--python", python, *release.packages]
    subprocess.run(install, check=True, capture_output=True, text=True)  # noqa: S603
    return python


def verified(release: Release, python: Path) -> dict:
    """Return what `autoaccum verify` says of a release."""
    script = Path(__file__).parent / release.script[0]
    command = [python, script, *release.script[1:], "{micro_batch}", "{accum_steps}"]
    verify = [sys.executable, "-m", "autoaccum", "verify", "--json", "--target-batch", str(TARGET_BATCH), "--"]
    done = subprocess.run([*verify, *command], stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    if done.returncode not in (0, 8):
        raise SystemExit(f"{release.name}: autoaccum verify ended with exit code {done.returncode}")
    return json.loads(done.stdout)


def described(found: dict) -> str:
    """Say in a cell of the table by how much a release is off at most; "" if it is right."""
    return "" if found["is_right"] else f" ({max(split['difference'] for split in found['splits']):.0%})"


def table(cells: dict[str, str]) -> str:
    """Return the table, a row for each script."""
    rows = ["| | off (by up to) | right |", "|---|---|---|"]
    for title in dict.fromkeys(release.title for release in RELEASES):
        told = {release.version: cells[release.name] for release in RELEASES if release.title == title}
        off = ", ".join(version + cell for version, cell in told.items() if cell)
        rows.append(f"| {title} | {off} | {', '.join(version for version, cell in told.items() if not cell)} |")
    return "\n".join(rows) + "\n"


def main(names: list[str]) -> None:
    """Verify the named releases, or all and write the table."""
    chosen = [release for release in RELEASES if not names or release.name in names]
    cells = {}
    for release in chosen:
        cells[release.name] = described(verified(release, environment(release)))
        print(f"{release.name}:{cells[release.name] or ' right'}", flush=True)
    if not names:
        text = PAGE.read_text(encoding="utf-8")
        text = re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + table(cells) + END, text, flags=re.DOTALL)
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
