"""Rules of CONTRIBUTING.md that no linter knows."""

import re

from support.processes.folders import ROOT


def test_a_private_module_is_imported_by_the_tests_of_its_package_or_with_a_reason():
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        package = path.stem.removeprefix("test") if path.parent.name == "tests" else f"_{path.parent.name}"
        private = re.findall(r"^ *(?:from|import) autoaccum\.(_\w+)[^\n#]*$", path.read_text(), re.MULTILINE)
        found += [f"{path}: {name}" for name in private if name != package]

    assert found == []
