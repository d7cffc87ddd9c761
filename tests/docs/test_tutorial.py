"""The tutorial: its page holds the scripts of examples/tutorial/, and they do what it says, also as a notebook."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from folders import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
SCRIPTS = ROOT / "examples" / "tutorial"
OUTPUT = ROOT / "docs" / "output"
IMAGES = ROOT / "docs" / "images"
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
LAST_LOSS = re.compile(r"done: 12 steps.* last loss ([\d.]+)")


def printed(name):
    return (OUTPUT / f"tutorial-{name}.txt").read_text()


def test_page_shows_every_script_and_what_it_printed():
    shown = re.findall(r'--8<-- "examples/tutorial/(\w+)\.py"', PAGE)

    assert sorted(shown) == sorted(path.stem for path in SCRIPTS.glob("*.py"))
    for name in ("dies", "trains", "killed", "resumes", "reports"):
        assert f'--8<-- "docs/output/tutorial-{name}.txt"' in PAGE


def test_what_the_page_says_of_the_outputs_is_in_them():
    assert "can't allocate memory" in printed("dies").splitlines()[-1]
    assert "86+85+85" in printed("trains")
    assert printed("killed").splitlines()[-1] == "Killed"
    assert "step-00000006: 6 steps are done" in printed("resumes")
    assert LAST_LOSS.search(printed("trains"))[1] == LAST_LOSS.search(printed("resumes"))[1]
    assert "256 in 3 micro-batches, 86+85+85, measured" in printed("reports")


@pytest.mark.parametrize("file", sorted(OUTPUT.iterdir()), ids=lambda path: path.name)
def test_no_path_of_the_machine_is_in_the_outputs(file):
    assert re.findall(r"(?<![\w.])/(?:home|root|tmp|work|usr)/", file.read_text()) == []


@pytest.fixture
def empty_folder(tmp_path):
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, tmp_path)
    return tmp_path


def run(folder, *command):
    own = {"AUTOACCUM_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=os.environ | own, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_first_script_dies_of_memory(empty_folder):
    code, said = run(empty_folder, "dies.py")

    assert code == 1
    assert "DefaultCPUAllocator: can't allocate memory" in said


@pytest.mark.slow
@pytest.mark.timeout(1200)  # five trainings, on a machine that may be busy
def test_scripts_train_resume_after_a_kill_and_report_as_the_page_says(empty_folder):
    trained, said = run(empty_folder, "trains.py")
    killed, _ = run(empty_folder, "resumes.py", "--power-cut")
    resumed, then = run(empty_folder, "resumes.py")
    reported, table = run(empty_folder, "reports.py")

    assert (trained, killed, resumed, reported) == (0, -signal.SIGKILL, 0, 0)
    assert "12 updates of 256 samples, in (" in said
    assert "6 steps are done" in then
    assert "12 updates, accuracy 1.000" in then
    assert float(LAST_LOSS.search(then)[1]) == pytest.approx(float(LAST_LOSS.search(said)[1]), abs=2e-3)
    assert "fits  host memory: 256 in" in table
    assert (empty_folder / "report.html").is_file()
    assert_screenshots_can_be_taken(empty_folder)


def assert_screenshots_can_be_taken(folder):
    """The pages that the scripts wrote are not blank in a browser, and as large as the pictures in docs/."""
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        return
    from PIL import Image  # noqa: PLC0415 - torchvision brings it

    taking = (
        "import sys; from pathlib import Path; import tutorial\n"
        "place = Path(sys.argv[1])\n"
        "for page, size in tutorial.SCREENSHOTS.items():\n"
        "    tutorial.browse((place / f'{page}.html').as_uri(), place / f'{page}.png', size, place / f'home-{page}')\n"
    )
    own = os.environ | {"PYTHONPATH": str(ROOT / "scripts" / "docs_pictures")}
    subprocess.run([sys.executable, "-c", taking, str(folder)], env=own, check=True)
    with Image.open(folder / "report.png") as taken, Image.open(IMAGES / "tutorial-report.png") as shown:
        assert taken.size == shown.size
        assert len(taken.convert("L").getcolors()) > 50


@pytest.mark.slow
@pytest.mark.timeout(1200)  # five trainings, on a machine that may be busy
def test_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    import nbformat  # noqa: PLC0415 - only where notebooks are
    from nbclient import NotebookClient  # noqa: PLC0415

    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)

    NotebookClient(notebook, timeout=1000, resources={"metadata": {"path": str(tmp_path)}}).execute()

    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "can't allocate memory" in said
    assert "6 steps are done" in said
    assert "12 updates, accuracy 1.000" in said
    assert "fits  host memory: 256 in" in said


def test_notebook_writes_the_files_of_the_page_and_runs_its_commands():
    cells = [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]

    written = {cell.splitlines()[0].removeprefix("%%writefile "): cell for cell in cells if "%%writefile" in cell}
    commands = [
        re.fullmatch(r"!\{sys.executable\} (.*) 2>&1 \| cat", cell.splitlines()[-1])[1]
        for cell in cells
        if "%%writefile" not in cell
    ]
    assert set(written) == {path.name for path in SCRIPTS.glob("*.py")}
    assert all((SCRIPTS / name).read_text().strip() in cell for name, cell in written.items())
    assert commands == ["dies.py", "trains.py", "resumes.py --power-cut", "resumes.py", "reports.py"]
