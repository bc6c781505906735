"""Files and folders appear whole or not at all."""

from __future__ import annotations

import json
import math
import os
import subprocess

import pytest
import torch
from safetensors.torch import save_file

from pnn import files
from pnn.errors import UserError
from pnn.files import is_taken, new_folder, point, remove_leftovers, sha256, write_between, write_json, write_text

DEAD = 2**22 + 1  # above the largest process number Linux gives


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_text_is_written_and_replaced(tmp_path):
    path = tmp_path / "a.txt"
    for text in ("first\n", "sécond 漢\n", ""):
        write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, broken):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, broken, fail)
    with pytest.raises(UserError, match=f"no space left on the disk for {path}: make room"):
        write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    seen, replace = [], os.replace

    def look(source, target):
        seen.append((path.read_text(), source.read_text()))
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", look)
    write_text(path, "new")
    assert seen == [("old", "new")]
    assert path.read_text() == "new"


def test_json_is_readable_and_never_holds_nan(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"b": [1, 2.5, None], "é": "漢"})
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == {"b": [1, 2.5, None], "é": "漢"}
    assert "漢" in text
    assert text.endswith("}\n")
    assert text.index('"b"') < text.index('"é"')
    for wrong in (math.nan, math.inf, object()):
        with pytest.raises((ValueError, TypeError)):
            write_json(path, {"x": wrong})
    assert path.read_text(encoding="utf-8") == text
    assert names(tmp_path) == ["a.json"]


def test_a_folder_appears_when_it_is_filled(tmp_path):
    target = tmp_path / "deep" / "folder"
    with new_folder(target) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "a").write_text("a")
        assert not target.exists()
        assert partial.parent == target.parent
    assert (target / "inner" / "a").read_text() == "a"
    assert names(target.parent) == ["folder"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_folder_whose_filling_fails_never_appears(tmp_path, error):
    target = tmp_path / "folder"

    def fail():
        with new_folder(target) as partial:
            (partial / "a").write_text("a")
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == []


def test_leftovers_of_dead_processes_are_removed_and_those_of_living_ones_kept(tmp_path):
    dead, alive, other = (
        tmp_path / name for name in (f".folder.partial-{DEAD}", ".folder.partial-1", f".other.partial-{DEAD}")
    )
    for leftover in (dead, alive, other):
        leftover.mkdir()
        (leftover / "a").write_text("a")
    with new_folder(tmp_path / "folder"):
        pass
    assert names(tmp_path) == sorted([alive.name, other.name, "folder"])


def test_leftovers_of_one_file_go_when_it_is_written_again(tmp_path):
    for name in ("a.json", "last"):
        (tmp_path / f".{name}.partial-{DEAD}").write_text("half")
    (tmp_path / ".a.json.partial-1").write_text("of somebody who still writes")
    write_json(tmp_path / "a.json", {})
    point(tmp_path / "last", tmp_path)
    assert names(tmp_path) == [".a.json.partial-1", "a.json", "last"]


def test_leftovers_inside_a_folder(tmp_path):
    (tmp_path / "run" / "checkpoints" / f".step-1.partial-{DEAD}" / "inner").mkdir(parents=True)
    (tmp_path / "run" / f".metrics.jsonl.partial-{DEAD}").write_text("half")
    (tmp_path / "run" / "checkpoints" / f".last.partial-{DEAD}").symlink_to(tmp_path)
    (tmp_path / "run" / ".state.json.partial-1").write_text("of somebody who still writes")
    remove_leftovers(tmp_path / "run")
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["run", "run/.state.json.partial-1", "run/checkpoints"]


def test_a_folder_with_nothing_but_leftovers_is_free(tmp_path):
    assert not is_taken(tmp_path)
    (tmp_path / f".config.yaml.partial-{DEAD}").write_text("half")
    assert not is_taken(tmp_path)
    (tmp_path / "thesis.txt").write_text("mine")
    assert is_taken(tmp_path)


def test_a_process_that_was_killed_and_not_waited_for_is_dead(tmp_path):
    with subprocess.Popen(["sleep", "100"]) as process:
        leftover = tmp_path / f".folder.partial-{process.pid}"
        leftover.mkdir()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays as a zombie
        with new_folder(tmp_path / "folder"):
            pass
        assert names(tmp_path) == ["folder"]


def test_a_folder_that_another_process_made_meanwhile_stays(tmp_path):
    target = tmp_path / "folder"
    with new_folder(target) as partial:
        (partial / "a").write_text("ours")
        target.mkdir()
        (target / "a").write_text("theirs")
    assert (target / "a").read_text() == "theirs"
    assert names(tmp_path) == ["folder"]


def test_a_leftover_with_our_own_process_number_is_removed(tmp_path):
    """In a container a restarted program often gets the number of the one that was killed."""
    leftover = tmp_path / f".folder.partial-{os.getpid()}"
    leftover.mkdir()
    (leftover / "old").write_text("old")
    with new_folder(tmp_path / "folder") as partial:
        (partial / "a").write_text("a")
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["a"]


def test_a_link_points_to_its_sibling_and_can_be_moved(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(name)
    for name in ("one", "two", "two"):
        point(tmp_path / "best", tmp_path / name)
        assert (tmp_path / "best" / "a").read_text() == name
        assert os.readlink(tmp_path / "best") == name  # relative: the run folder can be moved
    assert names(tmp_path) == ["best", "one", "two"]
    moved = tmp_path.rename(tmp_path.with_name(tmp_path.name + "-moved"))
    assert (moved / "best" / "a").read_text() == "two"


def test_a_link_replaces_a_folder_that_was_copied_without_its_links(tmp_path):
    for name in ("one", "last"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(name)
    point(tmp_path / "last", tmp_path / "one")
    assert (tmp_path / "last" / "a").read_text() == "one"
    assert names(tmp_path) == ["last", "one"]


def test_sha256_is_the_published_digest(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    assert sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    path.write_bytes(b"")
    assert sha256(path) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_writing_between_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- /table -->\nafter\n")
    write_between(page, "table", "new")
    assert page.read_text() == "before\n<!-- table -->\nnew\n<!-- /table -->\nafter\n"
    with pytest.raises(ValueError, match="no marks for tables"):
        write_between(page, "tables", "new")


def test_whoever_may_read_a_folder_may_read_its_weights(tmp_path):
    """safetensors makes files for their owner alone."""
    before = os.umask(0o022)
    try:
        with new_folder(tmp_path / "folder") as partial:
            save_file({"w": torch.ones(2)}, partial / "w.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "folder" / "w.safetensors").stat().st_mode & 0o777 == 0o644
