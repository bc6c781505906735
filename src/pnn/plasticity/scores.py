"""How useful each head is, by six measures, and which ones to prune.

    entropy       H = mean over rows of −Σ_j A_ij ln A_ij      nats; uniform attention over S keys has ln S, one-hot 0
    magnitude     ‖W_Q‖ + ‖W_K‖ + ‖W_V‖ + ‖W_O‖                of the head's part of each matrix (Frobenius)
    contribution  loss with the head masked − loss             exact leave-one-out: one pass over the data a head
    gradient      mean over rows of |∂(row's loss)/∂g|         at g = 1, g the head's gate: first order of the same, all heads
                                                               in one forward and backward; rows weigh as their targets do
    random        uniform in [0, 1), by seed
    combined      mean of the ranks by entropy, magnitude and gradient (contribution would cost a pass a head)

Heads with *high* entropy look everywhere and go first; by every other measure the *lowest* go. `Scores` remembers which.

Departures from the source. The gradient's absolute value is taken row by row: on text that a model knows, the gradient of the
mean loss is zero in expectation, for gates as for all else, and its size is noise. The source's entropy adds ε inside the
logarithm; here 0 ln 0 = 0. Under a causal mask row i has at most ln(i + 1): all heads have the same rows, so a comparison of
heads is fair; `normalised_entropy` divides every row by what is possible there (rows that see one key are left out) and lies in
[0, 1]. Rows of padding do not count. The loss is a mean over targets of all batches, not a mean of the batches' means.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pnn.errors import UserError, did_you_mean
from pnn.models.precision import undisturbed
from pnn.models.registry import kind_of
from pnn.objectives import IGNORE
from pnn.plasticity.architectures import HEAD, architecture_of
from pnn.plasticity.heads import Head, head_map, heads, stretches
from pnn.plasticity.units import Gates, gated, open_gates

Batch = Mapping[str, Any] | Tensor  # what a model's forward takes, or its input_ids alone
ROUNDING = 1e-9  # 0.29 · 100 is 28.999…, and means 29


class Scores(dict[Head, float]):
    """A number for each head, and whether the highest or the lowest go first."""

    def __init__(self, values: Mapping[Head, float], *, highest_go: bool = False):
        super().__init__(values)
        self.highest_go = highest_go

    def usefulness(self) -> dict[Head, float]:
        """The same numbers so that higher is better."""
        return {head: -value if self.highest_go else value for head, value in self.items()}


def score(model: PreTrainedModel, batches: Iterable[Batch] | None = None, method: str = "gradient", *, seed: int = 0) -> Scores:
    """A score for every head of the model. `batches` hold what the model takes (`input_ids`, `attention_mask`, `labels`, …) or
    are `input_ids` themselves; a causal model's labels are its inputs where none are given. magnitude and random need none."""
    if method not in METHODS:
        raise UserError(f"unknown score of heads {method!r}{did_you_mean(method, METHODS)}")
    architecture_of(model)
    ready = [prepared(model, batch) for batch in batches or ()]
    if not ready and method not in ("magnitude", "random"):
        raise UserError(f"scoring heads by {method} needs batches of text")
    with undisturbed(model):
        scores = METHODS[method](model, ready, seed)
    wrong = next((head for head, value in scores.items() if not math.isfinite(value)), None)
    if wrong is not None:
        raise UserError(f"the score of head {wrong[1]} in layer {wrong[0]} is {scores[wrong]}: the model's numbers overflow")
    return scores


def choose(scores: Mapping[Head, float], ratio: float, *, per_layer: bool = False, floor: int = 1) -> list[Head]:
    """The heads to prune: ⌊ratio · N⌋ of N, the least useful first, ties by (layer, index). A layer keeps at least `floor`
    (0 lets whole layers go). `per_layer` takes the same share of every layer; where that is no whole number, layers with the
    largest remainder lose one more, so that the total is the same."""
    if not 0 <= ratio <= 1:
        raise UserError(f"cannot prune {ratio} of the heads: expected a share between 0 and 1")
    useful = scores.usefulness() if isinstance(scores, Scores) else dict(scores)
    order = sorted(useful, key=lambda head: (useful[head], head))
    layers = sorted({layer for layer, _ in order})
    sizes = {layer: sum(at == layer for at, _ in order) for layer in layers}
    wanted = share_of(len(order), ratio)
    allowed = {layer: max(0, sizes[layer] - floor) for layer in layers}
    if per_layer:
        allowed = {layer: min(allowed[layer], quota) for layer, quota in _quotas(sizes, ratio, wanted).items()}
    gone: list[Head] = []
    for head in order:
        if len(gone) < wanted and allowed[head[0]] > 0:
            allowed[head[0]] -= 1
            gone.append(head)
    if len(gone) < wanted:
        raise UserError(
            f"cannot prune {wanted} of {len(order)} heads and keep {floor} in each layer: at most {len(gone)} can go"
            + (" when every layer loses the same share" if per_layer else "")
        )
    return sorted(gone)


def share_of(count: int, ratio: float) -> int:
    """⌊ratio · count⌋, without the surprises of binary fractions."""
    return math.floor(ratio * count + ROUNDING)


def _quotas(sizes: Mapping[int, int], ratio: float, wanted: int) -> dict[int, int]:
    quotas = {layer: share_of(size, ratio) for layer, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda layer: (quotas[layer] - ratio * sizes[layer], layer))
    for layer in by_remainder[: wanted - sum(quotas.values())]:
        quotas[layer] += 1
    return quotas


# Measures -------------------------------------------------------------------------------------------------------------


def row_entropy(weights: Tensor) -> Tensor:
    """−Σ_j A_ij ln A_ij of each row, in nats."""
    return torch.special.entr(weights.float()).sum(-1)


def attention_entropy(
    model: PreTrainedModel, batches: Sequence[dict[str, Any]], *, normalised: bool = False
) -> tuple[dict[Head, float], float]:
    """Mean entropy of each head's rows, and the mean of what was possible, ln(keys in sight)."""
    architecture, layers = architecture_of(model), head_map(model)
    sums = [torch.zeros(len(row), dtype=torch.float64, device=model.device) for row in layers]
    rows = torch.zeros((), dtype=torch.float64, device=model.device)
    possible = torch.zeros_like(rows)
    passes = [torch.zeros_like(rows) for _ in layers]  # rows that each layer has seen: a refiner runs several times
    keep_of_batch: Tensor | None = None
    # Qwen2 says it of every layer, Mistral of all
    everywhere = getattr(model.config, "sliding_window", None)
    windows = [getattr(attention, "sliding_window", everywhere) for attention in architecture.attentions(model)]

    def see(layer: int, weights: Tensor, keep: Tensor | None) -> None:
        nonlocal rows, possible
        keep = keep_of_batch if keep is None else keep
        real = weights.new_ones(weights.shape[0], weights.shape[2], dtype=torch.bool) if keep is None else keep.bool()
        in_sight = _keys_in_sight(real, kind_of(model).causal, windows[layer])
        most = in_sight.clamp(min=1).double().log()
        entropy = row_entropy(weights).double()
        if normalised:
            real = real & (in_sight > 1)
            entropy = entropy / most.clamp(min=1e-12)[:, None]
        by_query = (entropy * real[:, None]).sum((0, 2))
        sums[layer] += by_query.view(len(layers[layer]), -1).mean(1)  # a group of queries counts as one head
        passes[layer] += real.sum()
        rows, possible = rows + real.sum(), possible + (most * real).sum()

    with torch.no_grad(), architecture.watching(model, see):
        for batch in batches:
            mask = batch.get("attention_mask")
            keep_of_batch = None if mask is None else mask.bool()
            model(**{key: value for key, value in batch.items() if key != "labels"})
    means = {
        (layer, index): float(sums[layer][position] / passes[layer].clamp(min=1))
        for layer, row in enumerate(layers)
        for position, index in enumerate(row)
    }
    return means, float(possible / rows.clamp(min=1))


def _keys_in_sight(real: Tensor, causal: bool, window: int | None) -> Tensor:
    """How many keys each query sees, (rows, tokens): padding is not seen, nor what lies further back than the window."""
    if not causal:
        return real.sum(1, keepdim=True).expand(real.shape)
    seen = real.cumsum(1)
    if window is not None and window < real.shape[1]:
        seen[:, window:] -= seen[:, :-window].clone()
    return seen


def _entropy(model: PreTrainedModel, batches: Sequence[dict[str, Any]], seed: int) -> Scores:
    return Scores(attention_entropy(model, batches)[0], highest_go=True)


def _normalised_entropy(model: PreTrainedModel, batches: Sequence[dict[str, Any]], seed: int) -> Scores:
    return Scores(attention_entropy(model, batches, normalised=True)[0], highest_go=True)


def _magnitude(model: PreTrainedModel, batches: Sequence[dict[str, Any]], seed: int) -> Scores:
    def norms(head: Head) -> float:
        matrices = [one.view().detach().float() for one in stretches(model, head) if one.parameter.dim() > 1]
        return float(torch.stack([matrix.norm() for matrix in matrices]).sum())

    return Scores({head: norms(head) for head in heads(model)})


def _contribution(model: PreTrainedModel, batches: Sequence[dict[str, Any]], seed: int) -> Scores:
    return _of_heads(model, left_out(model, batches, (HEAD,)))


def _gradient(model: PreTrainedModel, batches: Sequence[dict[str, Any]], seed: int) -> Scores:
    return _of_heads(model, gate_slopes(model, batches, (HEAD,)))


def _of_heads(model: PreTrainedModel, found: Gates) -> Scores:
    layers = head_map(model)
    return Scores(
        {(layer, index): float(values[at]) for (_, layer), values in found.items() for at, index in enumerate(layers[layer])}
    )


def left_out(model: PreTrainedModel, batches: Sequence[dict[str, Any]], kinds: Sequence[str]) -> Gates:
    """The loss without each unit of these kinds, less the loss: a pass over the data each."""
    gates = open_gates(model, kinds)
    found = {at: torch.zeros_like(gate, dtype=torch.float64, device="cpu") for at, gate in gates.items()}
    with torch.no_grad(), gated(model, gates):
        base = float(mean_loss(model, batches))
        for at, gate in gates.items():
            for position in range(len(gate)):
                gate[position] = 0
                found[at][position] = float(mean_loss(model, batches)) - base
                gate[position] = 1
    return found


def gate_slopes(model: PreTrainedModel, batches: Sequence[dict[str, Any]], kinds: Sequence[str], power: int = 1) -> Gates:
    """The sum over rows of |∂(row's loss)/∂g|^power per target, for every gate g of these kinds: one forward and one backward
    pass over the data."""
    total = 0
    sizes = {at: torch.zeros_like(gate, dtype=torch.float64) for at, gate in open_gates(model, kinds).items()}
    with torch.enable_grad():
        for batch in batches:
            targets = count_targets(model, batch)
            if not targets:
                continue
            total += targets
            rows = batch["input_ids"].shape[:-1].numel()
            gates = {at: gate.expand(rows, -1).clone().requires_grad_() for at, gate in open_gates(model, kinds).items()}
            with gated(model, gates):  # a gate for each row: one backward pass gives each row's own gradient
                slopes = torch.autograd.grad(targets * batch_loss(model, batch), list(gates.values()))
            for at, slope in zip(gates, slopes, strict=True):
                sizes[at] += slope.abs().double().pow(power).sum(0)
    _some_targets(total)
    return {at: size.cpu() / total for at, size in sizes.items()}


def _random(model: PreTrainedModel, batches: Sequence[dict[str, Any]], seed: int) -> Scores:
    draw = random.Random(seed)
    return Scores({head: draw.random() for head in heads(model)})


def _combined(model: PreTrainedModel, batches: Sequence[dict[str, Any]], seed: int) -> Scores:
    ranks = [_ranks(measure(model, batches, seed).usefulness()) for measure in (_entropy, _magnitude, _gradient)]
    return Scores({head: sum(rank[head] for rank in ranks) / len(ranks) for head in heads(model)})


def _ranks(useful: Mapping[Head, float]) -> dict[Head, float]:
    """0 for the least useful, 1 for the most; equal ones share theirs."""
    values = torch.tensor(list(useful.values()), dtype=torch.float64)
    below = (values[None] < values[:, None]).sum(1) + ((values[None] == values[:, None]).sum(1) - 1) / 2
    return dict(zip(useful, (below / max(1, len(values) - 1)).tolist(), strict=True))


METHODS: dict[str, Callable[[PreTrainedModel, Sequence[dict[str, Any]], int], Scores]] = {
    "entropy": _entropy,
    "normalised_entropy": _normalised_entropy,
    "magnitude": _magnitude,
    "contribution": _contribution,
    "gradient": _gradient,
    "random": _random,
    "combined": _combined,
}


# The loss -------------------------------------------------------------------------------------------------------------


def mean_loss(model: PreTrainedModel, batches: Iterable[dict[str, Any]]) -> Tensor:
    """The model's loss over all targets of all batches."""
    total, sum_ = 0, torch.zeros((), dtype=torch.float64, device=model.device)
    for batch in batches:
        targets = count_targets(model, batch)
        if targets:
            total += targets
            sum_ = sum_ + targets * batch_loss(model, batch).double()
    _some_targets(total)
    return sum_ / total


def loss_gradients(model: PreTrainedModel, batches: Iterable[dict[str, Any]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of `mean_loss` for these tensors alone: one forward and one backward pass over the data. No parameter's
    `grad` is touched."""
    total, sums = 0, [torch.zeros_like(tensor) for tensor in inputs]
    with torch.enable_grad():
        for batch in batches:
            targets = count_targets(model, batch)
            if targets:
                total += targets
                gradients = torch.autograd.grad(targets * batch_loss(model, batch), inputs)
                sums = [sum_ + gradient for sum_, gradient in zip(sums, gradients, strict=True)]
    _some_targets(total)
    return [sum_ / total for sum_ in sums]


def batch_loss(model: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
    if model.base_model is model:
        raise UserError("a model without a head computes no loss: score its attention by entropy or magnitude")
    return model(**batch).loss


def count_targets(model: PreTrainedModel, batch: Mapping[str, Any]) -> int:
    if batch.get("labels") is None:
        raise UserError('batches need "labels" to measure a loss: the tokens behind the masks, −100 elsewhere')
    labels = batch["labels"]
    shifted = kind_of(model).causal and labels.dim() > 1  # a decoder's first token is nobody's target
    return int((labels[:, 1:] if shifted else labels).ne(IGNORE).sum())


def _some_targets(total: int) -> None:
    if total == 0:
        raise UserError("no batch has a token to predict: every label is −100")


def prepared(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """A batch on the model's device. A causal model's labels are its inputs, and it needs no cache."""
    given = {"input_ids": batch} if isinstance(batch, Tensor) else batch
    ready = {key: moved(value, model.device) if isinstance(value, Tensor) else value for key, value in given.items()}
    if kind_of(model).causal:
        ready.setdefault("use_cache", False)
        if "labels" not in ready and model.get_output_embeddings() is not None:
            ready["labels"] = _own_labels(ready["input_ids"], ready.get("attention_mask"))
    return ready


def moved(x: Tensor, device: torch.device) -> Tensor:
    """On this device. From the host's ordinary memory torch waits until a GPU has done all that was issued, from pinned memory
    it does not."""
    from_host = x.device.type == "cpu" and device.type == "cuda"
    return x.contiguous().pin_memory().to(device, non_blocking=True) if from_host else x.to(device)


def _own_labels(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Every token that a token precedes: padding is no target, and none is predicted from it."""
    if mask is None:
        return ids
    labels = ids.masked_fill(mask == 0, IGNORE)
    labels[..., 1:].masked_fill_(mask[..., :-1] == 0, IGNORE)
    return labels
