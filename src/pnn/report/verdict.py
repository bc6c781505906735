"""What came out, in words that follow from the numbers. No sentence here is fixed: each has an opposite that it can become.

A difference is called one only if its 95 % interval leaves out zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pnn import differences
from pnn.differences import digits_of, paired
from pnn.numbers import (
    INTERVAL,
    NOTED_UNKNOWN,
    bare_per_cent,
    count,
    interval,
    per_cent,
    per_cent_interval,
    points,
    roughly,
    unknown_tokens,
)
from pnn.report.loading import E, MaskedRun, Run
from pnn.report.markup import Html, html, join, tag
from pnn.report.settings import recipe_differences
from pnn.results import Commonest, MaskedText, Text, same_targets
from pnn.stats import SUPPORTED, Estimate, independent_difference, verdict

NUMBER_WORDS = {2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six"}


def title(runs: Sequence[Run[Any]]) -> str:
    sources = {run.evaluation["source"] for run in runs}
    on = f" on {text_name(sources.pop())}" if len(sources) == 1 else ""
    if len(runs) == 1:
        return runs[0].name + on
    if len(runs) == 2:
        return f"{runs[0].name} and {runs[1].name}{on}"
    return f"{len(runs)} runs{on}"


def text_name(source: str) -> str:
    return {"synthetic": "the embedded corpus", "synthetic_hard": "the harder embedded corpus"}.get(source, source)


def summary(runs: Sequence[MaskedRun]) -> Html:
    """What was compared, how each run did, whether refining again helped, and who is ahead."""
    refined = [run.is_refiner and run.evaluation["num_steps"] > 1 for run in runs]
    told = [[_score(run), *([_gain(run)] if again else []), *unknown(run)] for run, again in zip(runs, refined, strict=True)]
    return lead(_setting(runs), told, _comparison(runs) if len(runs) > 1 else [])


def lead(setting: Html, runs: Sequence[Sequence[Html]], comparison: Sequence[Html]) -> Html:
    """What a report begins with. Several runs are a list, which is easier to read than one long paragraph."""
    if len(runs) == 1:
        return tag("p", join([setting, *runs[0]], " "), class_="lead")
    each = tag("ul", *(tag("li", join(sentences, " ")) for sentences in runs))
    ahead = [tag("p", join(comparison, " "))] if comparison else []
    return tag("div", tag("p", setting), each, *ahead, class_="lead")


def _setting(runs: Sequence[MaskedRun]) -> Html:
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


def _score(run: MaskedRun) -> Html:
    measured = run.evaluation
    described = f" ({run.describe()}, {count(measured['parameters'])} parameters) predicts "
    score = f" of them right, {INTERVAL} {per_cent_interval(measured['accuracy_interval'])}"
    return join([_bold(run.name), described, _bold(per_cent(measured["accuracy"])), score, _beside(measured), "."])


def unknown(run: Run[Any]) -> list[Html]:
    """Where its vocabulary cannot express the text that it was judged on."""
    said = unknown_tokens(run.evaluation.get("unknown_tokens", 0.0), text_name(run.evaluation["source"]))
    return [] if said is None else [html(f"But {said}.")]


def unknown_beside(one: Text) -> str:
    """The same in a table, behind a text's name."""
    share = one.get("unknown_tokens", 0.0)
    return f", {roughly(share)} of the tokens [UNK]" if share > NOTED_UNKNOWN else ""


def _beside(measured: MaskedText) -> str:
    """How far it is from the best possible; where nobody knows that, what always guessing one word would score."""
    if "ceiling" not in measured:
        guess = measured.get("commonest")
        return "" if guess is None else f"; {always_guessing(guess)}"
    best = f"the best possible, {per_cent(measured['ceiling'])}"
    low, high = measured["accuracy_interval"]
    if low <= measured["ceiling"] <= high:
        return f"; {best}, lies within that interval"
    gap = measured["ceiling"] - measured["accuracy"]
    return f"; {points(abs(gap))} {'below' if gap > 0 else 'above'} {best}"


def always_guessing(guess: Commonest) -> str:
    return f"always guessing the commonest token, “{guess['token']}”, would score {per_cent(guess['accuracy'])}"


def _gain(run: MaskedRun) -> Html:
    """Whether the last step beats the first: the paper's claim for refining again and again."""
    if not run.trained_to_be_read(1):
        return html("Its first step was not trained to be read: what further steps add is not known.")
    measured, gain = run.evaluation, Estimate.from_json(run.evaluation["gain_over_first_step"])
    steps, between = measured["num_steps"], interval(gain[1:])
    if verdict(gain) == SUPPORTED:
        said = f"help: after step {steps} it is right {points(gain.value)} more often than after step 1 ({INTERVAL} {between})"
        return html(f"Its further steps {said}{_where(measured, gain.value)}.")
    if verdict(-gain) == SUPPORTED:
        said = f"do harm: after step {steps} it is right {points(-gain.value)} less often than after step 1"
        return html(f"Its further steps {said} ({INTERVAL} of the change {between}).")
    said = f"show no gain: {points(gain.value)} from step 1 to step {steps}, and the {INTERVAL}, {between}, includes zero"
    return html(f"Its further steps {said}.")


def _where(measured: MaskedText, gain: float) -> str:
    """The kind of word that more than half of the gain comes from, if there is one."""
    for kind, part in measured.get("by_kind", {}).items():
        first, last = part["accuracy_by_step"][1], part["accuracy_by_step"][-1]
        if part["share"] * (last - first) > gain / 2:
            return f", mostly on {kind} words ({bare_per_cent(first)} to {per_cent(last)})"
    return ""


def _comparison(runs: Sequence[MaskedRun]) -> list[Html]:
    """Every run against the most accurate one."""
    if not same_targets([run.evaluation for run in runs]):
        return []
    best = max(runs, key=lambda run: float(run.evaluation["accuracy"]))
    others = [run for run in runs if run is not best]
    gaps = above(best, others, "correct", lambda e: Estimate(e["accuracy"], *e["accuracy_interval"]))
    sentences = [_against(best, run, gap) for run, gap in zip(others, gaps, strict=True)]
    return [
        *sentences,
        *at_once(runs),
        html("Each run is one seed; what holds for these runs need not hold for the architectures."),
    ]


def above(
    best: Run[E], others: Sequence[Run[E]], measure: Literal["correct", "loss"], alone: Callable[[E], Estimate]
) -> list[Estimate]:
    """How much `best` is above each of the others: what `pnn compare` says, where every run has its totals by sequence.
    Otherwise from what each has by itself (`alone`), as if they were independent."""
    totals = [one for one in (best.by_sequence, *(run.by_sequence for run in others)) if one is not None]
    if len(totals) == 1 + len(others):
        return paired(totals, [(place, 0) for place in range(1, len(totals))], measure)
    return [independent_difference(alone(best.evaluation), alone(run.evaluation)) for run in others]


def at_once(runs: Sequence[Run[Any]]) -> list[Html]:
    """Why the intervals of several differences are wider than those of the same runs two at a time."""
    if len(runs) < 3 or any(run.by_sequence is None for run in runs):
        return []
    wider = "so each is wider than where only two runs are compared"
    return [html(f"These {len(runs) - 1} intervals are right together in 95 % of cases, {wider}.")]


def pairing_note(runs: Sequence[Run[Any]]) -> str:
    """How intervals of differences came about, and what to type for better ones."""
    without = [run.name for run in runs if run.by_sequence is None]
    if not without:
        return (
            "Intervals of differences between runs are paired: all runs were asked for the same tokens, and what is hard for "
            "every run cancels, as in pnn compare. Several of them are right together in 95 % of cases."
        )
    return (
        "Intervals of differences between runs treat them as independent, which as a rule makes them too wide: "
        f"{and_list(without)} kept no totals by sequence. `pnn evaluate RUN` makes them."
    )


def _against(best: MaskedRun, other: MaskedRun, gap: Estimate) -> Html:
    size = _size_ratio(best.evaluation["parameters"], other.evaluation["parameters"])
    digits = digits_of(gap)
    between = f"{INTERVAL} {interval(gap[1:], digits)}: {differences.verdict(gap)}"
    if verdict(gap) == SUPPORTED:
        ahead = f" is {points(gap.value, digits)} ahead of "
        return join([_bold(best.name), ahead, _bold(other.name), f" ({between}), with {size}."])
    apart = f" cannot be told apart on these masks: {points(gap.value, digits)} between them, {between}"
    return join([_bold(best.name), " and ", _bold(other.name), f"{apart}; the former has {size}."])


def _size_ratio(parameters: int, others: int) -> str:
    ratio = parameters / others
    if f"{ratio:.2f}" == "1.00":
        return "as many parameters"
    return f"{ratio:.1f} times the parameters" if ratio >= 1.05 else f"{per_cent(ratio, 0)} of the parameters"


def _bold(text: str) -> Html:
    return tag("b", text)


def and_list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
