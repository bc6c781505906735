"""From analysed runs to measured/, result.json and the tables of README.md.

python results/pnn_evidence/collect.py [RUN…]   # run folders to copy in first; without them, what is in measured/
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from pnn.files import write_between, write_json, write_text
from pnn.numbers import estimate
from pnn.runs import check_commit, read_json
from pnn.studies.registry import experiments

HERE = Path(__file__).parent
MEASURED = HERE / "measured"
ANALYSES = ("convergence", "gates", "optimisation")
NAMES = {"published": "PNN as the published code has it", "equations": "PNN, the paper's equations"}
# What the paper and its README say, and the finding that speaks to it: (file, name in it)
CLAIMS = {
    "Tokens converge at different rates: easy ones first": ("convergence", "hard_tokens_converge_later"),
    "… and settle on their final prediction first": ("convergence", "hard_tokens_settle_later"),
    "Gates become increasingly selective": ("gates", "gates_close_step_by_step"),
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
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "analysis").mkdir(parents=True)
    source = read_json(run / "analysis" / "convergence.json")["source"]
    paths = [*(Path("analysis") / f"{name}.json" for name in ANALYSES), Path("experimental_results.json")]
    for path in paths:  # with DATA for where the text lay
        text = (run / path).read_text(encoding="utf-8").replace(source, f"DATA/wikitext-103/{Path(source).name}")
        write_text(folder / path, text)
    pictures = [*ANALYSES, *(experiment.figure for experiment in experiments().values())]
    (folder / "figures").mkdir()
    for name in pictures:
        shutil.copy(run / "figures" / f"{name}.png", folder / "figures")


def finding(run: str, where: tuple[str, str]) -> dict[str, Any]:
    file, name = where
    if file == "evidence":
        found: dict[str, Any] = read_json(MEASURED / run / "experimental_results.json")[experiments()[name].key]
    else:
        found = read_json(MEASURED / run / "analysis" / f"{file}.json")["findings"][name]
    keys = ("hypothesis", "measure", "effect", "margin", "control", "effect_beyond_control", "verdict")
    return {key: found[key] for key in keys if key in found}


def table(runs: list[str]) -> str:
    lines = ["| claim | " + " | ".join(NAMES.get(run, run) for run in runs) + " |", "|---" * (len(runs) + 1) + "|"]
    for claim, where in CLAIMS.items():
        cells = []
        for run in runs:
            found = finding(run, where)
            control = f"; control {estimate(found['control'], 3)}" if "control" in found else ""
            cells.append(f"**{found['verdict']}**: {estimate(found['effect'], 3)}{control}")
        lines.append(f"| {claim} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


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
    write_between(HERE / "README.md", "table", table(runs))
    print(table(runs))


if __name__ == "__main__":
    main()
