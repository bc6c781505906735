"""How long an update takes on a CPU in bf16, as a share of the time in fp32: of pretraining a PNN, of fine-tuning an encoder,
and of a decoder that learns text after pruning.

python benchmarks/learning_precision.py OUT.json [--encoder models/pnn-base] [--decoder FOLDER …] [--seconds 20]

PNNs are fresh and of several widths, and so are GPT-2s; other decoders lie in FOLDERs. Two copies of one model take turns. One
thread computes and its own time is counted, so that a machine shared with others gives about the same numbers.

Also of attention alone: torch's function beside batched products, time and rounding, forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

import pnn
from pnn.bench.timing import machine
from pnn.config import TrainingConfig
from pnn.files import write_json
from pnn.kernels.short_rows import by_products
from pnn.models.precision import learns_in
from pnn.training.optim import descend, make_optimizer
from pnn.turns import take_turns

TEXTS, LENGTHS = 32, (64, 32, 12)  # of fine-tuning: tokens of a text: pairs of sentences, SST-2's, CoLA's
ROWS, TOKENS = 8, 128  # of a decoder's update
WIDTHS = (64, 128, 256, 512)
SEQUENCES, MEAN_LENGTH = 28, 36  # of a PNN's update, packed: the quickstart's
ATTEND = {"torch": F.scaled_dot_product_attention, "products": by_products}
SHAPES = ((28, 8, 36, 16), (16, 12, 64, 64), (16, 12, 128, 64), (8, 12, 256, 64), (4, 9, 512, 64))
CPU = torch.device("cpu")
DRAW = torch.Generator().manual_seed(0)


def seconds_of_update(
    make: Callable[[], PreTrainedModel], loss_of: Callable[[PreTrainedModel], Tensor], seconds: float
) -> dict[str, float]:
    """By precision."""

    def update_in(precision: torch.dtype) -> Callable[[], None]:
        model = make().float().train()
        optimizer = make_optimizer(model, TrainingConfig())

        def update() -> None:
            with torch.autocast("cpu", precision, enabled=precision != torch.float32):
                loss = loss_of(model)
            descend(model, optimizer, loss, 1e-5)

        return update

    ways = {"fp32": update_in(torch.float32), "bf16": update_in(torch.bfloat16)}
    times = take_turns(ways, CPU, seconds, warm_up=1, clock=time.thread_time)
    return {name: statistics.median(one) for name, one in times.items()}


def encoder(folder: Path, length: int, seconds: float) -> dict[str, float]:
    ids, labels = torch.randint(5, 1000, (TEXTS, length), generator=DRAW), torch.arange(TEXTS) % 2
    make = AutoModelForSequenceClassification.from_pretrained
    return seconds_of_update(
        lambda: make(folder, num_labels=2), lambda model: F.cross_entropy(model(input_ids=ids).logits.float(), labels), seconds
    )


def decoder(make: Callable[[], PreTrainedModel], seconds: float) -> dict[str, float]:
    ids = torch.randint(5, 1000, (ROWS, TOKENS), generator=DRAW)
    return seconds_of_update(make, lambda model: model(input_ids=ids, labels=ids).loss, seconds)


def packed_pnn(width: int, seconds: float) -> dict[str, float]:
    tokens = SEQUENCES * MEAN_LENGTH
    ids, at = torch.randint(5, 1000, (1, tokens), generator=DRAW), torch.arange(0, tokens, 7)
    call = {
        "input_ids": ids,
        "position_ids": (torch.arange(tokens) % MEAN_LENGTH)[None],
        "cu_seqlens": torch.arange(0, tokens + 1, MEAN_LENGTH, dtype=torch.int32),
        "logit_positions": at,
        "labels": ids[0, at],
        "output_logits": False,
    }
    sizes = {"vocab_size": 4096, "hidden_size": width, "intermediate_size": 8 * width // 3, "num_attention_heads": width // 32}
    form = {"update": "rewrite", "schedule": [0, 1, 0, 1], "positions": "rotary", "dropout": 0.0}
    return seconds_of_update(
        lambda: pnn.PNNForMaskedLM(pnn.PNNConfig(**sizes, **form)), lambda model: model(**call).loss, seconds
    )


def attending(shape: tuple[int, ...], seconds: float) -> dict[str, float]:
    """Seconds, by function and precision. `shape`: sequences, heads, tokens, width of a head."""
    draws = [torch.randn(shape, generator=DRAW) for _ in range(4)]

    def way(attend: Callable[..., Tensor], precision: torch.dtype) -> Callable[[], None]:
        *inputs, slope = (one.to(precision) for one in draws)
        for one in inputs:
            one.requires_grad_()
        return lambda: attend(*inputs).backward(slope)

    ways = {
        f"{name}, {str(precision).removeprefix('torch.')}": way(attend, precision)
        for precision in (torch.float32, torch.bfloat16)
        for name, attend in ATTEND.items()
    }
    times = take_turns(ways, CPU, seconds, warm_up=1, clock=time.thread_time)
    return {name: statistics.median(one) for name, one in times.items()}


def rounding(scale: float) -> dict[str, float]:
    """How far a query's gradient in bf16 is from that in fp32, as a share of its size; queries and keys times `scale`."""
    q, k, v, slope = (torch.randn(4, 8, 128, 32, generator=DRAW) for _ in range(4))

    def gradient(attend: Callable[..., Tensor], precision: torch.dtype) -> Tensor:
        leaf = (scale * q).to(precision).requires_grad_()
        (found,) = torch.autograd.grad(attend(leaf, (scale * k).to(precision), v.to(precision)), leaf, slope.to(precision))
        return found.float()

    exact = gradient(F.scaled_dot_product_attention, torch.float32)
    return {name: float((gradient(attend, torch.bfloat16) - exact).norm() / exact.norm()) for name, attend in ATTEND.items()}


def gpt2(width: int) -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=4096, n_embd=width, n_head=width // 32, n_layer=4, n_positions=TOKENS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--encoder", type=Path, default=Path("models/pnn-base"))
    parser.add_argument("--decoder", type=Path, nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=20, help="of each length and width")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        f"{asked.encoder.name}, {TEXTS} texts of {length} tokens": encoder(asked.encoder, length, asked.seconds)
        for length in LENGTHS
    }
    packed = f"{SEQUENCES} sequences of {MEAN_LENGTH} tokens, packed"
    found |= {f"PNN of width {width}, {packed}": packed_pnn(width, asked.seconds) for width in (*WIDTHS, 768)}
    about = f"{ROWS} rows of {TOKENS} tokens"
    found |= {f"GPT-2 of width {width}, {about}": decoder(lambda width=width: gpt2(width), asked.seconds) for width in WIDTHS}
    found |= {
        f"{folder.name}, {about}": decoder(lambda folder=folder: AutoModelForCausalLM.from_pretrained(folder), asked.seconds)
        for folder in asked.decoder
    }
    alone = {" × ".join(map(str, shape)): attending(shape, asked.seconds / 2) for shape in SHAPES}
    errors = {f"scores times {scale**2}": rounding(scale) for scale in (1, 3)}
    ratios = {name: one["bf16"] / one["fp32"] for name, one in found.items()}
    chosen = str(learns_in(CPU, width=768)).removeprefix("torch.")
    result = {"learns_in": chosen, "seconds": found, "bf16_share_of_fp32_time": ratios}
    result |= {"attention_seconds": alone, "attention_rounding": errors}
    write_json(asked.out, result | {"version": pnn.__version__} | machine())
    print(ratios, alone, errors, sep="\n")


if __name__ == "__main__":
    main()
