"""The page about decoders: how well each predicts held-out text, how training went, tasks, and what its gates do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from matplotlib.figure import Figure

from pnn.differences import verdict
from pnn.figures.decoders import decoder_curves
from pnn.numbers import INTERVAL, count, interval, per_cent
from pnn.report.loading import DecoderRun
from pnn.report.markup import Html, html, join, section, tag
from pnn.report.markup import table as html_table
from pnn.report.settings import recipe_differences
from pnn.report.verdict import (
    NUMBER_WORDS,
    above,
    always_guessing,
    and_list,
    at_once,
    lead,
    pairing_note,
    text_name,
    unknown,
    unknown_beside,
)
from pnn.results import CausalText, same_targets
from pnn.stats import Estimate, differs

Draw = Callable[[Figure, str, str], Html]


def summary(runs: Sequence[DecoderRun]) -> Html:
    """What was trained, how each does, and whether the best is ahead."""
    first = runs[0].evaluation
    judged = f"{count(first['targets'])} tokens of {count(first['sequences'])} held-out rows of {count(first['context'])}"
    texts = {run.config.data.train for run in runs}
    on = f" on {text_name(texts.pop())}" if len(texts) == 1 else ""
    if len(runs) == 1:
        start = f"One decoder was trained{on} for {count(runs[0].updates)} updates and judged on {judged}."
    else:
        different = recipe_differences(runs)
        recipe = f"with recipes that differ in {and_list(different)}" if different else "with the same recipe"
        start = f"{NUMBER_WORDS.get(len(runs), count(len(runs)))} decoders were trained{on} {recipe} and judged on {judged}."
    return lead(html(start), [[_score(run), *unknown(run)] for run in runs], _comparison(runs) if len(runs) > 1 else [])


def _score(run: DecoderRun) -> Html:
    one = run.evaluation
    size = f" ({count(one['parameters'])} parameters) has a loss of "
    between = f"{INTERVAL} {interval(one['loss_interval'], 3, scale=1)}"
    rest = f" nats per token, {between}: a perplexity of {one['perplexity']:.2f}. It gets {per_cent(one['accuracy'])} right"
    guess = one.get("commonest")
    rest += "." if guess is None else f"; {always_guessing(guess)}."
    return join([tag("b", run.name), size, tag("b", f"{one['loss']:.3f}"), rest])


def _comparison(runs: Sequence[DecoderRun]) -> list[Html]:
    """Every run against the best."""
    if not same_targets([run.evaluation for run in runs]):
        return [html("They were judged on different text or windows: their losses do not compare.")]
    best = min(runs, key=lambda run: float(run.evaluation["loss"]))
    others, said = [run for run in runs if run is not best], []
    gaps = above(best, others, "loss", lambda e: Estimate(e["loss"], *e["loss_interval"]))
    for run, gap in zip(others, gaps, strict=True):
        between = f" ({INTERVAL} {interval((-gap)[1:], 4, scale=1)}: {verdict(gap)})"
        rest = "." if differs(gap) else ", which the choice of text alone can make."
        said.append(join([tag("b", best.name), f" is {-gap.value:.4f} nats below ", tag("b", run.name), between, rest]))
    return [*said, *at_once(runs), html("Each run is one seed; what holds for these runs need not hold for the architectures.")]


def results_table(runs: Sequence[DecoderRun]) -> Html:
    columns: dict[str, list[object]] = {
        "parameters": [count(run.evaluation["parameters"]) for run in runs],
        "loss": [tag("b", f"{run.evaluation['loss']:.4f}") for run in runs],
        "perplexity by token": [f"{run.evaluation['perplexity']:,.2f}" for run in runs],
        "by word": [_if_measured(run.evaluation, "word_perplexity", 1) for run in runs],
        "bits per byte": [_if_measured(run.evaluation, "bits_per_byte", 3) for run in runs],
        "next token right": [per_cent(run.evaluation["accuracy"]) for run in runs],
        "updates": [count(run.updates) for run in runs],
        "training tokens/s": [count(run.tokens_per_second) if run.tokens_per_second else "" for run in runs],
    }
    rows = [
        [join([run.name, tag("small", run.describe())]), *(cells[index] for cells in columns.values())]
        for index, run in enumerate(runs)
    ]
    return html_table(["run", *columns], rows)


def _if_measured(one: CausalText, key: Literal["word_perplexity", "bits_per_byte"], digits: int) -> str:
    """Nothing where the text has too many unknown tokens."""
    return f"{one[key]:,.{digits}f}" if key in one else ""


def sections(runs: Sequence[DecoderRun], draw: Draw) -> list[Html]:
    found = [_training(runs, draw)]
    if any(run.evaluation.get("sets") for run in runs):
        found.append(_other_sets(runs))
    if any(run.evaluation.get("tasks") for run in runs):
        found.append(_tasks(runs))
    return found


def _training(runs: Sequence[DecoderRun], draw: Draw) -> Html:
    figure = decoder_curves({run.name: run.metrics for run in runs})
    reading = (
        "Pale lines are single updates, full ones their running mean. A curve that is still falling at the right would "
        "probably have gained from more training."
    )
    picture = draw(figure, "training_curves", "Training and held-out loss against updates")
    return section("How did training go?", tag("p", reading), picture)


def _other_sets(runs: Sequence[DecoderRun]) -> Html:
    rows = [
        [
            join([name, tag("small", text_name(one["source"]) + unknown_beside(one))]),
            run.name,
            f"{one['loss']:.4f}",
            f"{one['perplexity']:,.2f}",
            _if_measured(one, "word_perplexity", 1),
            _if_measured(one, "bits_per_byte", 3),
        ]
        for run in runs
        for name, one in run.evaluation.get("sets", {}).items()
    ]
    heads = ["set", "run", "loss", "perplexity by token", "by word", "bits per byte"]
    return section("And on other text?", html_table(heads, rows))


def _tasks(runs: Sequence[DecoderRun]) -> Html:
    """A row a task and number of examples, a column a run."""
    measured: dict[str, Any] = {run.name: run.evaluation["tasks"]["shots"] for run in runs if run.evaluation.get("tasks")}
    rows: list[list[object]] = []
    for shots in dict.fromkeys(shots for found in measured.values() for shots in found):
        names = dict.fromkeys(name for found in measured.values() for name in found.get(shots, {}).get("tasks", {}))
        for name in names:
            cells = [found.get(shots, {}).get("tasks", {}).get(name) for found in measured.values()]
            rows.append([f"{name}, {shots}-shot", *("" if one is None else per_cent(one["accuracy"]) for one in cells)])
        averages = [found.get(shots, {}).get("average") for found in measured.values()]
        rows.append([f"average, {shots}-shot", *("" if a is None else tag("b", per_cent(a["accuracy"])) for a in averages)])
    protocols = dict.fromkeys(found["protocol"] for run in measured.values() for found in run.values())
    notes = tag("ul", *(tag("li", protocol) for protocol in protocols))
    return section("Which questions can it answer?", html_table(["task", *measured], rows), notes)


def small_print(runs: Sequence[DecoderRun]) -> Html:
    one = runs[0].evaluation
    overlap = "do not overlap" if one["stride"] == one["context"] else f"overlap, and {one['stride']} tokens of each are scored"
    notes = [
        f"The text is documents end to end, an end-of-text token after each, in windows of {count(one['context'])} tokens that "
        f"{overlap}. Perplexity by token compares models of one tokenizer only; by word and bits per byte, any.",
        "Intervals are 95 % and taken over windows. They cover the choice of text, not the luck of a training run.",
        "The checkpoint is the one with the lowest loss on this held-out text, which favours every run a little.",
    ]
    if len(runs) > 1 and same_targets([run.evaluation for run in runs]):
        notes.append(pairing_note(runs))
    return section("Small print", tag("ul", *(tag("li", note) for note in notes)))
