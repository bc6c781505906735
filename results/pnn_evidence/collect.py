"""From analysed runs to measured/, result.json and the tables of README.md.

python results/pnn_evidence/collect.py [RUN…]   # run folders to copy in first; without them, what is in measured/
"""

from __future__ import annotations

import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from pnn.errors import UserError
from pnn.figures.studies import figure_of
from pnn.figures.style import png, save
from pnn.files import write_between, write_json, write_text
from pnn.numbers import estimate
from pnn.results import EstimateJson
from pnn.runs import check_commit, read_json
from pnn.stats import Estimate, verdict
from pnn.studies.analyses import convergence, gates
from pnn.studies.registry import experiments

HERE = Path(__file__).parent
MEASURED = HERE / "measured"
ANALYSES = ("convergence", "gates", "optimisation")
NAMES = {"published": "PNN as the published code has it", "equations": "PNN, the paper's equations"}
CONTROLLED, SELECTIVE = "hard_tokens_settle_later_at_equal_frequency", "gates_become_more_selective"
EARLIER = "from the means of an earlier analysis, with intervals as wide as theirs together"
PAPER = {  # read off the paper's figures 2 and 3
    "shares of easy, medium and hard tokens (%)": "4.9, 44.4, 50.7",
    "their mean convergence step": "1.53, 2.29, 2.60",
    "mean gate after steps 1 to 4": "0.61, 0.54, 0.51, 0.60",
    "share of gates above one half (%)": "77.4, 57.5, 52.8, 66.6",
    "spread of gates within a token": "not given (over all gates: 0.155, 0.141, 0.116, 0.229)",
}
# What the paper and its README say, and the finding that speaks to it: (file, name in it)
CLAIMS = {
    "Tokens converge at different rates: easy ones first": ("convergence", "hard_tokens_converge_later"),
    "… and settle on their final prediction first": ("convergence", "hard_tokens_settle_later"),
    "… also among tokens that step 0 gets wrong": ("convergence", CONTROLLED),
    "Gates become increasingly selective": ("gates", SELECTIVE),
    "Refinement is learned optimisation: the loss falls at every step": ("optimisation", "loss_falls_at_every_step"),
    "… updates follow the gradient": ("optimisation", "updates_point_downhill"),
    "… and more steps than trained go on helping": ("optimisation", "more_steps_than_trained_help"),
    "A step is a cycle that settles (MEG)": ("evidence", "meg"),
    "Attention, gate and FFN each have a causal role (optogenetics)": ("evidence", "optogenetics"),
    "Early exploration, middle selectivity, late integration": ("evidence", "modeling"),
    "Dimensions are accumulators, selectors, oscillators": ("evidence", "dimensionwise"),
    "Hard tokens need more processing": ("evidence", "difficulty"),
    "The parts differ in importance": ("evidence", "layer_importance"),
    "The gate does real feature selection": ("evidence", "gate_specificity"),
    "Activity accumulates over steps": ("evidence", "layerwise_activity"),
    "Hard tokens interfere with their neighbours": ("evidence", "cross_token"),
    "Easy tokens have decided gates (gate entropy)": ("evidence", "gate_entropy"),
}


def copy_in(run: Path) -> None:
    check_commit(run)
    folder = MEASURED / run.name
    pictures = [*ANALYSES, *(experiment.figure for experiment in experiments().values())]
    paths = [*(Path("analysis") / f"{name}.json" for name in ANALYSES), Path("experimental_results.json")]
    needed = [*paths, *(Path("figures") / f"{name}.png" for name in pictures)]
    if missing := [path for path in needed if not (run / path).exists()]:
        raise UserError(f"{run} lacks {missing[0]}: what is in {folder} stays")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "analysis").mkdir(parents=True)
    source = read_json(run / "analysis" / "convergence.json")["source"]
    for path in paths:  # with DATA for where the text lay
        text = (run / path).read_text(encoding="utf-8").replace(source, f"DATA/wikitext-103/{Path(source).name}")
        write_text(folder / path, text)
    (folder / "figures").mkdir()
    for name in pictures:
        shutil.copy(run / "figures" / f"{name}.png", folder / "figures")


def analysed(run: str, file: str) -> dict[str, Any]:
    """An analysis as it was measured. Runs that were analysed before two of the findings were asked for have the means that
    these are made of."""
    result: dict[str, Any] = read_json(MEASURED / run / "analysis" / f"{file}.json")
    found = result["findings"]
    if file == "gates" and SELECTIVE not in found:
        rises = [
            less(after, before) for before, after in pairwise(map(Estimate.from_json, result["spread_within_token_by_step"]))
        ]
        smallest = Estimate(*(min(ends) for ends in zip(*rises, strict=True)))
        measure = "smallest rise of the spread of gates within a token from one step to the next"
        result["findings"] = {SELECTIVE: earlier(gates.ABOUT.hypotheses[SELECTIVE], measure, smallest, gates.MARGIN)}
    if file == "convergence" and CONTROLLED not in found:
        hypothesis = "of the tokens that step 0 gets wrong, those that end wrong (hard) settle later than those that end right"
        measure = "mean settled step of hard targets − that of medium ones, how frequent the answers are not controlled for"
        effect, control = (hard_less_medium(one) for one in (result, result["controls"]["shuffled"]))
        found[CONTROLLED] = earlier(hypothesis, measure, effect, convergence.MARGIN, control)
    return result


def hard_less_medium(described: dict[str, Any]) -> Estimate:
    hard, medium = (Estimate.from_json(described["classes"][name]["settled_step"]) for name in ("hard", "medium"))
    return less(hard, medium)


def less(one: Estimate, other: Estimate) -> Estimate:
    """The difference, within an interval as wide as both together."""
    return Estimate(one.value - other.value, one.low - other.high, one.high - other.low)


def earlier(hypothesis: str, measure: str, effect: Estimate, margin: float, control: Estimate | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"hypothesis": hypothesis, "measure": measure, "effect": effect.as_json(), "margin": margin}
    beyond = None
    if control is not None:
        beyond = less(effect, control)
        found["control"] = {"what": "classes from labels shuffled among the targets", **control.as_json()}
        found["effect_beyond_control"] = beyond.as_json()
    return {**found, "verdict": verdict(effect, margin, beyond), "measured": EARLIER}


def finding(run: str, where: tuple[str, str]) -> dict[str, Any]:
    file, name = where
    if file == "evidence":
        found: dict[str, Any] = read_json(MEASURED / run / "experimental_results.json")[experiments()[name].key]
    else:
        found = analysed(run, file)["findings"][name]
    keys = ("hypothesis", "measure", "effect", "margin", "control", "effect_beyond_control", "verdict", "measured")
    return {key: found[key] for key in keys if key in found}


def table(runs: list[str]) -> str:
    lines = ["| claim | " + " | ".join(NAMES.get(run, run) for run in runs) + " |", "|---" * (len(runs) + 1) + "|"]
    for claim, where in CLAIMS.items():
        cells = []
        for run in runs:
            found = finding(run, where)
            control = f"; control {estimate(found['control'], 3)}" if "control" in found else ""
            mark = "¹" if "measured" in found else ""
            cells.append(f"**{found['verdict']}**{mark}: {estimate(found['effect'], 3)}{control}")
        lines.append(f"| {claim} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def descriptions(run: str) -> dict[str, str]:
    """The numbers that the paper gives too, as it has them."""
    settling, gating = analysed(run, "convergence")["classes"].values(), analysed(run, "gates")

    def listed(values: list[EstimateJson], digits: int = 2) -> str:
        return ", ".join(f"{one['value']:.{digits}f}" for one in values)

    return dict(
        zip(
            PAPER,
            (
                ", ".join(f"{100 * one['share']:.1f}" for one in settling),
                ", ".join(f"{one['mean_convergence_step']:.2f}" for one in settling),
                listed(gating["mean_by_step"]),
                ", ".join(f"{100 * one['value']:.1f}" for one in gating["open_by_step"]),
                listed(gating["spread_within_token_by_step"], 3),
            ),
            strict=True,
        )
    )


def beside_the_paper(runs: list[str]) -> str:
    heads = ["what", "the paper", *(NAMES[run] for run in runs)]
    ours = {run: descriptions(run) for run in runs}
    rows = [[what, said, *(ours[run][what] for run in runs)] for what, said in PAPER.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows])


def main() -> None:
    for run in sys.argv[1:]:
        copy_in(Path(run))
    runs = [name for name in NAMES if (MEASURED / name).exists()]
    findings = {run: {claim: finding(run, where) for claim, where in CLAIMS.items()} for run in runs}
    verdicts = {run: [found["verdict"] for found in by_claim.values()] for run, by_claim in findings.items()}
    about = read_json(MEASURED / runs[0] / "experimental_results.json")["about"]
    write_json(
        HERE / "result.json",
        {
            "question": "Which of the paper's claims about what refinement does hold on the models of its own protocol?",
            "protocol": f"runs of results/pnn_paper_protocol, all {about['sequences']:,} lines of WikiText-103 valid, "
            f"{about['mask_probability']:.0%} of tokens masked, mask seed {about['mask_seed']}; bootstrap over sequences",
            "seeds": [0],
            "metrics": findings,
            "answer": "; ".join(
                f"{NAMES[run]}: {found.count('supported')} of {len(found)} claims supported, "
                f"{found.count('not supported')} not, {found.count('undecided')} undecided"
                for run, found in verdicts.items()
            )
            + ".",
            "command": "results/pnn_evidence/run.sh RUN…; python results/pnn_evidence/collect.py RUN…",
        },
    )
    for run in runs:  # drawn again, with the findings as they are judged now
        for file in ("convergence", "gates"):
            save(png(figure_of(file)(analysed(run, file))), MEASURED / run / "figures" / f"{file}.png")
    write_between(HERE / "README.md", "table", table(runs))
    write_between(HERE / "README.md", "paper", beside_the_paper(runs))
    print(table(runs))


if __name__ == "__main__":
    main()
