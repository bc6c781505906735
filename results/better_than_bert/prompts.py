"""The twenty prompts, answered: each model's best token for [MASK], and how many are right.

python results/better_than_bert/prompts.py pnn_base=models/pnn-base bert12=RUNS/b/bert12      # writes prompts_answers.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pnn.errors import UserError
from pnn.evaluation.fill import fill
from pnn.files import write_json
from pnn.models.loading import load_run
from pnn.runs import read_json

HERE = Path(__file__).parent


def answer(models: dict[str, str]) -> dict[str, Any]:
    """`models`: the RUN of each name."""
    prompts = read_json(HERE / "prompts.json")
    for prompt in prompts:
        prompt["answers"] = {}
    for name, run in models.items():
        loaded = load_run(run)
        texts = [prompt["text"] for prompt in prompts]
        filled = fill(loaded.model, loaded.tokenizer, texts, top=1, precision=loaded.precision)
        for prompt, one in zip(prompts, filled, strict=True):
            prompt["answers"][name] = one["predictions"][0][0]
    right = {name: sum(is_right(prompt, name) for prompt in prompts) for name in models}
    return {"right": right, "prompts": prompts}


def is_right(prompt: dict[str, Any], name: str) -> bool:
    return prompt["answers"][name]["token"] in prompt["right"]


def table(answers: dict[str, Any]) -> str:
    names = list(answers["right"])
    lines = [f"| prompt | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for prompt in answers["prompts"]:
        cells = (prompt["answers"][name]["token"] for name in names)
        marked = (f"**{cell}**" if is_right(prompt, name) else cell for name, cell in zip(names, cells, strict=True))
        lines.append(f"| {prompt['text']} | {' | '.join(marked)} |")
    counts = " | ".join(str(answers["right"][name]) for name in names)
    return "\n".join([*lines, f"| right of {len(answers['prompts'])} | {counts} |"])


def main(arguments: list[str]) -> None:
    models = dict(argument.partition("=")[::2] for argument in arguments)
    if not models or not all(models.values()):
        raise UserError("give models as NAME=RUN, such as pnn_base=models/pnn-base")
    answers = answer(models)
    write_json(HERE / "prompts_answers.json", answers)
    print(table(answers))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"prompts.py: {error}", file=sys.stderr)
        sys.exit(2)
