"""Text that a model knows as well as anything can be known: what it writes itself, sampled at temperature 1.

python results/plasticity_study/stories.py MODEL FILE [COUNT]      # COUNT texts of 200 tokens, 2,048 unless said otherwise
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pnn.files import write_text

AT_ONCE, LENGTH = 512, 200


def main() -> None:
    name, file = sys.argv[1], Path(sys.argv[2])
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 2048
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(name)
    torch.manual_seed(0)
    texts: list[str] = []
    while len(texts) < count:
        start = torch.full((min(AT_ONCE, count - len(texts)), 1), tokenizer.bos_token_id, device=device)
        made = model.generate(start, do_sample=True, top_k=0, max_new_tokens=LENGTH, pad_token_id=tokenizer.eos_token_id)
        texts += [" ".join(one.split()) for one in tokenizer.batch_decode(made, skip_special_tokens=True)]
    write_text(file, "\n\n".join(texts) + "\n")
    print(f"{len(texts)} texts → {file}")


if __name__ == "__main__":
    main()
