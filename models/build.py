"""models/pnn-base from a finished run: what `pnn export --bf16 --remote-code` writes, with the licences and a fuller card.

python models/build.py RUN [--overwrite]      # RUN: a run folder, or a checkpoint in one (RUN/checkpoints/average)

Numbers in the card come from the run's own files and from results/better_than_bert; what no run knows stands in card.md,
which also has the order of the sections. The folder appears whole or not at all.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from pnn.differences import TOO_FEW
from pnn.errors import UserError
from pnn.export.card import sections_of
from pnn.export.run import export_run
from pnn.files import is_taken, write_text
from pnn.numbers import bare_per_cent, interval, per_cent, written
from pnn.runs import check_commit, find_checkpoint, read_json, run_of

HERE = Path(__file__).parent
FOLDER = HERE / "pnn-base"
RESULTS = HERE.parent / "results" / "better_than_bert"
AHEAD = {"bert12": "BERT with 12 layers", "bert4": "BERT with 4"}


def build(run: str, folder: Path, *, overwrite: bool = False, results: Path = RESULTS) -> None:
    if is_taken(folder) and not overwrite:
        raise UserError(f"{folder} exists already: --overwrite replaces it")
    of = run_of(find_checkpoint(run))
    if of is None or not (of / "evaluation.json").exists():
        raise UserError(f"{run} is not a run that was measured: the card needs its config.yaml and evaluation.json")
    check_commit(of)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        export_run(run, new, bf16=True, remote_code=True, licence="mit")
        exported = (new / "README.md").read_text(encoding="utf-8")
        write_text(new / "README.md", card(exported, folder.name, compared(results)))
        shutil.copy(HERE.parent / "LICENSE", new)
        shutil.copy(HERE / "LICENSE-vocabulary", new)
        if folder.exists():
            os.rename(folder, Path(scratch) / "old")
        os.rename(new, folder)


def card(exported: str, name: str, results: str) -> str:
    """The export's card with card.md: section by section, first what the run's files say."""
    known, added = sections_of(exported), sections_of((HERE / "card.md").read_text(encoding="utf-8"))
    if lost := known.keys() - added.keys():
        raise ValueError(f"card.md has no place for {', '.join(lost)}")
    added["Results"] += f"\n\n{results}"
    parts = []
    for title, more in added.items():
        text = "\n\n".join(filter(None, (known.get(title, ""), more.strip())))
        parts.append(f"## {title}\n\n{text}" if title else text)
    whole = "\n\n".join(parts) + "\n"
    whole = re.sub(r"^# .+$", f"# {name}", whole, count=1, flags=re.MULTILINE)
    return whole.replace("FOLDER", f"models/{name}").replace("---\n", "---\nlanguage: en\n", 1)


def compared(results: Path) -> str:
    """What results/better_than_bert and results/downstream say, as far as it is measured."""
    lines = []
    if (results / "result.json").exists():
        metrics = read_json(results / "result.json")["metrics"]
        if "box_wikitext_valid" in metrics:
            lines.append(f"- WikiText-103 valid, four draws of masks: {per_cent(metrics['box_wikitext_valid'])}.")
        if (rounded := metrics.get("box_rounded")) is not None:
            reached = f"{per_cent(rounded['value'])} ({interval(rounded['interval'])})"
            draws = "one draw" if rounded["mask_draws"] == 1 else f"{rounded['mask_draws']} draws"
            lines.append(f"- The same with the weights as they are here, in bf16, {draws} of masks: {reached}.")
        # the box's own form, which is the first one
        first = metrics.get("first_form", {}).get("a")
        gaps = first if first is not None else {rival: metrics.get(f"points_ahead_of_{rival}", {}) for rival in AHEAD}
        decided = [rival for rival in AHEAD if gaps.get(rival) and gaps[rival].get("verdict") != TOO_FEW]
        if not decided:
            page = "../../results/better_than_bert/README.md"
            lines.append(f"- Whether models of this form beat BERT under the same recipe is [still being measured]({page}).")
        for rival in decided:
            mean, low, high = (written(gaps[rival][end], 2, plus=True) for end in ("mean", "low", "high"))
            lines.append(f"- Models of this form, trained shorter, against {AHEAD[rival]}: {mean} points ({low} to {high}).")
    downstream = results.parent / "downstream" / "result.json"
    tuned = read_json(downstream)["metrics"] if downstream.exists() else {}
    scores = {task: by_model["pnn_rewrite"] for task, by_model in tuned.items() if "pnn_rewrite" in by_model}
    if scores:
        told = ", ".join(f"{task} {bare_per_cent(one['score'])}" for task, one in scores.items())
        lines.append(f"- Fine-tuned, [scores on dev sets](../../results/downstream/README.md), mean over seeds: {told}.")
    if (results / "prompts_answers.json").exists():
        answers = read_json(results / "prompts_answers.json")
        right = ", ".join(f"{count} by {model.replace('_', '-')}" for model, count in answers["right"].items())
        lines.append(f"- Right answers to {len(answers['prompts'])} prompts that were written before the training: {right}.")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make models/pnn-base from a finished run.")
    parser.add_argument("run", help="a run folder, or a checkpoint in one")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder that is there")
    arguments = parser.parse_args()
    try:
        build(arguments.run, FOLDER, overwrite=arguments.overwrite)
    except UserError as error:
        print(f"build.py: {error}", file=sys.stderr)
        sys.exit(2)
    print(FOLDER)
