"""From a model to a smaller one, in our way and in the ways of others. Each gets the same calibration rows and the same number
of parameters to leave; nothing learns here.

    ours             fisher, one budget over heads, neurons and layers, then repair: what `pnn shrink` does before it learns
    ours_unrepaired  the same without repair
    ours_width       the same as ours with the width of the state as one more kind: `--kinds heads,neurons,layers,width`
    ours_surgeon     how many of each layer by fisher, which of them by the surgeon's error, then repair: `--by surgeon`
    llm_pruner       LLM-Pruner's recipe (Ma et al., 2023), written from its description: what depends on one another goes
                     together, a head or a neuron with all its weights; such a group is worth

                         I = Σ over its weights of |w · ∂L/∂w|      L: the mean loss over the calibration rows

                     The first eighth and the last sixteenth of the layers are left alone, at least one each; all others lose
                     the same share of heads and of neurons, the least worth in each.
    tp_width         Torch-Pruning 1.6 as in its example for language models: width, heads and neurons lose the same share,
                     everywhere alike, by the mean size of a group's weights (GroupMagnitudeImportance, p = 2)
    tp_taylor        Torch-Pruning with GroupTaylorImportance, heads and neurons alone, every layer alike

A group of key and value with its queries is one head throughout. Torch-Pruning is imported where it is used: `pip install
torch-pruning`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.models.precision import undisturbed
from pnn.plasticity import prune
from pnn.plasticity.architectures import ALL_KINDS, HEAD, KINDS, NEURON, architecture_of
from pnn.plasticity.budget import as_many, fewer_parameters
from pnn.plasticity.repair import repair
from pnn.plasticity.scores import loss_gradients, prepared
from pnn.plasticity.unit_scores import score_units
from pnn.plasticity.units import Gates, Unit, parameters_of, unit_map

Batches = Sequence[dict[str, Any]]
Recipe = Callable[[PreTrainedModel, Batches, float], PreTrainedModel]
CLOSE = 0.01  # of the parameters left, by which arms may differ
ROUND_TO = 4  # channels, as Torch-Pruning's example has it


def count(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Ours -----------------------------------------------------------------------------------------------------------------


def ours_unrepaired(model: PreTrainedModel, batches: Batches, share: float) -> PreTrainedModel:
    return prune(model, fewer_parameters(model, score_units(model, batches, "fisher", KINDS), share))


def ours(model: PreTrainedModel, batches: Batches, share: float) -> PreTrainedModel:
    return repair(ours_unrepaired(model, batches, share), model, batches)


def ours_width(model: PreTrainedModel, batches: Batches, share: float) -> PreTrainedModel:
    gone = fewer_parameters(model, score_units(model, batches, "fisher", ALL_KINDS), share)
    return repair(prune(model, gone), model, batches)


def ours_surgeon(model: PreTrainedModel, batches: Batches, share: float) -> PreTrainedModel:
    numbers = fewer_parameters(model, score_units(model, batches, "fisher", KINDS), share)
    gone = as_many(model, numbers, score_units(model, batches, "surgeon", (HEAD, NEURON)))
    return repair(prune(model, gone), model, batches)


# LLM-Pruner's recipe --------------------------------------------------------------------------------------------------


def taylor_of_groups(model: PreTrainedModel, batches: Batches) -> Gates:
    """I of every head and neuron, by (kind, layer)."""
    architecture = architecture_of(model)
    blocks = architecture.blocks(model)
    parts = {(kind, layer): architecture.parts(kind, block) for layer, block in enumerate(blocks) for kind in (HEAD, NEURON)}
    weights = [part.weight for of_unit in parts.values() for part in of_unit]
    with undisturbed(model):
        slopes = loss_gradients(model, [prepared(model, batch) for batch in batches], weights)
    worth = {id(weight): (weight.detach() * slope).abs() for weight, slope in zip(weights, slopes, strict=True)}
    found: Gates = {}
    for at, of_unit in parts.items():
        sums = [
            sum(one.of(worth[id(part.weight)]).sum() for one in part.stretches(place) if one.parameter is part.weight)
            for part in of_unit
            for place in range(part.count)
        ]
        found[at] = torch.stack([torch.as_tensor(one) for one in sums]).view(len(of_unit), -1).sum(0).double().cpu()
    return found


def layers_between(layers: int) -> range:
    """Those that are pruned."""
    return range(max(1, round(layers / 8)), layers - max(1, round(layers / 16)))


def chosen_by_llm_pruner(model: PreTrainedModel, worth: Gates, share: float) -> list[Unit]:
    """The same share of every layer between: heads to the nearest whole one, and as many neurons as are then missing."""
    between = layers_between(len(unit_map(model, HEAD)))
    maps = {kind: unit_map(model, kind) for kind in (HEAD, NEURON)}
    prices = {(kind, layer): parameters_of(model, kind, layer) for kind in maps for layer in between}
    wanted = share * count(model)
    part = wanted / sum(prices[kind, layer] * len(maps[kind][layer]) for kind, layer in prices)
    lost = {(HEAD, layer): min(round(part * len(maps[HEAD][layer])), len(maps[HEAD][layer]) - 1) for layer in between}
    missing = wanted - sum(number * prices[at] for at, number in lost.items())
    part = missing / sum(prices[NEURON, layer] * len(maps[NEURON][layer]) for layer in between)
    lost |= {(NEURON, layer): round(part * len(maps[NEURON][layer])) for layer in between}
    if any(number >= len(maps[kind][layer]) for (kind, layer), number in lost.items()):
        alone = len(unit_map(model, HEAD)) - len(between)
        raise UserError(
            f"LLM-Pruner's recipe leaves {alone} layers alone, and the others cannot give {share:.0%} of all parameters"
        )
    return sorted(
        Unit(kind, layer, maps[kind][layer][place])
        for (kind, layer), number in lost.items()
        for place in worth[kind, layer].argsort(stable=True)[:number].tolist()
    )


def llm_pruner(model: PreTrainedModel, batches: Batches, share: float) -> PreTrainedModel:
    return prune(model, chosen_by_llm_pruner(model, taylor_of_groups(model, batches), share))


# Torch-Pruning --------------------------------------------------------------------------------------------------------


def torch_pruning() -> Any:
    try:
        import torch_pruning
    except ImportError:
        raise UserError(
            "the arms tp_width and tp_taylor need Torch-Pruning: pip install torch-pruning, or leave them out with --arms"
        ) from None
    return torch_pruning


def tp_width(model: PreTrainedModel, batches: Batches, share: float) -> PreTrainedModel:
    return _by_torch_pruning(
        model, batches, share, torch_pruning().importance.GroupMagnitudeImportance(p=2, group_reduction="mean"), width=True
    )


def tp_taylor(model: PreTrainedModel, batches: Batches, share: float) -> PreTrainedModel:
    return _by_torch_pruning(model, batches, share, torch_pruning().importance.GroupTaylorImportance(), width=False)


def _by_torch_pruning(model: PreTrainedModel, batches: Batches, share: float, importance: Any, width: bool) -> PreTrainedModel:
    """The ratio for which so many parameters are left is found by halving: first with the same for heads and the rest, then,
    because heads are few and large, of the rest alone."""
    target = (1 - share) * count(model)
    with undisturbed(model):
        slopes = loss_gradients(model, [prepared(model, batch) for batch in batches], list(model.parameters()))

    def cut(ratio: float, heads: float) -> PreTrainedModel:
        small = copy.deepcopy(model)
        for parameter, slope in zip(small.parameters(), slopes, strict=True):
            parameter.grad = slope.clone()  # where Torch-Pruning looks for it
        return _cut(small, importance, ratio, heads, width)

    def halve(of: Callable[[float], PreTrainedModel]) -> tuple[float, PreTrainedModel]:
        low, high, best = 0.0, 1.0, (0.0, model)
        for _ in range(HALVINGS):
            ratio = (low + high) / 2
            found = of(ratio)
            if abs(count(found) - target) < abs(count(best[1]) - target):
                best = ratio, found
            low, high = (ratio, high) if count(found) > target else (low, ratio)
        return best

    heads, _ = halve(lambda ratio: cut(ratio, ratio))
    _, found = halve(lambda ratio: cut(ratio, heads))
    found.zero_grad()
    return found


HALVINGS = 9


def _cut(model: PreTrainedModel, importance: Any, ratio: float, heads: float, width: bool) -> PreTrainedModel:
    """This very model, smaller. Torch-Pruning does not come to an end on a vocabulary matrix that is tied, nor where queries
    share keys (its issue 527). So the matrix is untied here and tied again behind, both halves lose the same columns; and where
    queries share keys no head goes."""
    config, tied = model.config, model.config.tie_word_embeddings
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(head, nn.Linear)
    if tied:
        slope = head.weight.grad
        head.weight = nn.Parameter(head.weight.detach().clone())
        head.weight.grad = slope
    architecture = architecture_of(model)
    attentions: list[Any] = architecture.attentions(model)
    roots = [part for one in attentions for part in (one.q_proj, one.k_proj, one.v_proj)]
    grouped = config.num_attention_heads != config.num_key_value_heads
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # that it prunes the norms' weights too
        torch_pruning().pruner.BasePruner(
            model,
            example_inputs={"input_ids": torch.zeros(1, 8, dtype=torch.long, device=model.device), "use_cache": False},
            importance=importance,
            pruning_ratio=ratio,
            head_pruning_ratio=heads,
            ignored_layers=[head, *([] if width else [embeddings]), *(roots if grouped else [])],
            num_heads={} if grouped else dict.fromkeys(roots, config.num_attention_heads),
            prune_num_heads=True,
            prune_head_dims=False,
            output_transform=lambda found: found.logits,
            round_to=ROUND_TO,
        ).step()
    if tied:
        head.weight = embeddings.weight
    config.hidden_size = head.in_features
    config.intermediate_size = architecture.neurons(architecture.blocks(model)[0])[-1].module.in_features
    config.num_key_value_heads = attentions[0].k_proj.out_features // attentions[0].head_dim
    config.num_attention_heads = attentions[0].q_proj.out_features // attentions[0].head_dim
    return model


RECIPES: dict[str, Recipe] = {
    "ours": ours,
    "ours_unrepaired": ours_unrepaired,
    "ours_surgeon": ours_surgeon,
    "ours_width": ours_width,
    "llm_pruner": llm_pruner,
    "tp_width": tp_width,
    "tp_taylor": tp_taylor,
}
