"""What could be saved if tokens stopped when they are done? A bound for halting, beside fewer steps for everyone.

An oracle (`analysis.halting_bound`) lets each token halt as early as it can. Beside it, in the same FLOPs (`models.flops`):

* the dial: the same number of steps for every token, 1 … T. This is what halting has to beat;
* two dials: so many steps for masked tokens, fewer for all others. It takes no criterion: a model knows what it is asked for;
* chance: every token takes as many steps as some other token under the oracle, so the budget is the same.

Three oracles differ in what they may do:

* `bound`: no masked prediction changes, and a token takes one step at least, after which a criterion can look at it;
* `from_the_start`: a token may keep its embedding;
* `right_answers`: as `bound`, but what is wrong after all steps may become wrong in another way.

Ideal speed is the share of FLOPs: what a machine would reach that computes live tokens alone and pays for nothing else.
Sequences without a masked token are left out. With several refiners in turn only the bound is told.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pnn.analysis.halting_bound import Rows, at_random, dial, halts_after, oracle
from pnn.analysis.halting_groups import FREQUENCIES, RIGHT, WRONG, Groups, Tokens, WordKinds
from pnn.analysis.subject import Subject, with_steps
from pnn.analysis.totals import Array, Totals, difference_of_ratios, finding, ratios, two_ratios
from pnn.analysis.trace import read
from pnn.evaluation.masked import embedded_corpus
from pnn.models.base import MaskedLMBase
from pnn.models.flops import halting_flops
from pnn.models.halting import can_halt
from pnn.models.registry import kind_of
from pnn.progress import Bars
from pnn.results import Finding
from pnn.stats import bootstrap
from pnn.studies.registry import Analysis

SAMPLE = 500  # sequences: the oracle reads each tens of times
ORACLES: dict[str, dict[str, Any]] = {
    "bound": {"earliest": 1},
    "from_the_start": {"earliest": 0},
    "right_answers": {"earliest": 1, "right_only": True},
}
LOSE = 0.003  # of accuracy: what the dial may lose where the bound is compared with it
FASTER = 0.15  # halting is worth its trouble from 1.15 times the dial's speed on
MARGIN = 0.1  # steps
POINT = 0.01  # of accuracy


def with_refiners(model: MaskedLMBase) -> str | None:
    return None if kind_of(model).has_steps else "the model has layers, not refinement steps, and nothing in it can halt"


def with_halting(model: MaskedLMBase) -> str | None:
    moved = "with recall or guess_after steps begin elsewhere than they ended, so no token can halt"
    return None if can_halt(model.config) else moved


def with_all_heads(model: MaskedLMBase) -> str | None:
    changed = getattr(model.config, "head_map", None) is not None
    return "heads were removed or added, so its FLOPs do not follow from its config" if changed else None


ABOUT = Analysis(
    question="What could be saved if tokens stopped when they are done?",
    picture=(
        "Accuracy against ideal speed, counted in FLOPs: the same number of steps for everyone (the dial), fewer steps for "
        "tokens that are not masked (masked/others), an oracle that lets each token halt as soon as no masked prediction "
        "depends on it any more, and as many steps as the oracle's dealt out at random. Other oracles may leave embeddings as "
        "they are, or give up what is wrong anyway. Below, after how many steps tokens halt under the first oracle."
    ),
    hypotheses={
        "bound_beats_the_dial": "knowing when to halt each token is worth more than 1.15 times the speed of the dial",
        "two_dials_beat_one": (
            "so many steps for masked tokens and fewer for all others are more than 1.15 times as fast as the dial"
        ),
        "who_halts_matters": "the same steps dealt out at random cost more than a point of accuracy",
        "rare_tokens_halt_later": "of the tokens that are not masked, rare ones halt later than frequent ones",
        "wrong_tokens_halt_later": "masked tokens that end wrong halt later than those that end right",
    },
    needs=(with_refiners, with_steps(2), with_all_heads, with_halting),
)


def run(subject: Subject) -> dict[str, Any]:
    """What analysis/halting.json holds."""
    model, steps = subject.model, subject.num_steps
    text = replace(subject.text, sequences=subject.text.sequences[:SAMPLE])
    totals, model = Totals(len(text)), model.eval()
    batches = [rows for batch in text.batches() if len((rows := Rows.of(model, batch)).sequence)]
    halted = _oracles(model, batches)
    pools = {
        name: torch.cat([taken[_at(rows, name)].cpu() for rows, taken in zip(batches, halted["bound"], strict=True)])
        for name in ("targets", "context")
    }
    halted["random"] = [at_random(rows, pools) for rows in batches]
    tokens = [_tokens(rows) for rows in batches]
    frequency = _frequencies(text.tokens, subject.text.sequences, model.config.vocab_size)
    groups = Groups.of(tokens, text.special.never_masked, frequency, _word_kinds(subject))
    pairs = [(m, k) for m in range(2, steps + 1) for k in halts_after(model, 0) if k < m - 1]
    for number, rows in enumerate(batches):
        sequence = torch.from_numpy(rows.sequence)
        totals.add("targets", sequence, rows.targets.sum(1).cpu())
        totals.add("tokens", sequence, rows.keep.sum(1).cpu())
        for step in range(1, steps + 1):
            _add_condition(totals, f"dial {step}", rows, dial(rows, step))
        for masked, others in pairs:
            _add_condition(totals, f"dials {masked} {others}", rows, dial(rows, masked, others))
        for name, found in halted.items():
            _add_condition(totals, name, rows, found[number])
        groups.add(totals, tokens[number], {name: halted[name][number].cpu() for name in ("bound", "random")}, steps)
    by_step = [{"steps": step, **_described(totals, f"dial {step}", steps)} for step in range(1, steps + 1)]
    two = [{"masked": m, "others": k, **_described(totals, f"dials {m} {k}", steps)} for m, k in pairs]
    result: dict[str, Any] = {
        "num_steps": steps,
        "num_refiners": model.config.num_refiners,
        "halts_after": halts_after(model, 1),
        "sampled": int((totals.of("targets") > 0).sum()),
        "targets": int(totals.of("targets").sum()),
        "tokens": int(totals.of("tokens").sum()),
        "flops_per_token": float(totals.of(f"dial {steps} flops").sum() / totals.of("tokens").sum()),
        "dial": by_step,
        "two_dials": two,
        "oracles": {name: _described(totals, name, steps) for name in ORACLES},
    }
    fewest = f"dial {_fastest(by_step)['steps']}"
    result["findings"] = {"bound_beats_the_dial": _beats_the_dial(totals, "bound_beats_the_dial", "bound", fewest)}
    if two and (fastest := _fastest(two)) is not None:
        name = f"dials {fastest['masked']} {fastest['others']}"
        result["findings"]["two_dials_beat_one"] = _beats_the_dial(totals, "two_dials_beat_one", name, fewest)
    if model.config.num_refiners == 1:
        result |= {"random": _described(totals, "random", steps), **_who_halts(totals, groups)}
        result["findings"] |= _findings(totals)
    return result


def _oracles(model: MaskedLMBase, batches: list[Rows]) -> dict[str, list[Tensor]]:
    """What each of them finds. They take nearly all of the time, so they show how far they are: in decisions, one for each
    token wherever it may halt."""
    tokens = sum(int(rows.keep.sum()) for rows in batches)
    decisions = {name: tokens * len(halts_after(model, how["earliest"])) for name, how in ORACLES.items()}
    with Bars(decisions) as bars:

        def find(name: str) -> list[Tensor]:
            done = 0

            def decided(more: int) -> None:
                nonlocal done
                done += more
                bars.update(name, done)

            return [oracle(rows, **ORACLES[name], decided=decided) for rows in batches]

        return {name: find(name) for name in ORACLES}


# Conditions: how far each comes, and what it costs ---------------------------------------------------------------------


def _add_condition(totals: Totals, name: str, rows: Rows, taken: Tensor) -> None:
    """Right predictions and FLOPs of each sequence."""
    h = rows.states(taken)[-1]
    right = rows.predictions(h) == rows.labels
    totals.add(f"{name} correct", torch.from_numpy(rows.sequence)[rows.row_of_target.cpu()], right.cpu())
    config: Any = rows.model.config
    each = zip(taken.cpu().numpy(), rows.keep.cpu().numpy(), rows.targets.sum(1).tolist(), strict=True)
    flops = [halting_flops(config, row[keep], targets) for row, keep, targets in each]
    totals.add(f"{name} flops", torch.from_numpy(rows.sequence), torch.tensor(flops, dtype=torch.float64))


def _described(totals: Totals, name: str, steps: int) -> dict[str, Any]:
    """Accuracy, what is lost of it, and FLOPs as a share of all steps'."""
    columns = (f"{name} correct", f"dial {steps} correct", "targets", f"{name} flops", f"dial {steps} flops")
    sums = np.concatenate([totals.of(column) for column in columns], 1)
    return {
        "accuracy": ratios(totals, f"{name} correct", "targets", shares=True)[0],
        "points_lost": bootstrap(sums, lambda s: (s[..., 1] - s[..., 0]) / s[..., 2]).as_json(),
        "flops_share": bootstrap(sums, lambda s: s[..., 3] / s[..., 4]).as_json(),
        "ideal_speedup": bootstrap(sums, lambda s: s[..., 4] / s[..., 3]).as_json(),
    }


def _fastest(rows: list[dict[str, Any]]) -> Any:
    """Of those that lose little enough here; None if all lose more."""
    good = [row for row in rows if row["points_lost"]["value"] <= LOSE]
    return min(good, key=lambda row: row["flops_share"]["value"], default=None)


def _beats_the_dial(totals: Totals, hypothesis: str, name: str, fewest: str) -> Finding:
    words = {"bound": "the bound", "dial": "{} steps for everyone", "dials": "{} steps for masked tokens and {} for others"}
    fast, slow = (words[kind].format(*numbers) for kind, *numbers in (name.split(), fewest.split()))
    return finding(
        ABOUT.hypotheses[hypothesis],
        f"ideal speed of {fast} over that of {slow}, less one; what may lose accuracy is the fastest that loses at most "
        f"{100 * LOSE:g} points here",
        np.concatenate((totals.of(f"{fewest} flops"), totals.of(f"{name} flops")), 1),
        lambda sums: sums[..., 0] / sums[..., 1] - 1,
        margin=FASTER,
    )


# Tokens: which stop when -----------------------------------------------------------------------------------------------


def _at(rows: Rows, name: str) -> Tensor:
    return rows.targets if name == "targets" else rows.keep & ~rows.targets


def _tokens(rows: Rows) -> Tokens:
    found = read(rows.model, rows.states(rows.all_steps)[-1][rows.targets], rows.labels)
    sequence = torch.from_numpy(rows.sequence)[:, None].expand(rows.keep.shape)
    words, keep, targets, correct, loss = (x.cpu() for x in (rows.words, rows.keep, rows.targets, found.correct, found.loss))
    return Tokens(words, keep, targets, sequence, correct, loss)


def _frequencies(tokens: Any, sequences: Any, vocabulary: int) -> Tensor:
    """How often each token stands in the held-out text."""
    return torch.from_numpy(np.bincount(tokens.take(sequences), minlength=vocabulary))


def _word_kinds(subject: Subject) -> WordKinds | None:
    if (corpus := embedded_corpus(subject.text.tokens.manifest)) is not None:
        return WordKinds.of_corpus(corpus)
    if subject.tokenizer is not None:
        return WordKinds.of_tokenizer(subject.tokenizer, subject.model.config.vocab_size)
    return None


def _who_halts(totals: Totals, groups: Groups) -> dict[str, Any]:
    found, chance = (groups.told(totals, who) for who in ("bound", "random"))
    for group, rows in found.items():
        for label, row in rows.items():
            row["steps_at_random"] = chance[group][label]["steps"]
    return found


def _findings(totals: Totals) -> dict[str, Finding]:
    def later(name: str, group: str, one: int, other: int, measure: str) -> Finding:
        columns = [two_ratios(totals, f"{group} {who}", f"{group} tokens", one, other) for who in ("bound", "random")]
        return finding(
            ABOUT.hypotheses[name],
            measure,
            np.concatenate(columns, 1),
            lambda sums: difference_of_ratios(sums[..., :4]),
            margin=MARGIN,
            control="as many steps dealt out at random",
            control_statistic=lambda sums: difference_of_ratios(sums[..., 4:]),
        )

    def cost(sums: Array) -> Array:
        lost: Array = (sums[..., 0] - sums[..., 1]) / sums[..., 2]
        return lost

    return {
        "who_halts_matters": finding(
            ABOUT.hypotheses["who_halts_matters"],
            "accuracy under the bound − accuracy with its steps dealt out at random",
            np.concatenate([totals.of(name) for name in ("bound correct", "random correct", "targets")], 1),
            cost,
            margin=POINT,
        ),
        "rare_tokens_halt_later": later(
            "rare_tokens_halt_later",
            "frequency",
            0,
            len(FREQUENCIES) - 1,
            "mean steps of the rarest quarter − those of the most frequent quarter, of tokens that are not masked",
        ),
        "wrong_tokens_halt_later": later(
            "wrong_tokens_halt_later",
            "outcome",
            WRONG,
            RIGHT,
            "mean steps of masked tokens that end wrong − those of masked tokens that end right",
        ),
    }
