"""How long an update of fine-tuning takes on a CPU in bf16, as a share of the time in fp32.

python benchmarks/finetune_precision.py OUT.json [--encoder models/pnn-base] [--seconds 20]

Two copies of one classifier take turns, 32 texts per update. One thread computes and its own time is counted, so that a machine
shared with others gives about the same numbers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, PreTrainedModel

import pnn
from pnn.bench.timing import machine
from pnn.config import TrainingConfig
from pnn.files import write_json
from pnn.models.precision import learns_in
from pnn.training.optim import descend, make_optimizer
from pnn.turns import take_turns

TEXTS, LENGTHS = 32, (64, 32, 12)  # tokens of a text: pairs of sentences, SST-2's, CoLA's
CPU = torch.device("cpu")


def updates(encoder: Path, length: int, seconds: float) -> dict[str, float]:
    """Seconds of an update by precision."""
    ids = torch.randint(5, 1000, (TEXTS, length), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(TEXTS) % 2

    def update_in(precision: torch.dtype) -> Callable[[], None]:
        model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=2).float().train()
        optimizer = make_optimizer(model, TrainingConfig())

        def update() -> None:
            with torch.autocast("cpu", precision, enabled=precision != torch.float32):
                loss = F.cross_entropy(model(input_ids=ids).logits.float(), labels)
            descend(model, optimizer, loss, 1e-5)

        return update

    ways = {"fp32": update_in(torch.float32), "bf16": update_in(torch.bfloat16)}
    times = take_turns(ways, CPU, seconds, warm_up=1, clock=time.thread_time)
    return {name: statistics.median(one) for name, one in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--encoder", type=Path, default=Path("models/pnn-base"))
    parser.add_argument("--seconds", type=float, default=20, help="of each length")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    by_length = {str(length): updates(asked.encoder, length, asked.seconds) for length in LENGTHS}
    ratios = {f"bf16_share_of_fp32_time_{length}": one["bf16"] / one["fp32"] for length, one in by_length.items()}
    chosen = str(learns_in(CPU)).removeprefix("torch.")
    found = {"encoder": asked.encoder.name, "texts": TEXTS, "learns_in": chosen, "seconds": by_length, "ratios": ratios}
    write_json(asked.out, found | {"version": pnn.__version__} | machine())
    print(ratios)


if __name__ == "__main__":
    main()
