"""The README and the pages of docs/: their code runs, links lead somewhere, and what they name is public."""

import importlib.util
import re

import pytest
import torch

import autoaccum
from support.processes.folders import ROOT

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def snippets(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def test_call_in_the_readme_trains_with_the_batch_it_names():
    (snippet,) = snippets(README)
    data = torch.utils.data.TensorDataset(torch.randn(200, 8), torch.randint(2, (200,)))
    names = {"model": torch.nn.Linear(8, 2), "loader": torch.utils.data.DataLoader(data, batch_size=32)}

    exec(compile(snippet, str(README), "exec"), names)  # noqa: S102

    assert names["result"].plan.target_batch == 100
    assert names["result"].steps == 2


# The code of these pages is whole; of others, other tests run what is.
WHOLE = ("index", "batches", "batch-size", "memory", "troubleshooting")


@pytest.mark.gpu_fakes
@pytest.mark.parametrize("name", WHOLE)
def test_code_of_a_page_runs_one_piece_after_the_other(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path))
    page = ROOT / "docs" / f"{name}.md"
    given = [(torch.randn(20, 8), torch.randint(2, (20,))) for _ in range(5)]
    names = {"__name__": name.replace("-", "_"), "model": torch.nn.Linear(8, 2), "loader": given}

    for snippet in snippets(page):
        if "torchao" in snippet:
            pytest.importorskip("torchao.optim", reason="torchao is not installed")
        exec(compile(snippet, str(page), "exec"), names)  # noqa: S102

    printed = capsys.readouterr().out
    for output in re.findall(r"```text\n(.*?)```", page.read_text(), flags=re.DOTALL):
        assert output in printed


def test_code_for_your_own_loop_runs_one_piece_after_the_other_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "your-loop.md"
    names = {}

    for snippet in snippets(page):
        exec(compile(snippet, str(page), "exec"), names)  # noqa: S102

    assert names["report"].samples == 100
    assert capsys.readouterr().out.count("(100,)") == 3
    exec(compile(snippets(page)[0], str(page), "exec"), names)  # noqa: S102
    assert "(100,)" not in capsys.readouterr().out  # all its epochs are done


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_code_is_narrow_enough_for_the_site(page):
    code = "\n".join(re.findall(r"```(?:python|console|bash|diff)\n(.*?)```", page.read_text(), flags=re.DOTALL))

    assert [line for line in code.splitlines() if len(line) > 90] == []


def files():
    return sorted(set(re.findall(r"(?:tests|docs|examples|benchmarks)/[\w./-]+\.\w+", README.read_text())))


@pytest.mark.parametrize("mentioned", files())
def test_files_that_it_names_are_there(mentioned):
    assert (README.parent / mentioned).is_file()


@pytest.mark.parametrize(
    "page",
    [README, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG")), *PAGES],
    ids=lambda page: page.name,
)
def test_links_lead_to_pages_and_headings_that_are_there(page):
    for target, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        found = page.parent / target if target else page

        assert found.exists(), f"{target} is not there"
        assert not heading or heading in headings(found) or heading.startswith("autoaccum."), (
            f"{target} has no heading {heading}"
        )


def headings(page):
    """The anchors of a page, as mkdocs makes them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize(
    "page",
    [README, *(page for page in PAGES if page.parent.name != "dev")],
    ids=lambda page: page.name,
)
def test_private_modules_are_named_by_the_architecture_alone(page):
    text = page.read_text()

    assert not re.findall(r"\bautoaccum[./]_\w+|(?<![\w/])_[a-z]\w*/\w+\.py", text)
    assert set(re.findall(r"\bautoaccum\.([A-Za-z]\w*)(?=\()", text)) <= set(autoaccum.__all__)


def test_commands_that_it_names_are_in_the_makefile():
    targets = re.findall(r"^([\w-]+):", (README.parent / "Makefile").read_text(), flags=re.MULTILINE)

    for command in re.findall(r"make ([\w-]+)", README.read_text()):
        assert command in targets


@pytest.mark.parametrize("page", ["architecture.md", "design.md"])
def test_modules_that_the_pages_for_developers_name_are_there(page):
    text = (ROOT / "docs" / "dev" / page).read_text()
    package = ROOT / "autoaccum"
    named = set(re.findall(r"`((?:_[a-z]+/)[a-z_/]*(?:\.py)?)`", text))

    assert named
    assert [name for name in named if not (package / name).exists()] == []


MENTIONED = re.compile(r"(?:docs/[\w./-]+|README|CONTRIBUTING|SECURITY)\.md(?![\w-])")
SOURCES = [
    path for folder in ("autoaccum", "benchmarks", "examples", "scripts") for path in (ROOT / folder).rglob("*.py")
]


def test_pages_that_the_code_names_are_there():
    named = {found for path in SOURCES for found in MENTIONED.findall(path.read_text()) if "docs/en" not in found}

    assert len(named) > 10
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []


def words(page):
    """Words and numbers, without the bars of tables."""
    prose = re.sub(
        r"<!-- gpu: begin -->.*<!-- gpu: end -->", "", page.read_text(), flags=re.DOTALL
    )  # written by a program
    return sum(bool(re.search(r"\w", word)) for word in prose.split())


def test_documentation_is_short():
    assert words(README) <= 500
    assert sum(words(page) for page in PAGES if page.parent.name == "docs") <= 16_500
    assert sum(words(page) for page in PAGES if page.parent.name == "dev") <= 5_500


@pytest.fixture
def site():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "scripts" / "site_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


def test_links_of_the_readme_are_absolute_where_the_address_is_known(site):
    text = site.with_address(README.read_text(), "https://example.org/one/autoaccum")

    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert all(link.startswith("https://") for link in links)
    assert "https://example.org/one/autoaccum/raw/main/docs/window.svg" in links
    assert "git clone https://example.org/one/autoaccum autoaccum" in text
    assert site.with_address(README.read_text(), "") == README.read_text()


def test_links_of_pages_to_files_of_the_repository_lead_there_or_are_words(site):
    page = "See [this file](../examples/digits.py) and [that page](../index.md)."

    assert site.with_files(page, "https://example.org/a") == (
        "See [this file](https://example.org/a/blob/main/examples/digits.py) and [that page](../index.md)."
    )
    assert site.with_files(page, "").startswith("See this file and")
