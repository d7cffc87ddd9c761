"""`autoaccum verify` tells releases of trainers from those before a fix; scripts/test_with.sh releases runs this."""

import runpy
import subprocess
import sys

import pytest

from support.processes.folders import ROOT

FOLDER = ROOT / "scripts" / "verify_releases"
sys.path.insert(0, str(FOLDER))
RELEASES = runpy.run_path(str(FOLDER / "releases.py"))["RELEASES"]
SCRIPT = runpy.run_path(str(FOLDER / "__main__.py"))
sys.path.remove(str(FOLDER))
# Each makes an environment, and starts five processes in it: minutes.
pytestmark = [pytest.mark.slow, pytest.mark.sweep, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_release_is_right_or_told(release):
    try:
        python = SCRIPT["environment"](release)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"its environment cannot be made: {getattr(error, 'stderr', '') or error}")

    found = SCRIPT["verified"](release, python)

    assert found["is_right"] == release.is_right
    assert release.says in found["diagnosis"]
