"""Where tests look for data that the repository does not hold is said in one place, and can be changed."""

import importlib
from pathlib import Path

import beside

ROOT = Path(__file__).parents[1]


def test_the_folder_beside_the_repository_or_another(monkeypatch, tmp_path):
    try:
        for value, folder in ((str(tmp_path), tmp_path), ("", ROOT.parent / "shared" / "data")):
            monkeypatch.setenv("PNN_TEST_DATA", value)
            importlib.reload(beside)
            assert folder.resolve() == beside.DATA
            assert beside.VOCABULARY.is_relative_to(folder.resolve())
    finally:
        monkeypatch.undo()
        importlib.reload(beside)


def test_no_test_looks_elsewhere():
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path not in (ROOT / "tests/support/beside.py", Path(__file__))]
    assert len(tests) > 50
    assert [path.name for path in tests if '"shared" / "data"' in path.read_text(encoding="utf-8")] == []
