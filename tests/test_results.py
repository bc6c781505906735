"""The scripts beside measured results: what they do with runs that are not all there, and with folders of any name."""

import importlib.util
import json
import shutil
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from pnn.errors import UserError

ROOT = Path(__file__).parents[1] / "results"


def script(path):
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), ROOT / f"{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("seeds", [(0, 1, 2), (0, 2), (2,)])
def test_longer_cycles_are_paired_by_seed(tmp_path, monkeypatch, seeds):
    """Seeds differ far more than kinds do: a wrong pairing shows at once."""
    collect = script("plasticity_study/collect")
    monkeypatch.setattr(collect, "MEASURED", tmp_path)
    for kind in collect.LONGER:
        for seed in seeds if kind == "random" else (0, 1, 2):
            perplexity = 10 ** (seed + 1) * (1.02 if kind == "random" else 1)
            write(tmp_path / f"longer_{kind}_{seed}" / "summary.json", {"final": {"perplexity": perplexity}})
    table = collect.longer()
    assert "nan" not in table
    assert f"({len(seeds)} seeds)" in table
    assert table.splitlines()[-1].endswith("| +2.0 |" if len(seeds) == 1 else "| +2.0 (+2.0 to +2.0) |")


def test_a_task_that_lacks_a_model_counts_in_no_mean(capsys):
    collect = script("glue/collect")
    one = {"score": 0.5, "score_interval": [0.4, 0.6], "score_std": None, "score_is": "dev accuracy"}
    one |= {"data": {"examples": {"train": 9}}, "baselines": {name: {"score": 0.25} for name in ("majority", "bag_of_words")}}
    everyone = dict.fromkeys(("pnn", "pnn_rewrite", "bert4"), one)
    assert "mean" not in collect.table({"cola": {"pnn": one}, "rte": {"bert": one}})
    assert "cola lacks a model" in capsys.readouterr().err
    table = collect.table({"cola": everyone, "wnli": everyone, "rte": {"pnn": one}})
    assert [line for line in table.splitlines() if "mean" in line] == [
        "| **mean of 2** | | | 25.0 | 25.0 | 50.0 | 50.0 | 50.0 |",
        "| **mean of 1, without wnli** | | | 25.0 | 25.0 | 50.0 | 50.0 | 50.0 |",
    ]


def test_evidence_that_was_measured_earlier_is_judged_by_the_spread_of_gates(tmp_path, monkeypatch):
    """Not by the share above one half, which its own finding is about. A finding that is there is taken as it is."""
    collect = script("pnn_evidence/collect")
    claim = collect.CLAIMS["Gates become increasingly selective"]
    spread = [one["value"] for one in collect.analysed("published", "gates")["spread_within_token_by_step"]]
    found = collect.finding("published", claim)
    assert found["effect"]["value"] == pytest.approx(min(b - a for a, b in pairwise(spread)))
    assert (found["verdict"], "measured" in found) == ("not supported", True)
    old = json.loads((collect.MEASURED / "published" / "analysis" / "gates.json").read_text())
    assert [one["verdict"] for one in old["findings"].values()] == ["supported"]

    monkeypatch.setattr(collect, "MEASURED", tmp_path)
    write(tmp_path / "new" / "analysis" / "gates.json", {"findings": {claim[1]: {"verdict": "supported"}}})
    assert collect.finding("new", claim) == {"verdict": "supported"}


def test_evidence_leaves_out_what_step_0_gets_right(tmp_path, monkeypatch):
    collect = script("pnn_evidence/collect")
    monkeypatch.setattr(collect, "MEASURED", tmp_path)

    def classes(medium, hard):
        steps = {"easy": 0.0, "medium": medium, "hard": hard}
        return {"classes": {n: {"settled_step": {"value": s, "interval": [s - 0.1, s + 0.1]}} for n, s in steps.items()}}

    claim = collect.CLAIMS["… also among tokens that step 0 gets wrong"]
    for medium, hard, verdict in ((1.0, 2.0, "supported"), (2.0, 2.0, "undecided"), (2.0, 1.0, "not supported")):
        run = {**classes(medium, hard), "controls": {"shuffled": classes(1.0, 1.1)}, "findings": {}}
        write(tmp_path / "old" / "analysis" / "convergence.json", run)
        assert collect.finding("old", claim)["verdict"] == verdict


@pytest.mark.parametrize("data", ["data", "/text/data"])
def test_glue_results_keep_their_keys(tmp_path, monkeypatch, data):
    collect = script("glue/collect")
    runs = tmp_path / "runs"
    monkeypatch.setattr(collect, "MEASURED", tmp_path / "measured")
    write(runs / "pnn" / "evaluation.json", {"accuracy": 0.5})
    for folder in ("pnn", "pnn-glue/cola"):
        write(runs / folder / "environment.json", {"git": {"commit": "0123", "changed": False}})
    config = (ROOT / "glue" / "configs" / "pnn.yaml").read_text().replace("DATA/", f"{data}/")
    (runs / "pnn" / "config.yaml").write_text(config)
    result = {"data": {"source": f"{data}/glue", "examples": {"train": 24}}}
    write(runs / "pnn-glue" / "cola" / "result.json", result)
    collect.copy_in(runs)
    assert collect.results()["cola"]["pnn"] == {"data": {"source": "DATA/glue", "examples": {"train": 24}}}
    assert "tokenizer: DATA/vocab.txt" in (tmp_path / "measured" / "pnn" / "config.yaml").read_text()


def test_models_of_another_question_get_tables_of_their_own(tmp_path, monkeypatch):
    """And of equals each is best, not the first."""
    collect, folder, runs = script("glue/collect"), tmp_path / "downstream", tmp_path / "runs"
    shutil.copytree(ROOT / "downstream", folder, ignore=shutil.ignore_patterns("measured"))
    baselines = {name: {"score": 0.25} for name in ("majority", "bag_of_words")}
    one = {"score": 0.5, "score_interval": [0.4, 0.6], "score_std": None, "score_is": "dev accuracy", "baselines": baselines}
    one |= {"data": {"examples": {"train": 9}}, "seeds": [{"seed": 0}], "learning_rates_tried": [{}]}
    config = "model: {type: pnn}\ndata: {train: /tokens/wiki}\nevaluation: {sets: {wikitext_tokens: {source: /tokens/valid}}}\n"
    for model in ("pnn_rewrite", "bert4"):
        write(runs / model / "evaluation.json", {"accuracy": 0.5, "loss": 1.0, "parameters": 9, "source": "/tokens/wiki"})
        (runs / model / "config.yaml").write_text(config)
        steps = {"score_by_step": [0.1, 0.3, 0.5]} if model == "pnn_rewrite" else {}
        write(runs / f"{model}-glue" / "cola" / "result.json", one | steps)
        for place in (model, f"{model}-glue/cola"):
            write(runs / place / "environment.json", {"git": {"commit": "0123", "changed": False}})
    monkeypatch.setattr("sys.argv", ["collect.py", str(runs), str(folder)])
    collect.main()
    result = json.loads((folder / "result.json").read_text())
    above = "mean 50.0 and is above a bag of words by more than its interval on 1 of 1 (without wnli)"
    assert result["answer"] == f"of 1 tasks: PNN-rewrite best on 1, {above}; BERT-4 best on 1, {above}"
    assert "one learning rate" in result["protocol"]
    page = (folder / "README.md").read_text()
    assert "| cola | 10.0 | 30.0 | 50.0 |" in page
    assert "Not measured yet" not in page
    assert "/tokens" not in "".join(path.read_text() for path in folder.rglob("*.*") if path.is_file())


FILES = {"evaluation.json": {}, "summary.json": {}, "study.json": {}, "analysis/convergence.json": {"source": "x"}}


@pytest.mark.parametrize("git", [None, {"commit": "0123", "changed": False}])
@pytest.mark.parametrize(
    ("question", "run"),
    [
        ("ddl_rewrites", "delta-0"),
        ("glue", "pnn"),
        ("plasticity_study", "study_llama"),
        ("plasticity_study", "longer_none_0"),
        ("pnn_evidence", "equations"),
        ("pnn_paper_protocol", "equations"),
        ("short_budget", "pnn"),
    ],
)
def test_new_runs_that_name_no_commit_are_not_collected(tmp_path, monkeypatch, question, run, git):
    collect = script(f"{question}/collect")
    monkeypatch.setattr(collect, "MEASURED", tmp_path / "measured")
    folder = tmp_path / "runs" / run
    for name, value in FILES.items():
        write(folder / name, value)
    shutil.copy(ROOT / "glue" / "configs" / "pnn.yaml", folder / "config.yaml")
    write(folder / "environment.json", {"git": git})
    given = folder if question == "pnn_evidence" else folder.parent
    if git is None:
        with pytest.raises(UserError, match=rf"{run}: its environment.json names no commit.*make stamp"):
            collect.copy_in(given)
        assert not (tmp_path / "measured").exists()
    else:
        with suppress(FileNotFoundError, UserError):  # there is more to copy than stands here
            collect.copy_in(given)
        assert (tmp_path / "measured").exists() == (question != "pnn_evidence")  # which takes a run whole or not at all
