"""Plastic Neural Networks: train a small one in plain torch, and read its predictions after every refinement step.

python examples/refine.py            # about half a minute on one CPU core
"""

import torch
from torch.nn.utils.rnn import pad_sequence

import pnn
from pnn.data import synthetic

PAD, MASK, FIRST = 0, 1, 2  # then the words of the language
IDS = {word: number for number, word in enumerate(synthetic.language().words, FIRST)}


def batch(paragraphs: list[str], seed: int) -> dict[str, torch.Tensor]:
    """Paragraphs with a mask on 15 % of their words."""
    rows = [torch.tensor([IDS[word] for word in paragraph.split()][:64]) for paragraph in paragraphs]
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD)
    masked = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.15) & (ids != PAD)
    return {
        "input_ids": ids.masked_fill(masked, MASK),
        "attention_mask": (ids != PAD).long(),
        "labels": ids.masked_fill(~masked, -100),
    }


def main(updates: int = 300) -> None:
    torch.manual_seed(0)
    config = pnn.PNNConfig(
        vocab_size=FIRST + len(IDS),
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        initializer_range=0.1,  # 0.02 is made for width 768
        dropout=0.0,
    )
    model = pnn.PNNForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = list(synthetic.paragraphs(20 * updates, seed=0))
    for update in range(updates):
        loss = model(**batch(text[20 * update : 20 * (update + 1)], seed=update)).loss  # of all steps, the later ones more
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if update % 50 == 0:
            print(f"update {update:3}: loss {loss.item():.3f}")

    held_out = batch(list(synthetic.paragraphs(200, seed=1)), seed=0)
    target = held_out.pop("labels")
    asked = target != -100
    model.eval()
    for steps in range(config.num_steps + 3):
        with torch.no_grad():
            right = model(**held_out, num_steps=steps).logits.argmax(-1)[asked] == target[asked]
        trained = "" if steps <= config.num_steps else "  (more than it was trained with)"
        print(f"after step {steps}: {100 * right.float().mean():.1f} % right{trained}")


if __name__ == "__main__":
    main()
