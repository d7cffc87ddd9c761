import subprocess
import sys

import pytest

import warm
from autoaccum.errors import InvalidInputError
from report_examples import MANY_CARDS, NOTHING_FITS, REPORT

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("report", [REPORT, NOTHING_FITS, MANY_CARDS])
def test_a_picture_is_written(report, tmp_path):
    report.plot(tmp_path / "memory.png")

    assert (tmp_path / "memory.png").read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["memory.png"]


def test_the_picture_names_places_plans_and_limits(tmp_path):
    REPORT.plot(tmp_path / "memory.svg")

    drawn = (tmp_path / "memory.svg").read_text()
    for told in (
        "NVIDIA GeForce RTX 3060, measured</text>",
        "l4, rtx-3070, predicted</text>",
        "limit rtx-3070: 7.6 GiB</text>",
        "<title>150 samples do not fit</title>",
        "<title>NVIDIA GeForce RTX 3060: the plan, 128 at once: 5.2 GiB</title>",
    ):
        assert told in drawn


@pytest.mark.parametrize(("name", "begins"), [("m.pdf", b"%PDF"), ("m.jpg", b"\xff\xd8")])
def test_the_suffix_sets_the_format(name, begins, tmp_path):
    REPORT.plot(tmp_path / name)

    assert (tmp_path / name).read_bytes().startswith(begins)


def test_an_unknown_kind_of_file_is_refused_with_those_that_are_known(tmp_path):
    with pytest.raises(InvalidInputError, match=r"memory\.txt.*\.png"):
        REPORT.plot(tmp_path / "memory.txt")


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="cannot be written"):
        REPORT.plot(tmp_path / "none" / "memory.png")


@pytest.mark.parametrize("lacking", ["altair", "vl_convert"])
def test_without_the_library_it_is_said_how_to_get_it(lacking, tmp_path):
    script = f"""
import sys
sys.modules["{lacking}"] = None
sys.path += {sys.path!r}
from report_examples import REPORT
try:
    REPORT.plot({str(tmp_path / "memory.png")!r})
except ValueError as error:
    print(error)
"""

    ran = subprocess.run([*warm.python(), "-c", script], capture_output=True, text=True, check=True)

    assert f"{lacking} is not installed; pip install altair vl-convert-python" in ran.stdout
