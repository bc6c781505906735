"""The part of the page about analyses, of a run that was really trained and analysed, if only a little."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from pnn.figures import style
from pnn.numbers import estimate
from pnn.report.page import write_report
from pnn.studies.registry import analyses, experiments
from pnn.studies.run import analyse, collect_evidence, open_run

ANALYSES = {name: about for name, about in analyses().items() if about.kind == "masked"}
EXPERIMENTS = experiments()
QUESTIONS = {name: about.question for name, about in (ANALYSES | EXPERIMENTS).items()}


@pytest.fixture(scope="module")
def once_analysed(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("analysed") / "tiny"
    shutil.copytree(trained_run, run, symlinks=True)
    opened = open_run(run, progress=lambda items, _: items, sequences=12)
    for name in ANALYSES:
        analyse(opened, name)
    collect_evidence(opened, None, lambda name: None)
    return run


@pytest.fixture
def run(once_analysed: Path, tmp_path: Path) -> Path:
    """A copy, to be changed as one likes."""
    return shutil.copytree(once_analysed, tmp_path / "tiny", symlinks=True)


@pytest.fixture(autouse=True)
def _empty_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing is most of a page's time, and figures have tests of their own; test_analyze.py makes them for a page."""
    monkeypatch.setattr("pnn.report.analysis.figure_of", lambda name: lambda result: Figure())
    monkeypatch.setattr(style, "png", lambda figure: b"\x89PNG")


class Reader(HTMLParser):
    """The text of every tag of interest, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, str]] = []
        self.links: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [] if tag in ("meta", "img", "input") else [tag]
        self.found.append((tag, dict(attrs).get("alt") or ""))
        assert "onclick" not in dict(attrs)
        if tag == "a":
            self.links.append(str(dict(attrs)["href"]))
        self.addresses += [str(value) for key, value in attrs if key == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in dict.fromkeys(self.open):
            at = max(index for index, (name, _) in enumerate(self.found) if name == tag)
            self.found[at] = (tag, self.found[at][1] + data)


def page_of(*runs: Path) -> tuple[Callable[[str], list[str]], str]:
    """Texts by tag, and all text."""
    source = write_report(list(runs), runs[0].parent / "out.html").read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(source)
    assert reader.open == []
    assert len(set(reader.addresses)) == len(reader.addresses)
    assert {link.removeprefix("#") for link in reader.links} <= set(reader.addresses)
    tidy = [(tag, re.sub(r"\s+", " ", text.replace("\u00a0", " "))) for tag, text in reader.found]
    return (lambda wanted: [text for tag, text in tidy if tag == wanted]), dict(tidy)["main"]


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    result = json.loads(path.read_text())
    edit(result)
    path.write_text(json.dumps(result))


def findings(run: Path) -> list[tuple[str, dict[str, Any]]]:
    analyses = {name: json.loads((run / "analysis" / f"{name}.json").read_text())["findings"] for name in ANALYSES}
    results = json.loads((run / "experimental_results.json").read_text())
    found = [(name, one) for name, parts in analyses.items() for one in parts.values()]
    return [*found, *((name, results[experiment.key]) for name, experiment in EXPERIMENTS.items())]


def test_each_question_has_its_picture(run: Path) -> None:
    tags, text = page_of(run)
    assert tags("h3") == list(QUESTIONS.values())
    pictures = {path.stem: path for path in (run / "figures").iterdir()}
    own = {*ANALYSES, *(experiment.figure for experiment in EXPERIMENTS.values())}
    assert own <= set(pictures)
    assert all(pictures[name].read_bytes().startswith(b"\x89PNG") for name in own)
    assert len(tags("img")) == len(pictures)
    assert not any(found["hypothesis"] in alt for alt in tags("img") for _, found in findings(run))
    comparison = next(found["untrained"] for name, found in findings(run) if name == "dimensionwise")
    assert f"{shown(comparison)}for comparison: the same model untrained" in text


def shown(found: dict[str, Any]) -> str:
    """As the table has it: the interval stands under the value."""
    value, _, interval = estimate(found).partition(" (")
    return value + interval.rstrip(")")


def test_each_verdict_is_told_once(run: Path) -> None:
    tags, text = page_of(run)
    for _, found in findings(run):
        assert text.count(found["hypothesis"]) == 1
    verdicts = [found["verdict"] for _, found in findings(run)]
    assert [span for span in tags("span") if span in ("supported", "not supported", "undecided")] == verdicts


def test_a_long_page_has_contents_and_a_short_one_has_none(run: Path) -> None:
    tags, _ = page_of(run)
    (listed,) = tags("nav")
    assert all(heading in listed for heading in (*tags("h2"), *tags("h3")))
    (run / "experimental_results.json").unlink()
    for name in ("halting", "more_steps"):
        (run / "analysis" / f"{name}.json").unlink()
    assert page_of(run)[0]("nav") == []


def test_the_table_has_a_row_for_every_hypothesis(run: Path) -> None:
    _, text = page_of(run)
    at = 0
    for name, found in findings(run):
        asked = re.escape(f"{found['hypothesis']}measured: {found['measure']}{shown(found['effect'])}")
        row = re.compile(rf"{name}{asked}.*?{found['verdict']}")
        match = row.search(text, at)
        assert match, (name, found["hypothesis"])
        at = match.end()


@pytest.mark.parametrize("said", ["supported", "not supported", "undecided"])
def test_the_verdict_is_the_results(run: Path, said: str) -> None:
    change(run / "experimental_results.json", lambda results: results["meg_analysis"].update(verdict=said))
    tags, _ = page_of(run)
    (row,) = [row for row in tags("tr") if "refinement settles" in row]
    assert row.startswith("meg")
    assert re.search(rf"(?<!not ){said}", row)


def test_an_effect_is_told_with_interval_control_and_reason(run: Path) -> None:
    def edit(results: dict[str, Any]) -> None:
        found = results["layerwise_activity_analysis"]
        found |= {"effect": {"value": 0.42, "interval": [0.41, 0.43]}, "margin": 0.5, "verdict": "not supported"}
        found["control"] |= {"value": 0.9, "interval": [0.8, 1.0]}
        found["published"]["accumulation_pattern"]["supports_accumulation_hypothesis"] = True

    change(run / "experimental_results.json", edit)
    tags, _ = page_of(run)
    (row,) = [row for row in tags("tr") if "activity accumulates" in row]
    assert "0.4200.410 to 0.4300.900.80 to 1.00updates of the same sizes with random signs" in row
    assert row.endswith("not supportedthe effect's interval lies below the margin of 0.5")
    reading = EXPERIMENTS["layerwise_activity"].picture
    assert f"{reading} The published rule, which compares bare means, says yes." in tags("p")
    change(
        run / "experimental_results.json",
        lambda results: results["layerwise_activity_analysis"]["published"]["accumulation_pattern"].update(
            supports_accumulation_hypothesis=False
        ),
    )
    assert f"{reading} The published rule, which compares bare means, says no." in page_of(run)[0]("p")


def test_what_was_not_done_says_why(run: Path) -> None:
    nothing = {"experiment": "gate_specificity", "not_done": "the model has no gates"}
    change(run / "experimental_results.json", lambda results: results.update(gate_specificity=nothing))
    tags, text = page_of(run)
    (hypothesis,) = EXPERIMENTS["gate_specificity"].hypotheses.values()
    assert f"gate_specificity{hypothesis}: not done, the model has no gates" in text
    assert QUESTIONS["gate_specificity"] not in tags("h3")
    assert len(tags("h3")) == len(QUESTIONS) - 1


def test_a_finding_that_could_not_be_made_says_why(run: Path) -> None:
    found = {"hypothesis": "gates close", "not_done": "there is one step"}
    change(run / "analysis" / "gates.json", lambda result: result.update(findings={"one": found}))
    _, text = page_of(run)
    assert "gatesgates close: not done, there is one step" in text


def test_parts_stand_alone(run: Path) -> None:
    (run / "experimental_results.json").unlink()
    (run / "analysis" / "gates.json").unlink()
    tags, _ = page_of(run)
    assert tags("h3") == [QUESTIONS[name] for name in ("convergence", "halting", "more_steps", "optimisation")]


def test_a_run_without_analyses_has_no_such_part(run: Path) -> None:
    with_analyses, _ = page_of(run)
    (run / "experimental_results.json").unlink()
    shutil.rmtree(run / "analysis")
    tags, text = page_of(run)
    assert "What happens inside" not in text
    assert tags("h3") == []
    assert len(tags("img")) == len(with_analyses("img")) - len(QUESTIONS)
    assert tags("h2") == [heading for heading in with_analyses("h2") if "inside" not in heading]


def test_runs_side_by_side_keep_their_pictures_apart(run: Path, trained_run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run, tmp_path / "other", symlinks=True)
    plain = shutil.copytree(trained_run, tmp_path / "plain", symlinks=True)
    tags, _ = page_of(run, other, plain)
    inside = [heading for heading in tags("h2") if "inside" in heading]
    assert inside == ["What happens inside tiny?", "What happens inside other?"]
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert {"tiny_convergence", "other_convergence", "tiny_gate_specificity_tests"} <= names
    assert not any(name.startswith("plain_") for name in names)


def test_another_checkpoint_is_named(run: Path) -> None:
    evaluated = json.loads((run / "evaluation.json").read_text())["checkpoint"]
    _, text = page_of(run)
    assert f"Measured on checkpoint {evaluated}, 12 sequences of the embedded corpus." in text
    assert "another checkpoint" not in text
    change(run / "analysis" / "gates.json", lambda result: result.update(checkpoint="step-000001"))
    _, text = page_of(run)
    assert f"The accuracies above are of another checkpoint, {evaluated}." in text


def test_results_are_escaped(run: Path) -> None:
    change(run / "experimental_results.json", lambda results: results["meg_analysis"].update(hypothesis="<i>a & b</i>"))
    tags, text = page_of(run)
    assert tags("i") == []
    assert "<i>a & b</i>" in text


def test_evidence_of_an_older_version_stays(run: Path) -> None:
    """It did not write down how many steps the model took."""
    opened = open_run(run, progress=lambda items, _: items, sequences=12)
    before = set(collect_evidence(opened, ["meg"], lambda name: None))
    assert len(before) > 2
    change(run / "experimental_results.json", lambda results: results["about"].pop("num_steps"))
    assert set(collect_evidence(opened, ["meg"], lambda name: None)) == before


def test_evidence_of_a_model_that_takes_other_steps_is_begun_anew(run: Path) -> None:
    """`pnn calibrate` changes the number of steps in config.json, not the checkpoint's name."""
    opened = open_run(run, progress=lambda items, _: items, sequences=12)
    assert len(collect_evidence(opened, ["meg"], lambda name: None)) > 2  # beside the other experiments
    config = run / "checkpoints" / "best" / "config.json"
    held = json.loads(config.read_text())
    config.write_text(json.dumps(held | {"num_steps": held["num_steps"] - 1}))
    (run / "checkpoints" / "best" / "checksums.json").unlink()
    calibrated = open_run(run, progress=lambda items, _: items, sequences=12)
    assert set(collect_evidence(calibrated, ["meg"], lambda name: None)) == {"about", "meg_analysis"}
