"""Removing half the heads of a GPT-2-sized model, against the whole model and against masking them.

python benchmarks/heads.py [OUT]      # a GPU: forward and backward, 32 × 1,024 tokens, bf16; a CPU: forward, 4 × 256, fp32
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import GPT2Config

from pnn.bench.heads import heads_benchmark
from pnn.bench.timing import hardware_slug
from pnn.files import write_json

SECONDS = {"cuda": 10.0, "cpu": 60.0}


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device, rows, length = (torch.device("cuda"), 32, 1024) if on_gpu else (torch.device("cpu"), 4, 256)
    result = heads_benchmark(GPT2Config(), rows, length, backward=on_gpu, device=device, seconds=SECONDS[device.type])
    out = Path(sys.argv[1] if len(sys.argv) > 1 else f"benchmarks/results/heads-{hardware_slug(result['hardware'])}.json")
    write_json(out, result)
    for row in result["rows"]:
        print(f"{row['name']}: {row['milliseconds']['median']:.2f} ms")
    for name, value in result["ratios"].items():
        print(f"{name}: {value:.2f}")
    print(f"Wrote {out}")


if __name__ == "__main__":
    main()
