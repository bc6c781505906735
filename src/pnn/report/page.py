"""The page: one file that opens anywhere, with what was measured, the figures, and how to read them.

Every section answers a question that its heading asks. What a run does not have (a best possible accuracy, kinds of words,
further sets, analyses) has no section; what needs two runs is not there for one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pnn.errors import UserError
from pnn.figures import style
from pnn.figures.accuracy import accuracy_by_kind, accuracy_by_step
from pnn.figures.architecture import architecture
from pnn.figures.training import speed, training_curves
from pnn.files import make_folder, write_text
from pnn.numbers import count, per_cent
from pnn.report import decoders
from pnn.report.analysis import analysis_section
from pnn.report.corpus import corpus_note
from pnn.report.loading import DecoderRun, MaskedRun, Run, load_runs
from pnn.report.markup import Html, contents, image, join, section, tag
from pnn.report.refining import grid, resource
from pnn.report.settings import settings_table
from pnn.report.tables import kinds_tables, results_table, sets_table, steps_table
from pnn.report.verdict import pairing_note, summary, title
from pnn.results import same_targets

LONG = 11  # a page with more headings has a table of contents
PIXELS_PER_INCH = 120  # on the page: figure text comes out a little smaller than the page's own


def write_report(runs: list[Path], output: Path) -> Path:
    """Write the page about `runs` to `output`, and its figures as PNG beside it (of a single run: into the run's folder, if
    that can be written)."""
    loaded = load_runs(runs)
    kinds = {run.is_decoder for run in loaded}
    if len(kinds) > 1:
        raise UserError("a page is about masked models or about decoders: these runs are both, and nothing compares them")
    pictures = _place_of_pictures(runs, output)
    body = _decoders(loaded, pictures) if kinds == {True} else _masked(loaded, pictures)
    page = join([tag("h1", title(loaded)), *body])
    if page.count("<h2") + page.count("<h3") > LONG:  # behind the summary and the table of results
        page = join([tag("h1", title(loaded)), *body[:2], contents(page), *body[2:]])
    write_text(output, _document(title(loaded), page))
    return output


def _place_of_pictures(runs: list[Path], output: Path) -> Path:
    make_folder(output.parent)
    beside, own = output.parent / "figures", runs[0] / "figures"
    if len(runs) == 1:
        try:
            make_folder(own)
        except UserError:  # somebody else's run, or an archive
            return beside
        if os.access(own, os.W_OK):
            return own
    return beside


def _document(heading: str, body: Html) -> str:
    css, script = resource("page.css"), Html("")
    if 'class="refining' in body:  # the only part that moves
        css, script = css + resource("refining.css"), tag("script", Html(resource("refining.js")))
    head = join(
        [
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            tag("title", heading),
            tag("style", Html(css)),
            script,
        ]
    )
    return "<!doctype html>\n" + tag("html", tag("head", head), tag("body", tag("main", body)), lang="en") + "\n"


def _decoders(runs: Sequence[DecoderRun], pictures: Path) -> list[Html]:
    def draw(figure: Figure, name: str, description: str) -> Html:
        return _picture(figure, name, pictures, description)

    inside = (_inside(run, pictures, alone=len(runs) == 1) for run in runs)
    return [
        decoders.summary(runs),
        decoders.results_table(runs),
        *decoders.sections(runs, draw),
        *(part for part in inside if part is not None),
        decoders.small_print(runs),
        _settings(runs),
    ]


def _masked(runs: Sequence[MaskedRun], pictures: Path) -> list[Html]:
    sections = [
        summary(runs),
        results_table(runs),
        _architecture(runs, pictures) if all(run.can_be_drawn for run in runs) else None,
        _steps(runs, pictures),
        _refining(runs) if any(run.refining for run in runs) else None,
        _kinds(runs, pictures) if any("by_kind" in run.evaluation for run in runs) else None,
        _other_sets(runs) if any(run.evaluation.get("sets") for run in runs) else None,
        _training(runs, pictures),
        _cost(runs, pictures) if len(runs) > 1 else None,
        *(_inside(run, pictures, alone=len(runs) == 1) for run in runs),
        _small_print(runs),
        _settings(runs),
    ]
    return [part for part in sections if part is not None]


def _settings(runs: Sequence[Run[Any]]) -> Html:
    told = {run.name: " ".join(run.text_left_out()) for run in runs}
    if len(set(told.values())) == 1:  # the same text, or none that was counted
        texts = [tag("p", text) for text in set(told.values()) if text]
    else:
        texts = [tag("p", tag("b", name), f": {text or 'not counted'}") for name, text in told.items()]
    every = tag("details", tag("summary", "Every setting"), settings_table(runs))
    return section("Data, recipe and machine", *texts, every)


def _picture(figure: Figure, name: str, folder: Path, description: str) -> Html:
    """Saved as a file for slides and papers, and embedded in the page."""
    png = style.png(figure)
    style.save(png, folder / f"{name}.png")
    return image(png, round(figure.get_figwidth() * PIXELS_PER_INCH), description)


def _architecture(runs: Sequence[MaskedRun], pictures: Path) -> Html:
    configs = {run.name: run.evaluated_model for run in runs if run.evaluated_model is not None}
    figure = architecture(configs, {run.name: run.evaluation for run in runs})
    reuse = "Same shade, same weights. " + (
        "A dashed arrow leads from one use of a refiner to its next: it brings no new parameters. "
        if any(run.is_refiner for run in runs)
        else ""
    )
    reading = "The number at the right of a box is the accuracy if the head reads the state there."
    heading = "What is compared?" if len(runs) > 1 else "What is the model?"
    described = "; ".join(f"{run.name}: {run.describe()}" for run in runs)
    return section(heading, tag("p", reuse + reading), _picture(figure, "architecture", pictures, described))


def _steps(runs: Sequence[MaskedRun], pictures: Path) -> Html | None:
    table = steps_table(runs)
    grey = "Grey in the table: the head was not trained to read there."
    if not any(run.is_refiner for run in runs):
        note = "The head was trained on the last layer only; what it makes of earlier layers is shown for completeness."
        return section("What does each layer know?", tag("p", f"{note} {grey}"), table)
    figure = accuracy_by_step({run.name: run.evaluation for run in runs})
    reading = "Whiskers are 95 % intervals. If repeating the refiner helps, the line goes on rising after step 1. "
    if not all(run.is_refiner for run in runs):
        reading += (
            "A BERT baseline is a dashed line at its final accuracy with its interval as a band: its layers are not steps. "
        )
    if any("ceiling" in run.evaluation for run in runs):
        reading += "The dotted line is the best that any model could do on these masks. "
    chains = "; ".join(
        f"{run.name}: {', '.join(per_cent(a) for a in run.evaluation['accuracy_by_step'])}" for run in runs if run.is_refiner
    )
    picture = _picture(figure, "accuracy_by_step", pictures, f"Accuracy after each step. {chains}")
    return section("Does refining again help?", tag("p", reading + grey), picture, table)


def _refining(runs: Sequence[MaskedRun]) -> Html:
    reading = (
        "One held-out text, as it was evaluated. A row is a token, a column what the head reads there after a step, the more "
        "certain the darker; under [MASK] stands the right word. Move the slider to see the text being rewritten."
    )
    grids = [grid(run.refining, run.name, only_masks=True) for run in runs if run.refining is not None]
    return section("How is a text rewritten?", tag("p", reading), tag("div", *grids, class_="side-by-side"))


def _kinds(runs: Sequence[MaskedRun], pictures: Path) -> Html:
    split = [run for run in runs if "by_kind" in run.evaluation]
    figure = accuracy_by_kind({run.name: run.evaluation for run in runs})
    reading = "Full bars are the accuracy at the end, black lines the best possible. "
    if any(run.is_refiner for run in split):
        reading += (
            "Pale bars are the accuracy after step 1: where they already reach the line, further steps have nothing to add. "
        )
    picture = _picture(figure, "accuracy_by_kind", pictures, "Accuracy by kind of word, as in the table below")
    heading = "Which words need the further steps?" if any(run.is_refiner for run in split) else "Which words are hard?"
    corpora = dict.fromkeys(run.evaluation["source"] for run in split)
    return section(heading, tag("p", reading), picture, kinds_tables(split), *map(corpus_note, corpora))


def _other_sets(runs: Sequence[MaskedRun]) -> Html:
    note = "The same checkpoints on further text, masked by the same rule. Of a BERT baseline only the last layer is shown."
    return section("And on other text?", tag("p", note), sets_table(runs))


def _training(runs: Sequence[MaskedRun], pictures: Path) -> Html:
    ceilings = {run.evaluation.get("ceiling") for run in runs}
    figure = training_curves({run.name: run.metrics for run in runs}, ceilings.pop() if len(ceilings) == 1 else None)
    reading = (
        "The loss is that of the last step alone, which all models have; pale lines are single updates, full ones their "
        "running mean. If accuracy is still rising at the right, more training would probably have helped."
    )
    picture = _picture(figure, "training_curves", pictures, "Training loss and held-out accuracy against updates")
    return section("How did training go?", tag("p", reading), picture)


def _cost(runs: Sequence[MaskedRun], pictures: Path) -> Html:
    figure = speed({run.name: run.evaluation for run in runs}, {run.name: run.metrics for run in runs})
    reading = (
        "Speed is the median over the logged stretches of training. It compares models only if all ran on the same machine "
        "with nothing else to do."
    )
    picture = _picture(figure, "speed", pictures, "Parameters and training speed, as in the table at the top")
    return section("What did it cost?", tag("p", reading), picture)


def _inside(run: Run[Any], pictures: Path, *, alone: bool) -> Html | None:
    """What was analysed of this run. Beside other runs its pictures carry its name."""
    before = "" if alone else f"{run.name.replace('/', '_')}_"

    def draw(figure: Figure, name: str, description: str) -> Html:
        return _picture(figure, before + name, pictures, description)

    return analysis_section(run, draw)


def _small_print(runs: Sequence[MaskedRun]) -> Html:
    probabilities = ", ".join(sorted({per_cent(run.evaluation["mask_probability"], 0) for run in runs}))
    seeds = ", ".join(sorted({str(run.evaluation["mask_seed"]) for run in runs}))
    notes = [
        f"Masks: a hash of a token's sequence, its position and the mask seed ({seeds}) decides whether it is masked, with "
        f"probability {probabilities}. So every model is asked for the same tokens of the same text. In evaluation all of them "
        "become [MASK], however the model was trained.",
        "Intervals are 95 % and taken over sequences. They cover the choice of text and masks, not the luck of a training run: "
        f"{'this is one seed' if len(runs) == 1 else 'each run is one seed'}.",
        "The checkpoint is the one with the lowest loss on this held-out text, which favours every run a little.",
    ]
    if len(runs) > 1:
        notes.append(
            pairing_note(runs)
            if same_targets([run.evaluation for run in runs])
            else "The runs were evaluated on different text or masks, so no differences between them are given."
        )
    notes += _depth_notes(runs)
    if any("ceiling" in run.evaluation for run in runs):
        notes.append(
            "The best possible accuracy is what an ideal guesser would reach on average over the same masks. A model can come "
            "out slightly above it by luck."
        )
    return section("Small print", tag("ul", *(tag("li", note) for note in notes)))


def _depth_notes(runs: Sequence[MaskedRun]) -> list[str]:
    """For every pair of a baseline and a PNN, what is equal between them and what is not."""
    notes = []
    for baseline in (run for run in runs if not run.is_refiner):
        for refiner in (run for run in runs if run.is_refiner):
            layers, steps = baseline.evaluation["num_steps"], refiner.evaluation["num_steps"]
            size, other = baseline.evaluation["parameters"], refiner.evaluation["parameters"]
            depth = f"as many layers as {refiner.name} has steps ({steps})"
            if layers != steps:
                depth = f"{layers} layers where {refiner.name} has {steps} steps"
            notes.append(
                f"{baseline.name} has {depth}, and {count(size)} parameters against {count(other)}: the comparison is "
                f"{'equal' if layers == steps else 'unequal'} in depth and {'equal' if size == other else 'unequal'} in size."
            )
    return notes
