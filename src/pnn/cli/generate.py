from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.options import AsJsonLines, Run


@app.command()
def generate(
    run: Run,
    prompts: Annotated[list[str], typer.Argument(help="Texts to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to add.")] = 50,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token; higher is more varied.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Choose among this many of the most probable tokens.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    as_json: AsJsonLines = False,
) -> None:
    """Continue texts with a decoder.

    Example: pnn generate runs/ddl_small "The river rises in" --temperature 0
    """
    from pnn.evaluation.generate import continue_texts
    from pnn.models.loading import load_decoder
    from pnn.numbers import words_unknown
    from pnn.progress import say

    loaded = load_decoder(run)
    made = continue_texts(loaded, prompts, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed)
    for number, one in enumerate(made, 1):
        if "unknown" in one:
            say(f"note: {f'prompt {number}: ' * (len(made) > 1)}{words_unknown(one['unknown'])}")
        if as_json or not sys.stdout.isatty():
            print(json.dumps(one, ensure_ascii=False))
        else:
            print(one["prompt"] + one["continuation"], end="\n\n")
