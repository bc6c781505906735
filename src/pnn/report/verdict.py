"""What came out, in words that follow from the numbers. No sentence here is fixed: each has an opposite that it can become.

A difference is called one only if its 95 % interval leaves out zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pnn.figures.numbers import INTERVAL, bare_per_cent, count, per_cent, per_cent_interval, points, points_interval
from pnn.figures.results import Json, same_targets
from pnn.report.loading import Run
from pnn.report.markup import Html, html, join, tag
from pnn.report.settings import recipe_differences

NUMBER_WORDS = {2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six"}


def title(runs: Sequence[Run]) -> str:
    sources = {run.evaluation["source"] for run in runs}
    on = f" on {text_name(sources.pop())}" if len(sources) == 1 else ""
    if len(runs) == 1:
        return runs[0].name + on
    if len(runs) == 2:
        return f"{runs[0].name} and {runs[1].name}{on}"
    return f"{len(runs)} runs{on}"


def text_name(source: str) -> str:
    return "the embedded corpus" if source == "synthetic" else source


def summary(runs: Sequence[Run]) -> Html:
    """One paragraph: what was compared, how each run did, whether refining again helped, and who is ahead."""
    sentences = [_setting(runs), *map(_score, runs)]
    sentences += [_gain(run) for run in runs if run.is_refiner and run.evaluation["num_steps"] > 1]
    if len(runs) > 1:
        sentences += _comparison(runs)
    return tag("p", join(sentences, " "), class_="lead")


def _setting(runs: Sequence[Run]) -> Html:
    first = runs[0].evaluation
    judged = f"{count(first['targets'])} masked tokens of {count(first['sequences'])} held-out sequences"
    texts = {run.config.data.train for run in runs}
    on = f" on {text_name(texts.pop())}" if len(texts) == 1 else ""
    if len(runs) == 1:
        return html(f"One model was trained{on} for {count(runs[0].updates)} updates and judged on {judged}.")
    different = recipe_differences(runs)
    recipe = f"with recipes that differ in {and_list(different)}" if different else "with the same recipe"
    trained = f"{NUMBER_WORDS.get(len(runs), count(len(runs)))} models were trained{on} {recipe}"
    if same_targets([run.evaluation for run in runs]):
        return html(f"{trained} and judged on the same {judged}.")
    return html(f"{trained} and judged on different text or masks: their accuracies do not compare.")


def _score(run: Run) -> Html:
    measured = run.evaluation
    described = f" ({run.describe()}, {count(measured['parameters'])} parameters) predicts "
    score = f" of them right, {INTERVAL} {per_cent_interval(measured['accuracy_interval']).replace('–', ' to ')}"
    return join([_bold(run.name), described, _bold(per_cent(measured["accuracy"])), score, _below_ceiling(measured), "."])


def _below_ceiling(measured: Json) -> str:
    if "ceiling" not in measured:
        return ""
    best = f"the best possible, {per_cent(measured['ceiling'])}"
    low, high = measured["accuracy_interval"]
    if low <= measured["ceiling"] <= high:
        return f"; {best}, lies within that interval"
    gap = measured["ceiling"] - measured["accuracy"]
    return f"; {points(abs(gap))} {'below' if gap > 0 else 'above'} {best}"


def _gain(run: Run) -> Html:
    """Whether the last step beats the first: the paper's claim for refining again and again."""
    measured = run.evaluation
    gain, interval = measured["gain_over_first_step"]["value"], measured["gain_over_first_step"]["interval"]
    steps = measured["num_steps"]
    if interval[0] > 0:
        said = f"the further steps help: after step {steps} it is right {points(gain)} more often than after step 1"
        return join(["In ", _bold(run.name), f" {said} ({INTERVAL} {points_interval(interval)}){_where(measured, gain)}."])
    if interval[1] < 0:
        said = f"the further steps do harm: after step {steps} it is right {points(-gain)} less often than after step 1"
        return join(["In ", _bold(run.name), f" {said} ({INTERVAL} of the change {points_interval(interval)})."])
    said = f"the further steps show no gain: {points(gain)} from step 1 to step {steps}, and the {INTERVAL}"
    return join(["In ", _bold(run.name), f" {said}, {points_interval(interval)}, includes zero."])


def _where(measured: Json, gain: float) -> str:
    """The kind of word that more than half of the gain comes from, if there is one."""
    for kind, part in measured.get("by_kind", {}).items():
        first, last = part["accuracy_by_step"][1], part["accuracy_by_step"][-1]
        if part["share"] * (last - first) > gain / 2:
            return f", mostly on {kind} words ({bare_per_cent(first)} to {per_cent(last)})"
    return ""


def _comparison(runs: Sequence[Run]) -> list[Html]:
    """Every run against the most accurate one."""
    if not same_targets([run.evaluation for run in runs]):
        return []
    best = max(runs, key=lambda run: float(run.evaluation["accuracy"]))
    sentences = [_against(best, run) for run in runs if run is not best]
    return [*sentences, join(["Each run is one seed; what holds for these runs need not hold for the architectures."])]


def _against(best: Run, other: Run) -> Html:
    gap, interval = difference(best.evaluation, other.evaluation)
    size = _size_ratio(best.evaluation["parameters"], other.evaluation["parameters"])
    if interval[0] > 0:
        ahead = f" is {points(gap)} ahead of "
        return join([_bold(best.name), ahead, _bold(other.name), f" ({INTERVAL} {points_interval(interval)}), with {size}."])
    apart = f" cannot be told apart on these masks: {points(gap)} between them, {INTERVAL} {points_interval(interval)}"
    return join([_bold(best.name), " and ", _bold(other.name), f"{apart}; the former has {size}."])


def difference(one: Json, other: Json) -> tuple[float, tuple[float, float]]:
    """How much more accurate `one` is, and the 95 % interval if the two are taken as independent. Both saw the same masks, so
    the true interval is narrower: this errs on the side of caution."""
    gap = one["accuracy"] - other["accuracy"]
    half = math.hypot(*((r["accuracy_interval"][1] - r["accuracy_interval"][0]) / 2 for r in (one, other)))
    return gap, (gap - half, gap + half)


def _size_ratio(parameters: int, others: int) -> str:
    ratio = parameters / others
    if f"{ratio:.2f}" == "1.00":
        return "as many parameters"
    return f"{ratio:.1f} times the parameters" if ratio >= 1.05 else f"{per_cent(ratio, 0)} of the parameters"


def _bold(text: str) -> Html:
    return tag("b", text)


def and_list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
