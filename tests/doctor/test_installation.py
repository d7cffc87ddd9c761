"""What the doctor says of versions and packages."""

import sys

import torch

from autoaccum._doctor import installation
from autoaccum._doctor.findings import Fact, Problem


def found(environment=None):
    findings = list(installation.of_installation(environment or {}))
    facts = {one.name: one for one in findings if isinstance(one, Fact)}
    return facts, [one.text for one in findings if isinstance(one, Problem)]


def test_versions_are_those_that_are_imported():
    facts, problems = found()

    assert facts["PyTorch"].text.startswith(f"{torch.__version__}, built for ")
    assert sys.executable in facts["Python"].text
    assert problems == []


def test_optional_packages_are_there_or_named_with_their_extra(monkeypatch):
    monkeypatch.setattr(installation, "_version", {"altair": "6.3.0", "lightning": "2.6.0"}.get)

    facts, _ = found()

    assert sorted(facts["optional packages"].value) == ["altair 6.3.0", "lightning 2.6.0"]
    assert "tensorboard" in facts["not installed"].value
    assert "pip install 'autoaccum[" in facts["not installed"].text
    assert "tensorboard" in facts["not installed"].text.partition("[")[2]


def test_pytorch_that_is_too_old_is_named_with_its_folder(monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.3.1"))

    _, (problem,) = found()

    assert "autoaccum needs PyTorch 2.8 or newer" in problem
    assert "2.3.1" in problem
    assert str(torch.__path__[0]) in problem


def test_folder_for_plans_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch):
    a_file = tmp_path / "a file"
    a_file.write_text("")
    a_file.chmod(0o400)
    monkeypatch.setattr(installation.os, "access", lambda path, mode: path != a_file)
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(a_file / "below"))

    _, (problem,) = found()

    assert "set AUTOACCUM_CACHE_DIR to a writable folder" in problem


def test_variables_of_autoaccum_are_shown():
    facts, _ = found({"AUTOACCUM_MICRO_BATCH": "8", "HOME": "/"})

    assert facts["variables"].value == ["AUTOACCUM_MICRO_BATCH=8"]
