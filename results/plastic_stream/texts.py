"""Two of the three texts of the stream; the stories come from results/plasticity_study/stories.py.

python results/plastic_stream/texts.py WIKITEXT ARC_EASY FOLDER     # wiki.train.tokens.xz, arc_easy.jsonl → FOLDER/*.txt
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

from pnn.data.corpora import undo_wikitext_marks
from pnn.files import write_text

CHARACTERS = 200_000  # of each, about 50,000 tokens: more than any arm reads


def encyclopaedia(file: Path) -> str:
    """The beginning of WikiText-2's training text, its marks undone."""
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        return "".join(f"{undo_wikitext_marks(line.strip())}\n" for line in lines.readlines(2 * CHARACTERS))[:CHARACTERS]


def questions(file: Path) -> str:
    """ARC-Easy: each question with its right answer."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return "\n\n".join(f"{row['query']}\nAnswer: {row['choices'][row['gold']]}" for row in rows)[:CHARACTERS]


if __name__ == "__main__":
    wikitext, arc, folder = map(Path, sys.argv[1:])
    write_text(folder / "encyclopaedia.txt", encyclopaedia(wikitext))
    write_text(folder / "questions.txt", questions(arc))
