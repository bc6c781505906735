"""Which folders transformers loads by itself, with the same predictions: python reload.py FOLDER… prints a JSON object.

Each folder has tokens.json beside the model, with ids and the logits of the last of them. `--with-pnn` imports pnn first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4


def why_not(folder: Path) -> str | None:
    """Nothing, or why it does not load."""
    expected = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor(expected["ids"])).logits[:, -1]
    except Exception as error:  # whatever a model says that cannot be loaded is the answer
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    away = float((logits - torch.tensor(expected["logits"])).abs().max())
    return None if away < TOLERANCE else f"it loads, and its logits are {away:.3g} away"


def main() -> None:
    folders = [Path(one) for one in sys.argv[1:] if one != "--with-pnn"]
    if "--with-pnn" in sys.argv:
        import pnn  # noqa: F401, the import is what is tested
    print(json.dumps({folder.name: why_not(folder) for folder in folders}))


if __name__ == "__main__":
    main()
