"""A small language for decoders, a tokenizer for it, and tiny Deep Delta models that learn it in seconds.

    <eos> 2 word ##ending word ##ending , word ##ending word ##ending . 1 word …

A number says how many words follow, each word has its ending, and after the comma the words come again.
"""

from functools import cache

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import pnn

WORDS, ENDINGS = [f"{a}{b}o" for a in "bdfgklm" for b in "aeiu"], [f"##{c}" for c in "nrst"]
VOCABULARY = ["<eos>", ",", ".", "1", "2", "3", *WORDS, *ENDINGS]
IDS = {piece: i for i, piece in enumerate(VOCABULARY)}
LENGTH = 24


def tokenizer():
    backend = Tokenizer(models.WordLevel(IDS, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<eos>")


def text(rows, seed=0):
    """(rows, LENGTH)."""
    draw = torch.Generator().manual_seed(seed)

    def number(below):
        return int(torch.randint(below, (), generator=draw))

    found = []
    for _ in range(rows):
        row = [IDS["<eos>"]]
        while len(row) < LENGTH:
            words = [number(len(WORDS)) for _ in range(1 + number(3))]
            pieces = [IDS[piece] for w in words for piece in (WORDS[w], ENDINGS[w % len(ENDINGS)])]
            row += [IDS[str(len(words))], *pieces, IDS[","], *pieces, IDS["."]]
        found.append(row[:LENGTH])
    return torch.tensor(found)


def tiny(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(VOCABULARY) + 6, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"max_position_embeddings": LENGTH, "bos_token_id": None, "eos_token_id": 0, **changes}
    return pnn.DDLForCausalLM(pnn.DDLConfig(**sizes)).eval()


@cache
def trained(residual="delta", steps=220):
    """Not to be changed: take a copy."""
    model = tiny(residual=residual).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rows = text(512, seed=1)
    for step in range(steps):
        batch = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(step))[:32]]
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 - step / steps)
        model(input_ids=batch, labels=batch, output_logits=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
