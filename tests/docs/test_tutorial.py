"""The tutorial: its page holds the scripts of examples/tutorial/, and they do what it says, also as a notebook."""

import json
import re

import pytest

from support.processes.folders import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
SCRIPTS = ROOT / "examples" / "tutorial"
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
LAST_LOSS = re.compile(r"done: 12 optimizer steps.*\n.*loss of the last step: ([\d.]+)")
PRINTED = dict(re.findall(r"```text\n\$ python ([^\n]+)\n(.*?)```", PAGE, flags=re.DOTALL))


def test_page_shows_every_script_and_what_it_printed():
    shown = re.findall(r'```python title="(\w+)\.py"', PAGE)

    assert sorted(shown) == sorted(path.stem for path in SCRIPTS.glob("*.py"))
    assert list(PRINTED) == ["trains.py", "dies.py", "resumes.py --power-cut", "resumes.py", "reports.py"]


def test_outputs_show_what_the_page_says_of_them():
    assert "can't allocate memory" in PRINTED["dies.py"].splitlines()[-1]
    assert re.search(r"plan from step \d: target batch 256; micro-batches [\dx+]+", PRINTED["trains.py"])
    assert PRINTED["resumes.py --power-cut"].splitlines()[-1] == "Killed"
    assert "resuming after step 6" in PRINTED["resumes.py"]
    assert LAST_LOSS.search(PRINTED["trains.py"])[1] == LAST_LOSS.search(PRINTED["resumes.py"])[1]
    assert re.search(r"256 in \d micro-batches, [\dx+]+, measured", PRINTED["reports.py"])


def test_no_path_of_the_machine_is_in_the_page():
    assert re.findall(r"(?<![\w.])/(?:home|root|tmp|work|usr)/", PAGE) == []


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
    assert "resuming after step 6" in said
    assert "12 steps, accuracy 1.000" in said
    assert "fits  host memory: 256 in" in said
    whole, resumed = (float(loss) for loss in LAST_LOSS.findall(said))
    assert resumed == pytest.approx(whole, abs=2e-3)


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
    assert commands == ["trains.py", "dies.py", "resumes.py --power-cut", "resumes.py", "reports.py"]
