"""The README's Python snippets run, in order, as one program."""

import re

import pytest

from folders import ROOT

README = ROOT / "README.md"


def snippets():
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_snippets_run_one_after_the_other(capsys):
    names = {}

    # The first shows the one call that it is all about, before there is a model.
    for snippet in snippets()[1:]:
        exec(compile(snippet, str(README), "exec"), names)  # noqa: S102

    out = capsys.readouterr().out
    assert "(100,)" in out
    assert names["result"].plan.accum_steps > 1


def files():
    return sorted(set(re.findall(r"(?:tests|docs|examples)/[\w./]+\.\w+", README.read_text())))


@pytest.mark.parametrize("mentioned", files())
def test_files_that_it_names_are_there(mentioned):
    assert (README.parent / mentioned).is_file()


def test_commands_that_it_names_are_in_the_makefile():
    targets = re.findall(r"^([\w-]+):", (README.parent / "Makefile").read_text(), flags=re.MULTILINE)

    for command in re.findall(r"make ([\w-]+)", README.read_text()):
        assert command in targets
