"""What a rule that sees only a token's place gets right of the evidence's masked tokens: "the" in the first two places, "," in
all others. Step 0 of both models gets as many right (`easy` in measured/*/analysis/convergence.json).

python results/pnn_evidence/step_0.py DATA   # the folder of the paper's experiment: wikitext-103/wiki.valid.raw, vocab.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from pnn.analysis.trace import Text
from pnn.config import DataConfig
from pnn.data.batches import special_tokens
from pnn.data.corpora import open_source
from pnn.data.shards import prepare_source
from pnn.data.tokenizers import load_tokenizer
from pnn.progress import track


def main(data: Path) -> None:
    source = str(data / "wikitext-103" / "wiki.valid.raw")
    config = DataConfig(train=source)
    tokenizer = load_tokenizer(str(data / "vocab.txt"), config.max_length)
    tokens = prepare_source(open_source(source, config), tokenizer, config, track)
    labels, places = [], []
    for batch in Text(tokens, np.arange(len(tokens)), special_tokens(tokenizer)).batches():
        positions, borders = batch.masked.positions.numpy(), batch.packed.cu_seqlens.numpy()
        labels.append(batch.masked.labels.numpy())
        places.append(positions - borders[np.searchsorted(borders, positions, side="right") - 1])
    label, place = np.concatenate(labels), np.concatenate(places)
    the, comma = tokenizer.convert_tokens_to_ids(["the", ","])
    right = label == np.where(place <= 2, the, comma)
    print(f"{right.sum():,} of {len(label):,} masked tokens are right, {(right & (label == comma)).sum():,} of them commas")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
