"""Data that some tests read and the repository does not hold: texts, vocabularies, models. Without them these tests skip."""

from __future__ import annotations

import os
from pathlib import Path

DATA = Path(os.environ.get("PNN_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data").expanduser().resolve()
VOCABULARY = DATA / "tokenizers" / "bert-base-uncased" / "vocab.txt"
STORIES = DATA / "models" / "stories15M"
