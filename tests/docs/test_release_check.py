"""What `make release-check` says of a repository that is not ready for a release, before it builds anything."""

import os
import shutil
import subprocess
import sys

import pytest

from support.processes.folders import ROOT

FILES = ("pyproject.toml", "CHANGELOG.md", "scripts/release_check.py", "scripts/site_hooks.py")


@pytest.fixture
def repository(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "all")
    return tmp_path


def git(folder, *words):
    names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", folder, *names, *words], check=True)


def said(repository, **variables):
    command = [sys.executable, "scripts/release_check.py"]
    done = subprocess.run(
        command, cwd=repository, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


def test_a_tree_that_is_not_clean_is_named(repository):
    (repository / "forgotten.txt").touch()

    assert "the tree is not clean (forgotten.txt)" in said(repository)


def test_a_tag_that_is_not_the_version_is_named(repository):
    git(repository, "tag", "v9.9.9")

    assert "the tag v9.9.9 is not the version in pyproject.toml (0.1.0)" in said(repository)


def test_a_missing_tool_is_named(repository, tmp_path_factory):
    path = tmp_path_factory.mktemp("path")
    (path / "git").symlink_to(shutil.which("git"))

    assert "uv not found on the PATH" in said(repository, PATH=str(path))


def test_a_missing_section_of_the_changelog_is_named(repository):
    (repository / "CHANGELOG.md").write_text("# Changelog\n")
    git(repository, "commit", "--quiet", "--all", "--message", "forgotten")

    assert "CHANGELOG.md has no section 0.1.0" in said(repository)


def test_a_repository_without_an_address_is_told_where_to_write_it(repository):
    assert "write address into [tool.autoaccum]" in said(repository, AUTOACCUM_ADDRESS="")
