"""The tab *Runs*, without a browser."""

import json
import os
import shutil

import pytest

from pnn.explore import runs


@pytest.fixture
def folder(trained_run, tmp_path):
    """Two runs: one finished, one that began long ago and wrote no evaluation."""
    for name in ("done", "left"):
        (tmp_path / name).mkdir()
        for file in ("config.yaml", "metrics.jsonl", "evaluation.json"):
            shutil.copy(trained_run / file, tmp_path / name)
    (tmp_path / "left" / "evaluation.json").unlink()
    os.utime(tmp_path / "left" / "metrics.jsonl", (1, 1))
    return tmp_path


def test_a_folder_of_runs_stands_for_them(folder, trained_run):
    assert runs.expanded([str(folder)]) == [str(folder / "done"), str(folder / "left")]
    assert runs.expanded([str(folder.parent / "none"), str(trained_run)]) == [str(folder.parent / "none"), str(trained_run)]
    assert runs.expanded(["owner/name"]) == ["owner/name"]  # of the hub
    assert runs.named_runs(["owner/name", str(folder / "done")]) == [folder / "done"]


def test_numbers_are_the_runs_own(folder):
    found = (folder / "done", folder / "left")
    shown = runs.overview(found, runs.seen(found))
    evaluation = json.loads((folder / "done" / "evaluation.json").read_text())
    assert f"{100 * evaluation['accuracy']:.1f}\u00a0% right" in shown
    assert shown.count("<svg") == 1
    assert "finished" in shown
    assert "not finished" in shown
    assert "20 of 20" in shown


def test_what_a_run_writes_is_seen_and_a_broken_one_told(folder):
    found = (folder / "done", folder / "left")
    before = runs.seen(found)
    with (folder / "left" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "last_st')  # being written
    assert runs.seen(found) != before
    assert "20 of 20" in runs.overview(found, runs.seen(found))
    last = folder / "done" / "checkpoints" / "last"
    last.mkdir(parents=True)
    (last / "trainer_state.json").write_text("[]")
    assert "trainer_state.json or" in runs.overview(found, (*runs.seen(found), "again"))
    shutil.rmtree(last)
    (folder / "left" / "config.yaml").write_text("modl: {}")
    shown = runs.overview(found, runs.seen(found))
    assert 'class="problem"' in shown
    assert "done" in shown
