"""The README, and the pages of docs/: their snippets run, and what they name is there and public."""

import re

import pytest
import torch

import autoaccum
from folders import ROOT

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))


def snippets(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def test_call_in_the_readme_trains_with_the_batch_it_names():
    (snippet,) = snippets(README)
    data = torch.utils.data.TensorDataset(torch.randn(200, 8), torch.randint(2, (200,)))
    names = {"model": torch.nn.Linear(8, 2), "loader": torch.utils.data.DataLoader(data, batch_size=32)}

    exec(compile(snippet, str(README), "exec"), names)  # noqa: S102

    assert names["result"].plan.target_batch == 100
    assert names["result"].steps == 2


def test_snippets_for_beginners_run_one_after_the_other(capsys):
    page = README.parent / "docs" / "start.md"
    names = {}

    for snippet in snippets(page):
        exec(compile(snippet, str(page), "exec"), names)  # noqa: S102

    out = capsys.readouterr().out
    assert "(100,)" in out
    assert names["result"].plan.accum_steps > 1
    assert names["job"]().arguments["target_batch"] == 100


def test_snippets_for_a_loop_of_ones_own_run_one_after_the_other(capsys):
    page = README.parent / "docs" / "loop.md"
    names = {}

    for snippet in snippets(page):
        exec(compile(snippet, str(page), "exec"), names)  # noqa: S102

    assert names["report"].samples == 100
    assert "100" in capsys.readouterr().out


def test_snippet_on_batch_sizes_measures_the_noise_scale(capsys):
    page = README.parent / "docs" / "batch-size.md"
    names = {}

    for snippet in snippets(page):
        exec(compile(snippet, str(page), "exec"), names)  # noqa: S102

    out, err = capsys.readouterr()
    assert out == f"gradient noise scale: {names['result'].noise_scale:.0f} samples\n"
    assert "gradient noise scale about" in err


@pytest.mark.parametrize("number", [0, 1, 2])
def test_snippets_on_memory_train(number):
    page = README.parent / "docs" / "memory.md"
    snippet = snippets(page)[number]
    if "torchao" in snippet:
        pytest.importorskip("torchao.optim", reason="torchao is not installed")
    names = {}

    exec(compile(snippet, str(page), "exec"), names)  # noqa: S102

    assert names["result"].steps == 2


def files():
    return sorted(set(re.findall(r"(?:tests|docs|examples|benchmarks)/[\w./-]+\.\w+", README.read_text())))


@pytest.mark.parametrize("mentioned", files())
def test_files_that_it_names_are_there(mentioned):
    assert (README.parent / mentioned).is_file()


@pytest.mark.parametrize("page", [README, README.parent / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings_that_are_there(page):
    for target, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        found = page.parent / target if target else page

        assert found.is_file(), f"{target} is not there"
        assert not heading or heading in headings(found), f"{target} has no heading {heading}"


def headings(page):
    """The anchors of a page, as mkdocs makes them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize(
    "page",
    [README, *(page for page in PAGES if page.name not in ("architecture.md", "design.md"))],
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
    text = (ROOT / "docs" / page).read_text()
    package = ROOT / "autoaccum"
    named = set(re.findall(r"`((?:_[a-z]+/)[a-z_/]*(?:\.py)?)`", text))

    assert named
    assert [name for name in named if not (package / name).exists()] == []


def test_architecture_is_short():
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 200
