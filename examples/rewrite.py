"""Deep Delta Learning: one small decoder, three ways to write into its state, the same text for all.

python examples/rewrite.py           # about half a minute on one CPU core

Differences of one short run are no result: for that see results/ddl_rewrites.
"""

import torch

import pnn
from pnn.data import synthetic

LENGTH = 32
IDS = {word: number for number, word in enumerate(synthetic.language().words)}
WAYS = {
    "x + F(x)": {"residual": "additive", "value_channels": 1},
    "write, erase nothing": {"residual": "write_only", "value_channels": 1},
    "read, compare, overwrite": {"residual": "delta", "value_channels": 1},
}


def rows(count: int, seed: int) -> torch.Tensor:
    """Running text, cut to rows."""
    words = [IDS[word] for paragraph in synthetic.paragraphs(4 * count, seed=seed) for word in paragraph.split()]
    return torch.tensor(words[: count * LENGTH]).view(count, LENGTH)


def main(updates: int = 60) -> None:
    text, held_out = rows(16 * updates, seed=0), rows(64, seed=1)
    for name, way in WAYS.items():
        torch.manual_seed(0)
        config = pnn.DDLConfig(
            vocab_size=len(IDS),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
            **way,
        )
        model = pnn.DDLForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for update in range(updates):
            part = text[16 * update : 16 * (update + 1)]
            model(input_ids=part, labels=part).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            loss = model(input_ids=held_out, labels=held_out).loss
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{name:26} {parameters:7,} parameters, loss on held-out text {loss.item():.3f}")


if __name__ == "__main__":
    main()
