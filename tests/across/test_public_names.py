"""What crosses the library speaks of public names, so that it holds whatever becomes of the library's inside."""

import ast
import re

import pytest

from folders import TESTS

# Packages whose inside may be written anew under these tests.
INSIDE = re.compile(r"\bautoaccum(?:\.| import )(_engine|_sizing|_snapshot|_loss|_data|_distributed)\b")
HERE = {path.stem: path for path in TESTS.glob("*.py")}


def used_by(path):
    """Return the modules beside tests/across that a file imports, or has run as "module:function" by other ranks."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
            names.add(node.value.split(":")[0])
    return [HERE[name] for name in sorted(names & HERE.keys())]


def everything():
    found, left = set(), [TESTS / "helpers.py", *TESTS.glob("across/*.py")]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += used_by(path)
    return sorted(found)


@pytest.mark.parametrize("path", everything(), ids=lambda path: path.stem)
def test_no_private_name_of_the_engine_is_used(path):
    assert INSIDE.findall(path.read_text()) == []


def test_what_other_ranks_run_is_looked_at_too():
    assert {"helpers", "rank_training", "fault_sweep", "test_ranks_fit"} <= {path.stem for path in everything()}
