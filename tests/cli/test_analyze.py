"""`pnn analyze` and `pnn evidence` as people type them: files, tables, and one clear sentence where something is wrong."""

import json
import shutil

import pytest
import yaml

from pnn.studies.registry import experiments


@pytest.fixture(scope="module")
def run(trained_run, tmp_path_factory):
    copy = tmp_path_factory.mktemp("analysed") / "run"
    shutil.copytree(trained_run, copy, symlinks=True)
    return copy


def trained_with(tmp_path, write_config, pnn_command, **model):
    config = write_config(tmp_path / "other.yaml", model=model, training={"max_steps": 4, "evaluate_every": 4})
    code, _, err = pnn_command("train", config, "--output", tmp_path / "other")
    assert code == 0, err
    return tmp_path / "other"


@pytest.mark.parametrize("name", ["convergence", "gates", "optimisation"])
def test_an_analysis_leaves_json_and_a_picture(pnn_command, run, name):
    code, out, err = pnn_command("analyze", name, run)
    assert code == 0, err
    first = (run / "analysis" / f"{name}.json").read_bytes()
    found = json.loads(first)
    assert found["sequences"] == 50
    assert all(one["verdict"] in out for one in found["findings"].values())
    assert all(f"margin {one['margin']:g}:" in out for one in found["findings"].values())  # the verdict follows from it
    assert (run / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = pnn_command("analyze", name, run, "--json")
    assert code == 0
    assert json.loads(out) == found
    assert (run / "analysis" / f"{name}.json").read_bytes() == first  # twice is the same


def test_what_is_found_on_other_text_is_kept_beside_the_runs_own(pnn_command, undrawn, run, tmp_path):
    own = run / "analysis" / "convergence.json"
    assert pnn_command("analyze", "convergence", run, "--sequences", 10)[0] == 0
    before = own.read_bytes()
    (tmp_path / "other.txt").write_text("the owl of avon wore amber hats . it has old green boots .\n" * 20)
    code, out, err = pnn_command("analyze", "convergence", run, "--data", tmp_path / "other.txt")
    assert code == 0, err
    (kept,) = (run / "analysis").glob("convergence_on_*other.txt.json")
    found = json.loads(kept.read_text())
    assert (found["sequences"], found["source"]) == (20, str(tmp_path / "other.txt"))
    assert str(kept) in out
    assert (run / "figures" / f"{kept.stem}.png").exists()
    assert own.read_bytes() == before
    assert pnn_command("evidence", run, "--experiment", "meg", "--data", tmp_path / "other.txt")[0] == 0
    assert list(run.glob("experimental_results_on_*other.txt.json"))


@pytest.mark.slow
def test_all_experiments_leave_the_published_files(pnn_command, undrawn, run):
    code, out, err = pnn_command("evidence", run, "--sequences", 20)
    assert code == 0, err
    results = json.loads((run / "experimental_results.json").read_text())
    for name, experiment in experiments().items():
        assert results[experiment.key]["experiment"] == name
        assert (run / "figures" / f"{experiment.figure}.png").exists()
        assert name in out
    code, _, err = pnn_command("report", run)
    assert code == 0, err
    assert "gates" in (run / "report.html").read_text()


def test_one_experiment_joins_those_before_it_if_text_and_model_are_the_same(pnn_command, undrawn, run, tmp_path):
    words = ("evidence", run, "--sequences", 20, "--output", tmp_path, "--experiment")
    assert pnn_command(*words, "meg")[0] == 0
    assert pnn_command(*words, "layerwise_activity")[0] == 0
    assert {"about", "meg_analysis", "layerwise_activity_analysis"} == set(
        json.loads((tmp_path / "experimental_results.json").read_text())
    )
    assert pnn_command("evidence", run, "--sequences", 10, "--output", tmp_path, "--experiment", "meg")[0] == 0
    assert {"about", "meg_analysis"} == set(json.loads((tmp_path / "experimental_results.json").read_text()))


def test_an_unknown_experiment_is_one_sentence_and_loses_nothing(pnn_command, run, tmp_path):
    before = tmp_path / "experimental_results.json"
    before.write_text("{}")
    code, _, err = pnn_command("evidence", run, "--output", tmp_path, "--experiment", "megg")
    assert code == 2
    assert err.strip() == 'pnn: --experiment megg: no such experiment (did you mean "meg"?)'
    assert before.read_text() == "{}"
    code, _, err = pnn_command("analyze", "gate", run, "--output", tmp_path)
    assert code == 2
    assert err.strip() == 'pnn: analyze gate: no such analysis (did you mean "gates"?)'


def test_a_model_without_gates(pnn_command, undrawn, tmp_path, write_config):
    other = trained_with(tmp_path, write_config, pnn_command, gate="none")
    code, _, err = pnn_command("analyze", "gates", other)
    assert code == 2
    assert "no gates" in err
    assert not (other / "analysis").exists()
    code, _, err = pnn_command("evidence", other, "--experiment", "gate_entropy")
    assert code == 2
    assert err.strip() == "pnn: --experiment gate_entropy: the model has no gates"
    assert not (other / "experimental_results.json").exists()
    code, out, err = pnn_command("evidence", other, "--sequences", 10)  # all: what can be done is done
    assert code == 0, err
    results = json.loads((other / "experimental_results.json").read_text())
    assert results["gate_specificity"]["not_done"] == "the model has no gates"
    assert "verdict" in results["optogenetics_results"]
    assert "gate_specificity: the model has no gates" in out


def test_a_model_of_one_step(pnn_command, undrawn, tmp_path, write_config):
    other = trained_with(tmp_path, write_config, pnn_command, num_steps=1)
    for name in ("convergence", "gates", "optimisation"):
        code, _, err = pnn_command("analyze", name, other, "--sequences", 10)
        assert code == 0, err
    code, _, err = pnn_command("evidence", other, "--experiment", "modeling")
    assert code == 2
    assert err.strip() == "pnn: --experiment modeling: the model has 1 step, and it takes 3"


def test_a_run_without_a_checkpoint_and_a_checkpoint_without_a_run(pnn_command, run, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text(yaml.safe_dump({"name": "empty"}))
    for command in (("analyze", "gates"), ("evidence",)):
        code, _, err = pnn_command(*command, empty)
        assert code == 2
        assert "checkpoint" in err
        assert sorted(path.name for path in empty.iterdir()) == ["config.yaml"]
    bare = tmp_path / "bare"
    shutil.copytree((run / "checkpoints" / "best").resolve(), bare)
    code, _, err = pnn_command("analyze", "convergence", bare)
    assert code == 2
    assert "--data" in err


def test_a_baseline_can_be_analysed_as_far_as_it_goes(pnn_command, undrawn, tmp_path, write_config):
    other = trained_with(tmp_path, write_config, pnn_command, type="bert", num_hidden_layers=2)
    code, _, err = pnn_command("analyze", "convergence", other)
    assert code == 0, err
    assert pnn_command("analyze", "optimisation", other)[0] == 2
