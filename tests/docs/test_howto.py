"""How-to pages begin with the user's sentence, are short, and their code does what they show."""

import os
import re
import subprocess
import sys

import pytest
import yaml

from folders import ROOT
from slurm_jobs import command

PAGES = sorted((ROOT / "docs" / "howto").glob("*.md"))
OUTPUT = ROOT / "docs" / "output"
MOST_LINES = 60


def code(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto" / f"{name}.md").read_text(), flags=re.DOTALL)


def run(name):
    names = {"__name__": name.replace("-", "_")}
    for snippet in code(name):
        exec(compile(snippet, f"{name}.md", "exec"), names)  # noqa: S102 - the documentation's own
    return names


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path / "cache"))


def groups():
    """The pages of mkdocs.yml by group, with their titles."""

    def flat(entries):
        for entry in entries:
            for title, inner in entry.items() if isinstance(entry, dict) else [(None, entry)]:
                yield from flat(inner) if isinstance(inner, list) else [(inner, title)]

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return {title: dict(flat(entries)) for group in nav for title, entries in group.items()}


def test_documentation_has_four_groups_and_every_page_is_in_one():
    pages = [page for group in groups().values() for page in group]

    assert list(groups()) == ["Get started", "How-to", "Explain", "Reference"]
    assert sorted(pages) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_begins_with_its_sentence_and_is_short(page):
    text = page.read_text()

    assert text.startswith(f"# {groups()['How-to'][f'howto/{page.name}']}\n")
    assert re.match(r"# (I|My|Slurm) ", text)
    assert len(text.splitlines()) < MOST_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_overview_leads_to_the_page(page):
    assert f"howto/{page.name}" in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_pages_and_headings_that_are_there(page):
    for target, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        found = page.parent / target

        assert found.is_file(), f"{target} is not there"
        titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", found.read_text(), flags=re.DOTALL), re.MULTILINE)
        anchors = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}
        assert not heading or heading in anchors or heading.startswith("autoaccum."), f"{target} has no {heading}"


@pytest.mark.parametrize("name", ["dies-late", "lengths"])
def test_code_prints_what_the_page_shows(name, capsys):
    run(name)

    assert capsys.readouterr().out == (OUTPUT / f"howto-{name}.txt").read_text()


@pytest.mark.slow
def test_neighbour_that_comes_makes_the_cut_smaller_as_the_page_shows(tmp_path):
    (tmp_path / "page.py").write_text(code("shared-card")[0])
    done = subprocess.run([sys.executable, "page.py"], capture_output=True, text=True, check=True)

    before, after, last = re.findall(r"cut (\(.*\))", done.stdout)
    assert len(eval(before)) < len(eval(after)) <= len(eval(last))  # noqa: S307
    assert {sum(eval(cut)) for cut in (before, after, last)} == {128}  # noqa: S307


@pytest.mark.card_fakes
def test_four_cards_are_foreseen_without_a_card(capsys):
    run("different-cards")

    out = capsys.readouterr().out
    assert out.startswith("6 updates; ")
    assert re.findall(r"^(\S+): fits, up to \d\d,\d{3},\d{3} at once$", out, re.MULTILINE) == [
        "rtx-3090",
        "l4",
        "a100-40gb",
        "h100-80gb",
    ]


@pytest.mark.slow
def test_unequal_ranks_train_by_the_script(tmp_path):
    (tmp_path / "train.py").write_text(code("different-cards")[0])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    done = subprocess.run(
        torchrun, capture_output=True, text=True, check=False, timeout=250, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )

    assert done.returncode == 0, done.stderr
    parts = re.findall(r"part of the last: (\(.*?\))", done.stdout)
    assert done.stdout.count("6 updates; ") == 2
    assert sum(sum(eval(part)) for part in parts) == 256  # noqa: S307


def test_script_for_slurm_trains_and_is_submitted(tmp_path):
    (script,) = code("slurm-kills")
    (tmp_path / "train.py").write_text(script)

    trained = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    submitted = command("--dry-run", "--gpus", 1, "--time", "24:00:00", "--", "python", "train.py", folder=tmp_path)

    assert trained.returncode == 0, trained.stderr
    assert list((tmp_path / "runs" / "x").glob("step-*"))
    assert "#SBATCH --time=24:00:00\n" in submitted.stdout
