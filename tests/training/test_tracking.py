"""What a run says about the code behind it."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

import pnn
from pnn.training import tracking


@pytest.fixture
def package(tmp_path) -> Path:
    (tmp_path / "package" / "part").mkdir(parents=True)
    (tmp_path / "package" / "b.py").write_text("b = 1\n")
    (tmp_path / "package" / "part" / "a.py").write_text("a = 1\n")
    return tmp_path / "package"


def digest(package: Path) -> str:
    tracking.source_digest.cache_clear()  # it is computed once a process
    return tracking.source_digest(package)


def test_the_digest_is_of_names_and_contents(package, tmp_path):
    first = digest(package)
    assert first == hashlib.sha256(b"b.py\0b = 1\n\0part/a.py\0a = 1\n\0").hexdigest()
    shutil.copytree(package, tmp_path / "copy")
    (tmp_path / "copy" / "notes.txt").write_text("no code")
    assert digest(tmp_path / "copy") == first
    (tmp_path / "copy" / "b.py").write_text("b = 2\n")
    assert digest(tmp_path / "copy") != first
    (package / "b.py").rename(package / "c.py")
    assert digest(package) != first


def test_a_run_without_git_still_names_its_code(monkeypatch):
    def no_git(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    known = tracking.environment(seed=0, processes=1)
    assert known["git"] is None
    assert known["source_sha256"] == digest(Path(pnn.__file__).parent)
