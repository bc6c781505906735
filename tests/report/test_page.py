from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import WCAG, axe_finds, complaints

from pnn.config import RunConfig
from pnn.errors import UserError
from pnn.figures import style
from pnn.report.loading import load_runs
from pnn.report.page import write_report
from pnn.report.tables import steps_table
from pnn.report.verdict import above, summary
from pnn.stats import Estimate

KINDS = ("grammar", "agreement", "fact", "free")


def evaluation(
    accuracies: list[float], model_type: str, *, ceiling: bool, gain_interval: tuple[float, float]
) -> dict[str, Any]:
    def measured(shift: float) -> dict[str, Any]:
        values = [a + shift for a in accuracies]
        intervals = [[v - 0.011, v + 0.012] for v in values]
        return {
            "targets": 7380,
            "accuracy": values[-1],
            "accuracy_interval": intervals[-1],
            "accuracy_by_step": values,
            "accuracy_by_step_interval": intervals,
        }

    result: dict[str, Any] = {
        "model_type": model_type,
        "precision": "fp32",
        "checkpoint": "best",
        "parameters": 60177 if model_type == "pnn" else 152528,
        "source": "synthetic" if ceiling else "wikitext-2",
        "text": {"filter": "paper"},
        "sequences": 2000,
        "mask_probability": 0.15,
        "mask_seed": 0,
        "num_steps": len(accuracies) - 1,
        **measured(0.0),
        "loss_by_step": [3 - a for a in accuracies],
        "loss": 3 - accuracies[-1],
        "gain_over_first_step": {"value": accuracies[-1] - accuracies[1], "interval": list(gain_interval)},
    }
    if ceiling:
        kinds = {kind: {"share": 0.25, "ceiling": 0.912, **measured(0.01 * i)} for i, kind in enumerate(KINDS)}
        result |= {"ceiling": 0.8585, "by_kind": kinds}
    return result


def make_run(
    folder: Path,
    accuracies: list[float],
    *,
    bert: bool = False,
    ceiling: bool = True,
    gain_interval: tuple[float, float] = (0.05, 0.07),
    sets: dict[str, Any] | None = None,
    max_steps: int = 200,
) -> Path:
    checkpoint = folder / "checkpoints" / "best"
    checkpoint.mkdir(parents=True)
    config = RunConfig(name="any")
    config.training.max_steps = max_steps
    config.data.train = "synthetic" if ceiling else "wikitext-2"
    (folder / "config.yaml").write_text(config.to_yaml())
    size = {"vocab_size": 80, "hidden_size": 64, "max_position_embeddings": 128, "intermediate_size": 128}
    steps = len(accuracies) - 1
    model_type = "pnn_bert_baseline" if bert else "pnn"
    own = {"num_hidden_layers": steps} if bert else {"num_steps": steps, "schedule": [0] * steps}
    (checkpoint / "config.json").write_text(json.dumps({"model_type": model_type, **size, **own}))
    (folder / "environment.json").write_text(json.dumps({"seed": 0, "versions": {"torch": "2.13.0"}, "hardware": {"gpus": []}}))
    rows: list[dict[str, Any]] = [
        {"step": s, "last_step_loss": 1 + 300 / (s + 100), "tokens_per_second": 25_260.0} for s in range(10, max_steps + 1, 10)
    ]
    rows.append({"step": max_steps, "validation_accuracy": accuracies[-1], "validation_loss": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 21')
    result = evaluation(accuracies, model_type, ceiling=ceiling, gain_interval=gain_interval)
    if sets:
        result["sets"] = {name: evaluation(a, model_type, ceiling=False, gain_interval=(0, 0)) for name, a in sets.items()}
    (folder / "evaluation.json").write_text(json.dumps(result))
    return folder


@pytest.fixture(autouse=True)
def _empty_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing is most of a page's time. One test asks for real pictures; the others read text."""
    if "real_pictures" not in request.fixturenames:
        monkeypatch.setattr(style, "png", lambda figure: b"")


@pytest.fixture
def real_pictures() -> None:
    pass


@pytest.fixture
def pnn(tmp_path: Path) -> Path:
    return make_run(tmp_path / "pnn", [0.1537, 0.7644, 0.8215, 0.8224, 0.8236])


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return make_run(tmp_path / "bert", [0.0328, 0.2591, 0.5183, 0.6423, 0.8603], bert=True)


class Reader(HTMLParser):
    """Visible text, addresses that a browser would load, and whether tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [
            value or "" for key, value in attrs if key in ("src", "href", "srcset", "action") and not str(value).startswith("#")
        ]
        if tag not in ("meta", "img", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + " "


def read(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    assert reader.open == []
    reader.text = re.sub(r"\s+", " ", reader.text.replace("\u00a0", " "))
    return reader


@pytest.mark.usefixtures("real_pictures")
def test_page_holds_the_numbers_of_the_evaluation(pnn: Path, bert: Path, tmp_path: Path) -> None:
    page = read(write_report([pnn, bert], tmp_path / "out" / "report.html"))
    for number in ("15.4 %", "76.4 %", "82.2 %", "82.4 %", "81.3–83.6 %", "86.0 %", "85.9 %", "91.2 %", "60,177", "152,528"):
        assert number in page.text, number
    for number in ("2.176", "25,260", "7,380", "2.5 times the parameters"):
        assert number in page.text, number
    assert page.tags.count("img") == 5
    names = {"architecture", "accuracy_by_step", "accuracy_by_kind", "training_curves", "speed"}
    pictures = list((tmp_path / "out" / "figures").iterdir())
    assert {path.stem for path in pictures} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"figures", "report.html"}


def test_nothing_is_loaded_from_elsewhere(pnn: Path, bert: Path, tmp_path: Path) -> None:
    page = write_report([pnn, bert], tmp_path / "report.html")
    reader = read(page)
    assert reader.loaded
    assert all(address.startswith("data:image/png;base64,") for address in reader.loaded)
    assert not {"script", "link", "iframe", "object"} & set(reader.tags)
    assert not re.search(r"https?://|url\(|@import", page.read_text())


def test_a_text_is_shown_being_rewritten(pnn: Path, bert: Path, tmp_path: Path) -> None:
    cells = [{"top": [{"token": word, "probability": 0.5}]} for word in ("<i>", "old", "shy")]
    row = {"token": "[MASK]", "masked": True, "answer": "shy", "cells": cells}
    found = {"unit": "step", "trained": 2, "read": [1, 2], "rows": [row]}
    run = tmp_path / "run"
    shutil.copytree(pnn, run)
    (run / "refining.json").write_text(json.dumps(found))
    page = write_report([run, bert], tmp_path / "report.html")
    reader = read(page)
    assert "How is a text rewritten?" in reader.text
    assert reader.tags.count("script") == 1
    assert "<script>" in page.read_text()  # its own, from nowhere else
    assert not re.search(r"https?://|url\(|@import|<i><small>", page.read_text())
    assert 'type="range" max="2" value="2"' in page.read_text()


def test_names_are_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<b>&'\"", [0.1, 0.5, 0.6])
    page = write_report([run], tmp_path / "report.html")
    assert "<b>&'" not in page.read_text()
    assert "&lt;b&gt;&amp;" in page.read_text()
    assert "<b>&'\"" in read(page).text


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((0.05, 0.07), "Its further steps help"),
        ((-0.002, 0.07), "Its further steps show no gain"),
        ((-0.09, -0.02), "Its further steps do harm"),
    ],
)
def test_the_verdict_follows_the_interval(tmp_path: Path, interval: tuple[float, float], said: str) -> None:
    run = make_run(tmp_path / "run", [0.1, 0.5, 0.55], gain_interval=interval)
    text = read(write_report([run], tmp_path / "report.html")).text
    assert said in text
    assert [phrase in text for phrase in ("steps help", "no gain", "do harm")].count(True) == 1


def test_no_gain_is_claimed_over_a_step_that_was_not_trained_to_be_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.1, 0.2, 0.55])
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"] |= {"step_weights": [0.0, 1.0]}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    text = read(write_report([run], tmp_path / "report.html")).text
    assert "was not trained to be read: what further steps add is not known" in text
    assert "steps help" not in text
    assert steps_table(load_runs([run])).count('class="quiet"') == 2  # the embeddings, and step 1


def test_the_distance_to_the_ceiling_is_said(tmp_path: Path) -> None:
    below = make_run(tmp_path / "below", [0.1, 0.5, 0.8085])
    within = make_run(tmp_path / "within", [0.1, 0.5, 0.855])
    assert "5.0\u00a0points below the best possible" in summary(load_runs([below]))
    assert "lies within that interval" in summary(load_runs([within]))


def test_runs_are_told_apart_only_by_more_than_chance(pnn: Path, tmp_path: Path) -> None:
    far = make_run(tmp_path / "far", [0.1, 0.2, 0.88], bert=True)
    near = make_run(tmp_path / "near", [0.1, 0.2, 0.83], bert=True)
    assert "is 5.6\u00a0points ahead of" in summary(load_runs([pnn, far]))
    assert "cannot be told apart" in summary(load_runs([pnn, near]))
    best, other = load_runs([far, pnn])
    ((gap, low, high),) = above(best, [other], "correct", lambda e: Estimate(e["accuracy"], *e["accuracy_interval"]))
    assert gap == pytest.approx(0.0564)
    assert (high - low) / 2 == pytest.approx(0.0115 * 2**0.5)


def test_an_end_that_would_be_written_as_zero_has_two_digits(pnn: Path, tmp_path: Path) -> None:
    """As in `pnn compare`: what holds does not look as if it did not."""
    ahead = make_run(tmp_path / "ahead", [0.1, 0.2, 0.8401], bert=True)
    assert "is 1.65\u00a0points ahead of" in summary(load_runs([pnn, ahead]))
    assert "(95\u00a0% interval 0.02–3.28: holds)" in summary(load_runs([pnn, ahead]))
    near = make_run(tmp_path / "near", [0.1, 0.2, 0.83], bert=True)
    assert "interval −1.0 to 2.3: undecided; the former" in summary(load_runs([pnn, near]))


def test_unequal_recipes_are_named(pnn: Path, bert: Path, tmp_path: Path) -> None:
    longer = make_run(tmp_path / "longer", [0.1, 0.7, 0.8], max_steps=400)
    assert "with the same recipe" in summary(load_runs([pnn, bert]))
    assert "differ in training.max_steps (200, 400)" in summary(load_runs([pnn, longer]))


def test_several_runs_are_a_list_with_one_entry_for_each(pnn: Path, bert: Path) -> None:
    said = summary(load_runs([pnn, bert]))
    assert said.count("<li>") == 2
    assert said.index("with the same recipe") < said.index("<li>") < said.rindex("</li>") < said.index("one seed")
    assert "<li>" not in summary(load_runs([pnn]))


def test_a_run_that_takes_no_figures_has_them_beside_its_page(pnn: Path, tmp_path: Path) -> None:
    before = (pnn / "config.yaml").read_text()
    (pnn / "figures").write_text("a file: no folder of this name can be made")
    page = write_report([pnn], tmp_path / "elsewhere" / "report.html")
    assert (tmp_path / "elsewhere" / "figures" / "accuracy_by_step.png").exists()
    assert "Does refining again help?" in read(page).text
    assert (pnn / "config.yaml").read_text() == before


def test_a_run_whose_figures_are_kept_has_new_ones_beside_the_page(
    pnn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pnn / "figures").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # tests may run as root, who may write anywhere
    write_report([pnn], tmp_path / "elsewhere" / "report.html")
    assert list((pnn / "figures").iterdir()) == []
    assert (tmp_path / "elsewhere" / "figures" / "accuracy_by_step.png").exists()


def test_two_curves_are_not_told_of_as_one(pnn: Path, tmp_path: Path) -> None:
    text = read(write_report([pnn], tmp_path / "report.html")).text
    assert "If accuracy is still rising at the right" in text  # beside it stands the loss, which falls
    assert "A curve that is still rising" not in text


def test_runs_on_different_text_are_not_compared(pnn: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", [0.1, 0.2, 0.3], ceiling=False)
    text = read(write_report([pnn, other], tmp_path / "report.html")).text
    assert "their accuracies do not compare" in text
    assert "ahead of" not in text
    assert "told apart" not in text


def test_one_run_has_nothing_that_needs_two(pnn: Path) -> None:
    page = read(write_report([pnn], pnn / "report.html"))
    assert "What did it cost?" not in page.text
    assert "ahead of" not in page.text
    assert "differences between runs" not in page.text
    assert page.tags.count("img") == 4
    assert (pnn / "figures" / "accuracy_by_step.png").exists()


def test_real_text_has_no_ceiling_and_no_kinds(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.1, 0.3, 0.4], ceiling=False)
    page = read(write_report([run], tmp_path / "report.html"))
    assert "best possible" not in page.text
    assert "embedded corpus" not in page.text
    assert page.tags.count("img") == 3


def test_ones_own_text_has_the_score_of_the_commonest_token(pnn: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.1, 0.3, 0.4], ceiling=False)
    result = json.loads((run / "evaluation.json").read_text())
    (run / "evaluation.json").write_text(json.dumps(result | {"commonest": {"token": "the", "accuracy": 0.0623}}))
    text = read(write_report([run], tmp_path / "report.html")).text
    assert "always guessing the commonest token, “the”, would score 6.2 %" in text
    assert "always guessing" not in read(write_report([pnn], tmp_path / "report.html")).text  # older, and with a ceiling


@pytest.mark.usefixtures("real_pictures")
def test_a_run_that_was_calibrated_since_is_told_as_it_was_evaluated(pnn: Path) -> None:
    """`pnn calibrate` leaves the evaluation and changes the steps in config.json."""
    described = load_runs([pnn])[0].describe()
    path = pnn / "checkpoints" / "best" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_steps": 2, "trained_steps": 4}))
    assert described == load_runs([pnn])[0].describe() == "PNN, one refiner applied 4 times"
    page = write_report([pnn], pnn / "report.html").read_text()
    assert f"pnn: {described}" in page
    assert '<th scope="row">num_steps</th><td colspan="1">2</td>' in page  # what holds now, among its settings


def test_a_baseline_alone_and_without_its_checkpoint(bert: Path, tmp_path: Path) -> None:
    (bert / "checkpoints" / "best" / "config.json").unlink()
    page = read(write_report([bert], tmp_path / "report.html"))
    assert "BERT baseline, 4 layers" in page.text
    assert "What is the model?" not in page.text
    assert "further steps" not in page.text


def test_further_sets_have_their_table(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0.1, 0.3, 0.4], sets={"held-out <x>": [0.05, 0.2111, 0.3456]})
    page = read(write_report([run], tmp_path / "report.html"))
    assert "And on other text?" in page.text
    assert "held-out <x>" in page.text
    assert "5.0 · 21.1 · 34.6" in page.text


def test_the_sample_paragraph_shows_every_kind(pnn: Path) -> None:
    page = write_report([pnn], pnn / "report.html").read_text()
    sample = re.search(r'<p class="sample">(.*?)</p>', page)
    assert sample is not None
    assert {f"kind {kind}" for kind in KINDS} == set(re.findall(r'class="([^"]*)"', sample[1]))


def test_a_run_on_the_harder_corpus_is_explained_by_its_own_facts(pnn: Path, tmp_path: Path) -> None:
    result = json.loads((pnn / "evaluation.json").read_text())
    (pnn / "evaluation.json").write_text(json.dumps(result | {"source": "synthetic_hard"}))
    text = read(write_report([pnn], tmp_path / "report.html")).text
    assert "The harder embedded corpus is a small language made by code." in text
    assert "a place with its river and trade, a month with its season and a colour: what one of them says holds in all" in text
    assert "The embedded corpus is" not in text


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / part / "pnn", [0.1, 0.5, 0.6]) for part in ("a", "b")]
    assert [run.name for run in load_runs(folders)] == ["a/pnn", "b/pnn"]
    with pytest.raises(UserError, match="twice"):
        load_runs([folders[0], folders[0]])


@pytest.mark.parametrize("missing", ["evaluation.json", "metrics.jsonl", "config.yaml"])
def test_an_incomplete_run_is_refused_in_one_sentence(pnn: Path, missing: str, tmp_path: Path) -> None:
    (pnn / missing).unlink()
    with pytest.raises(UserError, match=missing) as refused:
        write_report([pnn], tmp_path / "report.html")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (390, "dark")])
def test_everybody_can_read_the_page(chromium: Any, pnn: Path, bert: Path, tmp_path: Path, width: int, scheme: str) -> None:
    config = pnn / "checkpoints" / "best" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"update": "rewrite"}))  # it has the longest description
    last = {"step": 200, "seconds": 600.0, "tokens_per_second": 1_234_567.0, "last_step_loss": 1.0}
    (pnn / "metrics.jsonl").write_text(json.dumps(last) + "\n")
    file = write_report([pnn, bert], tmp_path / "report.html")
    with chromium.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme) as context:
        page = context.new_page()
        wrong = complaints(page, file.as_uri())
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if width > 1000:  # nothing has to be scrolled
            boxes = page.locator(".scroll").all()
            assert boxes
            assert all(box.evaluate("box => box.scrollWidth <= box.clientWidth") for box in boxes)
        assert axe_finds(page, WCAG) == []
    assert wrong == []
