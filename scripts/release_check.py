"""Builds a release as it would be published, and uses it; stops at the first thing that is not ready.

    make release-check

The tree is clean, a tag here is the version, the changelog has it, and the repository's address is known (`address` in
pyproject.toml, or AUTOACCUM_ADDRESS). The sdist and the wheel go to build/dist; each is installed into an environment
of its own, where the tutorial and `autoaccum doctor` run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from site_hooks import ROOT, project

if TYPE_CHECKING:
    from pathlib import Path

DIST = ROOT / "build" / "dist"
TUTORIAL = ROOT / "examples" / "tutorial"
TOOLS = ("git", "uv")


class NotReadyError(Exception):
    """The release is not ready."""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command without PYTHONPATH; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise NotReadyError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_state() -> str:
    """Return the version, if the tree is what a tag of it would be.

    Raises:
        NotReadyError: A tool is missing, the tree is not clean, a tag is not the version, the changelog lacks it, or
            the repository's address is not known.
    """
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NotReadyError(f"{' and '.join(missing)} not found on the PATH; install them")
    version, address = project()
    if changed := run("git", "status", "--porcelain").split("\n")[:-1]:
        raise NotReadyError(
            f"the tree is not clean ({', '.join(one[3:] for one in changed[:5])}); commit or remove that"
        )
    tags = [tag for tag in run("git", "tag", "--points-at", "HEAD").split() if tag.startswith("v")]
    if wrong := [tag for tag in tags if tag != f"v{version}"]:
        raise NotReadyError(f"the tag {wrong[0]} is not the version in pyproject.toml ({version}); correct one of them")
    if f"\n## {version}" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise NotReadyError(f"CHANGELOG.md has no section {version}")
    if not address:
        raise NotReadyError(
            "the repository's address is not known; write address into [tool.autoaccum] of pyproject.toml, or set "
            "AUTOACCUM_ADDRESS"
        )
    return version


def build(version: str) -> list[Path]:
    """Build the sdist, and the wheel from it; return both."""
    shutil.rmtree(DIST, ignore_errors=True)
    run("uv", "build", "--quiet", "--out-dir", DIST)
    found = [DIST / f"autoaccum-{version}.tar.gz", DIST / f"autoaccum-{version}-py3-none-any.whl"]
    run(sys.executable, "-m", "twine", "check", "--strict", *found)
    return found


def use(built: Path) -> None:
    """Install one of them alone, and run the doctor and the tutorial."""
    environment = ROOT / "build" / f"release-{built.suffix[1:]}"
    shutil.rmtree(environment, ignore_errors=True)
    run("uv", "venv", "--quiet", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    run("uv", "pip", "install", "--quiet", "--python", python, built)
    elsewhere = environment / "tutorial"
    shutil.copytree(TUTORIAL, elsewhere)
    where = run(python, "-c", "import autoaccum; print(autoaccum.__file__)", cwd=elsewhere)
    assert "site-packages" in where, where
    json.loads(run(environment / "bin" / "autoaccum", "doctor", "--json", cwd=elsewhere))
    for script in ("trains.py", "resumes.py", "reports.py"):
        run(python, script, cwd=elsewhere)


def main() -> int:
    """Check everything; return the exit code."""
    try:
        version = check_state()
        for built in build(version):
            use(built)
            print(f"{built.name}: twine, doctor and the tutorial are content", flush=True)
    except NotReadyError as error:
        print(f"not ready for a release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
