"""The tokens that a run owns: `tokens.json` in its folder names the shards that it was trained and validated on.

    {"train": {"folder": "…/wiki-0123456789ab", "fingerprint": …, "sequences": …, "tokens": …, "text": …, "recipe": …},
     "validation": …}

Whoever measures the run reads these shards. The raw text is needed only where they are gone, and must then give the same
tokens again. Runs of earlier versions have no such file: their tokens follow from their config.
"""

from __future__ import annotations

from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from pnn.config import DataConfig
from pnn.data import shards
from pnn.data.shards import Prepared, Progress, TokenSet
from pnn.data.tally import Tally
from pnn.data.tokenizers import made, unknown_token
from pnn.errors import UserError
from pnn.files import write_json
from pnn.progress import say
from pnn.runs import read_json

FILE = "tokens.json"
BEGINNING = 32  # tokens, to find a prompt in
ENTRY = {"folder": str, "fingerprint": str, "sequences": int, "tokens": int, "recipe": dict}  # what is read of it


def record(run: Path, prepared: Prepared) -> None:
    write_json(
        run / FILE,
        {
            name: {
                "folder": str(tokens.folder.resolve()),
                "fingerprint": tokens.fingerprint,
                **{key: tokens.manifest.get(key) for key in ("sequences", "tokens", "text", "recipe")},
            }
            for name, tokens in (("train", prepared.train), ("validation", prepared.validation))
        },
    )


def recorded(run: Path) -> dict[str, Any]:
    """What tokens.json holds; nothing where there is none."""
    if not (run / FILE).exists():
        return {}
    found = read_json(run / FILE)
    if not isinstance(found, dict) or not all(_is_entry(entry) for entry in found.values()):
        raise UserError(f"{run / FILE} does not say which tokens the run read: remove it to derive them from the run's config")
    return found


def _is_entry(entry: Any) -> bool:
    whole = shards.has(entry, ENTRY) and shards.has(entry["recipe"], shards.RECIPE)
    return whole and (entry.get("text") is None or Tally.can_be(entry["text"]))


def held_out(
    run: Path, data: DataConfig, tokenizer: PreTrainedTokenizerFast, progress: Progress
) -> tuple[TokenSet, NDArray[np.int64]]:
    """The tokens that a run validates on, and which of their sequences. `tokenizer` is that of its checkpoint."""
    tokens = _recall(run, data)
    if tokens is None:
        tokens = shards.prepare(data, progress).validation
        check_same_text(run, tokens)
    if not made(tokens.manifest["recipe"]["tokenizer"], tokenizer):
        raise UserError(f"{run}: the tokenizer of its checkpoint is not the one that its config names")
    return tokens, shards.held_out(tokens, data)


def first_words(run: Path, data: DataConfig, most: int = 4) -> str | None:
    """How the text that a run validates on begins, as far as its tokenizer knows the words: a prompt. None where it knows too
    few."""
    tokens = _recall(run, data)
    if tokens is None:
        return None
    tokenizer = tokens.tokenizer()
    text = tokenizer.decode(tokens.take(shards.held_out(tokens, data)[:1])[:BEGINNING], skip_special_tokens=True)
    words = text.split()[1:-1]  # the first and the last may be pieces of words
    words = list(dropwhile(lambda word: not word[0].isalpha(), words))[:most]
    known = unknown_token(tokenizer) not in tokenizer(" ".join(words)).input_ids
    return " ".join(words) if words and known else None


def check_same_text(run: Path, tokens: TokenSet) -> None:
    """Of tokens that were made anew, perhaps by another tokenizer: whether the text is still what the run held out."""
    entry = recorded(run).get("validation")
    if entry is None:
        return
    then, now = entry["recipe"], tokens.manifest["recipe"]
    if then["source"] != now["source"] or (then == now and entry["fingerprint"] != tokens.fingerprint):
        raise UserError(
            f"{run}: the text {tokens.manifest['name']} has changed since the run's tokens were made from it: "
            f"bring it back as it was, or the token shards {entry['folder']}"
        )


def _recall(run: Path, data: DataConfig) -> TokenSet | None:
    entry = recorded(run).get("validation")
    if entry is None:
        return None
    folder = Path(entry["folder"])
    for place in (folder, Path(data.prepared) / folder.name):  # a run may move to another machine, with its shards
        if (place / "manifest.json").exists():
            tokens = TokenSet(place)
            if tokens.fingerprint == entry["fingerprint"]:
                return tokens
    say(f"{run}: its token shards are gone ({folder}), so its text is read again")
    return None
