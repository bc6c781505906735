"""What a model is worth and what it costs, in numbers that a reorganised model can be compared by.

    loss          nats a predicted token, over all targets of all held-out rows; perplexity = exp(loss). Where tokens went, nats
                  a token of the whole vocabulary, whose pieces' nats are added up
    head map      which heads each layer has
    parameters    of the whole model, and of its attention (queries, keys, values, output)
    FLOPs         a token, forward: 2 · (matrix parameters that it passes) + 4 · (tokens it attends to) · (width of the heads)
    tokens/s      of reading text, measured at several batch sizes and lengths; of writing it, one text at a time
    missing       where capacity lacks: how much a head on trial in each layer would learn at its first step

The published measure averages the perplexities of five sentences, so that one odd sentence outweighs a page; here every token
counts the same. FLOPs follow one forward pass and count each matrix as often as it is used, a PNN's refiner once a step; the
product with the vocabulary counts for predicted tokens only. In a causal model a token attends to half of its row on average.
Speed is that of reading a prompt: a decoder gives the logits of each row's last token, as transformers' `generate` asks for.
The product of all tokens with the vocabulary, 47 % of the FLOPs in DistilGPT2, would hide what became of the layers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pnn.errors import UserError
from pnn.models.lean import padded_vocabulary
from pnn.models.loading import longest_input
from pnn.models.precision import learns_in, predicts_in, undisturbed, width_of
from pnn.models.recorded import quickened
from pnn.models.registry import kind_of
from pnn.objectives import IGNORE
from pnn.plasticity.architectures import architecture_of
from pnn.plasticity.growth import STRATEGIES, candidates
from pnn.plasticity.heads import head_map, original_counts
from pnn.plasticity.scores import prepared
from pnn.plasticity.text import MASKED, Text
from pnn.stats import ratio_interval
from pnn.turns import take_turns

BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}  # of a batch that is only measured
# Rows of the forward passes that are timed: a GPU does eight rows sooner than Python issues them
SPEED_BATCHES = {"cpu": (1, 8), "cuda": (1, 8, 64)}
SECONDS = 0.5  # how long one speed is measured, at least
WARM_UP = 2  # turns before: one allocates, one may record (`models/recorded`); there may be many shapes


def computing(model: PreTrainedModel) -> torch.autocast:
    return _in(predicts_in(model.device), model)


def learning(model: PreTrainedModel) -> torch.autocast:
    return _in(learns_in(model.device, width_of(model.config)), model)


def _in(dtype: torch.dtype, model: PreTrainedModel) -> torch.autocast:
    return torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


@torch.no_grad()
def held_out_nats(model: PreTrainedModel, text: Text) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The loss of each held-out row, summed over its targets, and how many targets it has: where tokens went, of the whole
    vocabulary."""
    nats, targets, measured = [], [], text.measured()
    with undisturbed(model), computing(model), padded_vocabulary(model):
        rows = max(1, BATCH_TOKENS.get(model.device.type, 4096) // text.held_out.shape[1])
        for first, batch in zip(range(0, len(text.held_out), rows), text.batches(text.held_out, rows), strict=True):
            labels = batch.pop("labels")
            if measured is not None:
                labels = labels.masked_fill(~measured[0][first : first + rows], IGNORE)
            logits = model(**prepared(model, batch | {"labels": None})).logits[..., : model.config.vocab_size]
            wanted = labels.to(logits.device)
            if kind_of(model).causal:
                logits, wanted = logits[:, :-1], wanted[:, 1:]
            for row, answer in zip(logits, wanted, strict=True):  # one row in fp32 at a time
                nats.append(F.cross_entropy(row.float(), answer, ignore_index=IGNORE, reduction="sum"))
                targets.append((answer != IGNORE).sum())
    counts = torch.stack(targets) if measured is None else measured[1]
    return torch.stack(nats).double().cpu().numpy(), counts.double().cpu().numpy()


def held_out_loss(model: PreTrainedModel, text: Text) -> dict[str, Any]:
    """Loss and perplexity on the held-out rows, every target alike, with an interval over rows."""
    nats, counts = held_out_nats(model, text)
    loss, low, high = ratio_interval(nats, counts)
    if not math.isfinite(loss):
        raise UserError(f"the loss on held-out text is {loss}: the model's numbers overflow, or no token is masked")
    return {
        "loss": loss,
        "loss_interval": [low, high] if math.isfinite(low) else None,
        "perplexity": math.exp(min(loss, 700.0)),
        "targets": int(counts.sum()),
        "rows": len(counts),
        "row_tokens": text.held_out.shape[1],
    }


def size(model: PreTrainedModel, length: int) -> dict[str, Any]:
    """Heads, parameters, and FLOPs of a token in rows of this length."""
    architecture = architecture_of(model)
    attention = {
        id(parameter): parameter.numel()
        for layer in architecture.attentions(model)
        for part in architecture.projections(layer)
        for parameter in part.module.parameters()
    }
    return {
        "heads": sum(map(len, head_map(model))),
        "original_heads": sum(original_counts(model)),
        "head_map": head_map(model),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "attention_parameters": sum(attention.values()),
        "flops_per_token": flops_per_token(model, length),
    }


def training_flops_per_token(model: PreTrainedModel, length: float, asked: float = MASKED) -> float:
    """Three times those of a forward pass, which reads the vocabulary after every step whose loss counts. `asked`: the share of
    an encoder's tokens that are predicted."""
    config, kind = model.config, kind_of(model)
    read = 1
    if kind.has_steps:
        read = config.num_steps if config.step_weights is None else sum(weight > 0 for weight in config.step_weights)
    more = (read - 1) * (1.0 if kind.causal else asked) * 2 * model.get_output_embeddings().weight.numel()
    return 3 * (flops_per_token(model, length, asked) + more)


@torch.no_grad()
def flops_per_token(model: PreTrainedModel, length: float, asked: float = MASKED) -> float:
    """Of a forward pass, counted from which matrices it passes and how often."""
    architecture = architecture_of(model)
    causal = kind_of(model).causal
    attended = length / 2 if causal else float(length)
    read_out = model.get_output_embeddings()
    outputs = {id(part.module): part for part in map(architecture.output, architecture.attentions(model))}
    total = 0.0

    def count(module: Any, args: Any, output: Tensor) -> None:
        nonlocal total
        share = asked if module is read_out and not causal else 1.0
        total += 2 * share * module.weight.numel()
        part = outputs.get(id(module))
        if part is not None:
            total += 4 * attended * part.count * part.width

    with undisturbed(model), ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D):
                stack.callback(module.register_forward_hook(count).remove)
        # each token passes the same matrices; of padding transformers would warn
        ids = torch.full((1, 2), int(model.config.pad_token_id == 0), device=model.device)
        model(**prepared(model, {"input_ids": ids, "labels": None}))
    return total


def missing_capacity(model: PreTrainedModel, batches: Iterable[dict[str, Any]], seed: int = 0) -> list[float | None]:
    """For each layer the first gradient that a new head on trial would get, as a share of all layers'; None where no head
    was lost."""
    places = candidates(model)
    by_layer: dict[int, list[float]] = {}
    if places:
        ready = [prepared(model, batch) for batch in batches]
        for (layer, _), wish in STRATEGIES["gradient"](model, places, ready, None, seed).items():
            by_layer.setdefault(layer, []).append(wish)
    means = {layer: sum(wishes) / len(wishes) for layer, wishes in by_layer.items()}
    total = sum(means.values()) or 1.0
    return [means[layer] / total if layer in means else None for layer in range(len(head_map(model)))]


@torch.no_grad()
def speeds(models: dict[str, PreTrainedModel], length: int, largest_only: bool = False) -> list[dict[str, Any]]:
    """Tokens a second that each model reads, at each batch size (or the largest) and at the whole length and a quarter
    of it. Models take turns."""
    device = next(iter(models.values())).device
    batches = SPEED_BATCHES.get(device.type, SPEED_BATCHES["cpu"])[-1 if largest_only else 0 :]
    rows = []
    with ExitStack() as stack:
        _ready(stack, models)
        for batch in batches:
            for tokens in sorted({max(2, length // 4), length}):
                runs = {name: reading(model, batch, tokens) for name, model in models.items()}
                times = take_turns(runs, device, SECONDS * len(models), warm_up=WARM_UP)
                rows.append({"batch": batch, "length": tokens, "tokens_per_second": _rates(times, batch * tokens)})
    return rows


def _ready(stack: ExitStack, models: dict[str, PreTrainedModel]) -> None:
    """The original computes as reorganised models do, so what is compared is what was removed."""
    for model in models.values():
        stack.enter_context(undisturbed(model))
        stack.enter_context(quickened(model))


def reading(model: PreTrainedModel, batch: int, length: int) -> Callable[[], None]:
    """A forward pass over so many rows of so many tokens, to be timed."""
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    inputs = prepared(model, {"input_ids": ids, "labels": None})
    if "logits_to_keep" in inspect.signature(model.forward).parameters:  # decoders have it
        inputs["logits_to_keep"] = 1

    def run() -> None:
        with computing(model):
            model(**inputs)

    return run


@torch.no_grad()
def reading_times(models: dict[str, PreTrainedModel], length: int) -> dict[str, float]:
    """Microseconds in which each model reads a batch of rows of this length, at the largest batch size. Models take turns; the
    quickest of the turns counts: whatever else the machine does only makes them longer."""
    device = next(iter(models.values())).device
    batch = SPEED_BATCHES.get(device.type, SPEED_BATCHES["cpu"])[-1]
    with ExitStack() as stack:
        _ready(stack, models)
        runs = {name: reading(model, batch, length) for name, model in models.items()}
        times = take_turns(runs, device, SECONDS * len(models), warm_up=WARM_UP)
    return {name: 1e6 * min(taken) for name, taken in times.items()}


PROMPT, WRITTEN = 4, 32  # tokens of a text that is timed while it is written


@torch.no_grad()
def writing_speeds(models: dict[str, PreTrainedModel]) -> dict[str, float]:
    """Tokens a second that decoders write, one text at a time, always the most probable token. Models take turns."""
    device = next(iter(models.values())).device
    tokens = min(WRITTEN, *(longest_input(model) - PROMPT for model in models.values()))
    with ExitStack() as stack:
        _ready(stack, models)
        runs = {name: _writing(model, tokens) for name, model in models.items()}
        times = take_turns(runs, device, SECONDS * len(models), warm_up=WARM_UP)
    return _rates(times, tokens)


def _rates(times: dict[str, list[float]], tokens: int) -> dict[str, float]:
    """Tokens a second of each. The first by the median of its turns, the others by how many times as fast they were in the same
    turn: a machine that others use too is slow by turns."""
    first = np.array(next(iter(times.values())))
    return {name: float(tokens / np.median(first) * np.median(first / taken)) for name, taken in times.items()}


def _writing(model: PreTrainedModel, tokens: int) -> Callable[[], None]:
    start = torch.randint(0, model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    inputs = {"inputs": start.to(model.device), "attention_mask": torch.ones_like(start, device=model.device)}
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens}

    def run() -> None:
        with computing(model):
            model.generate(**inputs, **length, do_sample=False, pad_token_id=0)

    return run
