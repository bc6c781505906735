"""The plasticity cycle: prune heads of a small GPT-2, measure, grow some, learn; and a control that only learns.

python examples/reorganise.py        # about half a minute on one CPU core
"""

import tempfile
from pathlib import Path

import torch
import transformers

from pnn import plasticity
from pnn.data import synthetic
from pnn.runs import read_json

LENGTH = 32
IDS = {word: number for number, word in enumerate(synthetic.language().words)}


def rows(count: int, seed: int) -> torch.Tensor:
    """Running text, cut to rows."""
    words = [IDS[word] for paragraph in synthetic.paragraphs(4 * count, seed=seed) for word in paragraph.split()]
    return torch.tensor(words[: count * LENGTH]).view(count, LENGTH)


def main(updates: int = 60) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(IDS), n_embd=64, n_layer=3, n_head=4, n_positions=LENGTH, bos_token_id=None, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = rows(16 * updates, seed=0)
    for part in text.split(16):
        model(input_ids=part, labels=part).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    what = plasticity.Text(text, rows(64, seed=1))
    learning = {"learn_steps": 20, "batch_rows": 16, "learning_rate": 3e-4, "evaluate_every": 20}
    with tempfile.TemporaryDirectory() as folder:
        for name, shares in (("pruned and grown", (0.5, 0.2)), ("control", (0.0, 0.0))):
            settings = plasticity.CycleSettings(prune=shares[0], grow=shares[1], **learning)
            output = Path(folder) / name
            plasticity.cycle(model, what, output, settings, quiet=True)
            summary = read_json(output / "summary.json")
            before, after = summary["initial"], summary["final"]
            print(
                f"{name:17} heads {before['heads']} → {after['heads']}, parameters {before['parameters']:,} → "
                f"{after['parameters']:,}, perplexity {before['perplexity']:.3f} → {after['perplexity']:.3f}"
            )


if __name__ == "__main__":
    main()
