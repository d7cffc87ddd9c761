"""What the package says of itself where only its source is on the path, and no metadata of a distribution."""

import os
import subprocess
import sys
import sysconfig

import pytest

from folders import ROOT


@pytest.fixture
def run_source(tmp_path):
    """Runs Python with the source and all packages that are here except autoaccum's."""
    for entry in os.scandir(sysconfig.get_path("purelib")):
        if "autoaccum" not in entry.name:
            (tmp_path / entry.name).symlink_to(entry.path)

    def run(*arguments):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path).stdout

    return run


def test_source_without_metadata_is_of_an_unknown_version(run_source):
    assert run_source("-c", "import autoaccum; print(autoaccum.__version__)") == "unknown\n"
