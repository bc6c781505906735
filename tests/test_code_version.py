"""What a run says about the code behind it: from git, from a stamp that went along with a copy, or that nobody knows."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pnn
from pnn.code_version import code_version, source_digest
from pnn.training.tracking import environment

SCRIPT = Path(pnn.__file__).parent / "code_version.py"


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    done = subprocess.run(["git", *names, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path) -> Path:
    folder = tmp_path / "repository" / "package"
    (folder / "part").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "part" / "a.py").write_text("a = 1\n")
    shutil.copy(SCRIPT, folder)
    return folder


@pytest.fixture
def repository(package) -> Path:
    git(package.parent, "init", "--quiet")
    (package.parent / ".gitignore").write_text("_commit.json\n")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "--quiet", "-m", "first")
    return package.parent


def stamp(package: Path) -> subprocess.CompletedProcess:
    """As `make stamp` does it: the file by itself, without the package around it."""
    return subprocess.run([sys.executable, "-I", package / SCRIPT.name], capture_output=True, text=True)


def known(package: Path):
    source_digest.cache_clear()  # it is computed once a process
    return code_version(package)


def test_git_says_it(repository):
    commit = git(repository, "rev-parse", "HEAD")
    assert known(repository / "package") == {"commit": commit, "changed": False}
    (repository / "package" / "part" / "a.py").write_text("a = 2\n")
    assert known(repository / "package") == {"commit": commit, "changed": True}


def test_asking_does_not_write_into_the_repository(repository):
    """`git status` brings its index up to date, under a lock: a run that is killed meanwhile would leave it behind."""
    index = repository / ".git" / "index"
    before = index.read_bytes()
    os.utime(repository / "package" / "part" / "a.py", (1, 1))  # the same text, at another time
    assert known(repository / "package") is not None
    assert index.read_bytes() == before
    git(repository, "status")
    assert index.read_bytes() != before  # it would have been


def test_a_stamp_says_it_in_a_copy_as_long_as_the_sources_are_the_same(repository, tmp_path):
    commit, copy = git(repository, "rev-parse", "HEAD"), tmp_path / "copy"
    assert stamp(repository / "package").returncode == 0
    assert not git(repository, "status", "--porcelain")  # it is not in the way
    shutil.copytree(repository / "package", copy)
    assert known(copy) == {"commit": commit, "changed": False}
    (copy / "notes.txt").write_text("no code")
    assert known(copy) == {"commit": commit, "changed": False}
    (copy / "part" / "a.py").write_text("a = 2\n")
    assert known(copy) == {"commit": commit, "changed": True}


def test_a_stamp_that_fits_is_believed_over_a_repository_with_other_changes(repository, tmp_path):
    """A tree that is sent elsewhere may lie there over a checkout of an older commit, without its large files."""
    package, older = repository / "package", git(repository, "rev-parse", "HEAD")
    shutil.copytree(repository, tmp_path / "older")
    (package / "part" / "a.py").write_text("a = 2\n")
    git(repository, "commit", "--quiet", "-am", "second")
    stamp(package)
    shutil.copytree(package, tmp_path / "older" / "package", dirs_exist_ok=True)
    copy = tmp_path / "older" / "package"
    assert known(copy) == {"commit": git(repository, "rev-parse", "HEAD"), "changed": False}
    (copy / "part" / "a.py").write_text("a = 3\n")
    assert known(copy) == {"commit": older, "changed": True}


def test_a_stamp_of_a_tree_that_was_not_clean_says_so(repository, tmp_path):
    (repository / "package" / "part" / "a.py").write_text("a = 2\n")
    stamp(repository / "package")
    shutil.copytree(repository / "package", tmp_path / "copy")
    assert known(tmp_path / "copy")["changed"] is True


def test_git_is_believed_before_a_stamp(repository):
    stamp(repository / "package")
    git(repository, "commit", "--quiet", "--allow-empty", "-m", "second")
    assert known(repository / "package") == {"commit": git(repository, "rev-parse", "HEAD"), "changed": False}


def test_somebody_elses_repository_says_nothing(repository):
    inside = repository / "venv" / "package"
    shutil.copytree(repository / "package", inside)
    assert known(inside) is None


def test_without_git_and_stamp_nobody_knows(package):
    assert known(package) is None
    done = stamp(package)
    assert done.returncode == 1
    assert "no git repository" in done.stderr


def test_a_stamp_that_came_along_stays_where_there_is_no_git(package):
    (package / "_commit.json").write_text(json.dumps({"commit": "0123", "changed": False, "source_sha256": "other"}))
    assert stamp(package).returncode == 1
    assert known(package) == {"commit": "0123", "changed": True}


def test_the_digest_is_of_names_and_contents(package):
    (package / SCRIPT.name).unlink()
    source_digest.cache_clear()
    first = source_digest(package)
    assert first == hashlib.sha256(b"__init__.py\0\0part/a.py\0a = 1\n\0").hexdigest()
    (package / "part" / "a.py").rename(package / "part" / "b.py")
    source_digest.cache_clear()
    assert source_digest(package) != first


def test_a_run_names_its_code(monkeypatch):
    monkeypatch.setenv("PATH", "")  # no git
    found = environment(seed=0, processes=1)
    stamped = (SCRIPT.parent / "_commit.json").exists()
    assert (found["git"] is not None) == stamped
    source_digest.cache_clear()
    assert found["source_sha256"] == source_digest(SCRIPT.parent)
