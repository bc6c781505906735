"""Cut prepared text into full rows, as the reference protocol does: every line followed by [SEP], all of them end to end,
cut into rows of [CLS] + 127 tokens. Attention then runs over whole rows, across lines.

    python results/short_budget/rows.py PREPARED ROWS     # makes in ROWS a folder for each token set in PREPARED

The folders keep their names, so `--set data.prepared=ROWS` makes a config train on rows instead of lines.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from pnn.data.shards import TokenSet
from pnn.files import new_folder, sha256, write_json

ROW = 128


def cut(source: Path, target: Path) -> None:
    tokens = TokenSet(source)
    tokenizer = tokens.tokenizer()
    ids = np.concatenate([tokens.take(part) for part in np.array_split(np.arange(len(tokens)), max(1, len(tokens) // 20000))])
    ids = ids[ids != tokenizer.cls_token_id]  # what is left: line [SEP] line [SEP] …
    rows = ids[: len(ids) // (ROW - 1) * (ROW - 1)].reshape(-1, ROW - 1)
    rows = np.insert(rows, 0, tokenizer.cls_token_id, axis=1).astype(tokens.manifest["dtype"])
    with new_folder(target) as folder:
        rows.tofile(folder / "tokens-00000.bin")
        np.full(len(rows), ROW, dtype=np.uint16).tofile(folder / "lengths-00000.bin")
        entry = {}
        for kind in ("token", "length"):
            file = folder / f"{kind}s-00000.bin"
            entry |= {f"{kind}s": file.name, f"{kind}_bytes": file.stat().st_size, f"{kind}_sha256": sha256(file)}
        tokenizer.save_pretrained(folder / "tokenizer")
        sizes = {"sequences": len(rows), "tokens": rows.size, "mean_length": float(ROW), "shards": [entry]}
        write_json(folder / "manifest.json", tokens.manifest | sizes)
    print(f"{target}: {len(rows):,} rows")


if __name__ == "__main__":
    prepared, rows = map(Path, sys.argv[1:])
    for manifest in sorted(prepared.glob("*/manifest.json")):
        cut(manifest.parent, rows / manifest.parent.name)
