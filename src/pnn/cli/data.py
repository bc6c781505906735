from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.options import Config, Setting
from pnn.config import load_config

group = typer.Typer(help="Prepare text, or look at prepared text.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(group, name="data")


@group.command()
def prepare(config: Config, settings: Setting = None) -> None:
    """Turn a config's text into token shards.

    Training does the same before its first update.

    Example: pnn data prepare pnn_wikitext103 --set data.train='text/*.txt.xz'
    """
    chosen = load_config(config, settings or [])

    from pnn.data.shards import also_trained_on, left_out
    from pnn.data.shards import prepare as prepare_data
    from pnn.progress import track

    prepared = prepare_data(chosen.data, track)
    for name, tokens, used in (
        ("training", prepared.train, prepared.train_sequences),
        ("validation", prepared.validation, prepared.validation_sequences),
    ):
        print(f"{name}: {len(used):,} sequences, {int(tokens.lengths[used].sum()):,} tokens, {tokens.folder}")
    if repeated := also_trained_on(prepared):
        print(f"{repeated:,} of {len(prepared.validation_sequences):,} sequences of the validation also occur in the training")
    for tokens in {prepared.train.folder: prepared.train, prepared.validation.folder: prepared.validation}.values():
        for said in left_out(tokens):
            print(said)


@group.command()
def info(folder: Annotated[Path, typer.Argument(help="A folder of token shards, as prepare prints it.")]) -> None:
    """Print what a folder of token shards holds.

    Every shard is compared with its checksum.

    Example: pnn data info prepared/synthetic-0123456789ab
    """
    import numpy as np

    from pnn.data.shards import TokenSet, left_out, verify

    verify(folder)
    tokens = TokenSet(folder)
    manifest = tokens.manifest
    print(f"{manifest['name']}: {manifest['sequences']:,} sequences, {manifest['tokens']:,} tokens, checksums match")
    print(f"mean length {manifest['mean_length']:.1f}, longest {tokens.lengths.max()}, vocabulary {manifest['vocab_size']:,}")
    if tokens.tally is None:
        print("what was left out of the text is not known: an earlier version prepared it and did not count")
    else:
        print("\n".join(left_out(tokens)) or "nothing was left out: no line was filtered or cut")
    print("first: " + tokens.tokenizer().decode(tokens.take(np.array([0])))[:200])
