"""Does a Deep Delta decoder rewrite its state, and does it need to? What gates, read-outs and directions do in every sublayer
(`rewrite_trace`), what it costs to take them away (`rewrite_interventions`), and a verdict on each claim.

The unit of intervals is a row of held-out text. What the delta rule makes true of any gate (the error shrinks to |1 − β| of
what it was) is reported beside what was measured; what training made of the gates is held against the same model untrained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pnn.analysis.controls import untrained
from pnn.analysis.rewrite_interventions import intervening, interventions
from pnn.analysis.rewrite_trace import PARTS, REGIMES, SMALLEST, Rewrites, residuals_of, token_losses
from pnn.analysis.subject import Decoder
from pnn.analysis.token_kinds import TOKEN_KINDS, kinds_by_id, kinds_of
from pnn.analysis.totals import Array, Totals, finding, ratio, ratios
from pnn.errors import UserError
from pnn.models.ddl import DDLForCausalLM
from pnn.models.precision import undisturbed
from pnn.results import EstimateJson, Finding
from pnn.stats import bootstrap
from pnn.studies.registry import Analysis

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
SPREAD_MARGIN = 0.05  # of β, which lies between 0 and 2
LOSS_MARGIN = 0.01  # nats per token: about a per cent of perplexity
HALF = 0.5  # of the error, for a read-out that moves to its target; of the way from one layer to all, for a spread
REUSE_MARGIN = 0.02  # of |cos|
UNTRAINED = "the same model untrained"


def that_rewrites(model: Any) -> str | None:
    rewrites = isinstance(model, DDLForCausalLM)
    return None if rewrites else f"rewrites are those of a DDL decoder, and this is a {type(model).__name__}"


ABOUT = Analysis(
    question="Does the state get rewritten, and does it have to be?",
    picture=(
        "From top to bottom: where the gates β of every sublayer are, and for which tokens; how far the read-out is from its "
        "target before and after a rewrite; what it costs to hold gates shut, to write without erasing, or to fix β; and "
        "whether sublayers write along the same directions, at one token and, as a control, at two."
    ),
    hypotheses={
        "gates_differ_between_tokens": "gates are used: β differs between tokens",
        "gates_matter": "it matters which token gets which gate: the loss rises when every sublayer's β is set to its mean",
        "read_out_moves_to_target": (
            "the read-out moves to its target: a rewrite removes most of the error along its direction, "
            "more than before training"
        ),
        "erasure_matters": (
            "erasing matters to this model: the loss rises when erasure is switched off and only writing is left"
        ),
        "rewriting_is_spread_over_layers": "rewriting is spread over layers, not concentrated in a few",
        "directions_are_reused": "sublayers reuse one another's directions more than chance",
    },
    kind="causal",
    needs=(that_rewrites,),
)


def run(subject: Decoder) -> dict[str, Any]:
    """What analysis/rewrites.json holds."""
    model, rows, batch_rows = subject.model, subject.rows, subject.batch_rows
    erases = residuals_of(model)[0].erase
    if rows.dim() != 2 or rows.shape[1] < 2 or not len(rows):
        raise UserError("no text to analyse: rewrites need rows of two tokens or more")
    by_id = kinds_by_id(subject.tokenizer, model.config.vocab_size)

    def batches() -> Iterator[tuple[int, Tensor, Tensor]]:
        for first in range(0, len(rows), batch_rows):
            batch = rows[first : first + batch_rows].to(model.device)
            yield first, batch, kinds_of(batch, by_id)

    with undisturbed(model):
        trained, naive = (Rewrites(one, *rows.shape) for one in (model, untrained(model)))
        for first, batch, kinds in batches():
            trained.add(first, batch, kinds)
            naive.add(first, batch, kinds)
        totals = trained.totals
        kind_tokens = totals.of("kinds").sum(0)
        mean_beta = torch.from_numpy(totals.of("beta").sum(0) / totals.of("tokens").sum())
        changes = interventions(model, mean_beta, [kind for kind in range(len(TOKEN_KINDS)) if kind_tokens[kind]])
        for first, batch, kinds in batches():
            row_of = torch.arange(first, first + len(batch), device=model.device)
            for change in changes:
                with intervening(model, change, kinds):
                    totals.add(f"loss: {change.name}", row_of, token_losses(model, batch).double().sum(1))
    return {
        "layers": model.config.num_hidden_layers,
        "erases": erases,
        "tokens": int(totals.of("tokens").sum()),
        "tokens_by_kind": {name: int(kind_tokens[i]) for i, name in enumerate(TOKEN_KINDS)},
        "loss": ratios(totals, "loss", "targets")[0],
        "sublayers": _sublayers(trained, naive, erases),
        "shortcut": _shortcut(trained) if erases else None,  # without erasure it is the identity
        "directions": _directions(trained, model.config.hidden_size),
        "interventions": _interventions(totals, model.config.num_hidden_layers),
        "findings": _findings(trained, naive, erases),
    }


# What was measured ------------------------------------------------------------------------------------------------------


def _sublayers(seen: Rewrites, naive: Rewrites, erases: bool) -> list[dict[str, Any]]:
    """One entry a sublayer, in the order in which they rewrite. Shares `along` are of the squared norm. What is left of an
    error follows from a rule only where there is erasure: Σ |1 − β| |error before| / Σ |error before|."""
    totals = seen.totals

    def means(name: str) -> list[EstimateJson]:
        return ratios(totals, name, "tokens")

    tokens, kind_tokens = totals.of("tokens").sum(), totals.of("kinds").sum(0)
    beta, distance, before, after = (means(name) for name in ("beta", "distance from one", "error_before", "error_after"))
    left, by_rule = (ratios(totals, name, "error_before") for name in ("error_after", "error by the rule"))
    along, along_after, erasure, writing = (means(name) for name in ("along_before", "along_after", "erasure", "writing"))
    deviation, untrained_deviation = (_deviations(_beta_sums(one).sum(0)) for one in (seen, naive))
    return [
        {
            "layer": s // len(PARTS) + 1,
            "part": PARTS[s % len(PARTS)],
            "beta": {
                "mean": beta[s],
                "deviation": float(deviation[s]),  # between tokens
                "untrained_deviation": float(untrained_deviation[s]),
                "distance_from_one": distance[s],
                "by_kind": {
                    name: float(seen.kind_beta[i, s] / kind_tokens[i]) for i, name in enumerate(TOKEN_KINDS) if kind_tokens[i]
                },
                "histogram": seen.histogram[:, s].sum(0).tolist(),  # from 0 to 2
                "histogram_by_kind": {name: seen.histogram[i, s].tolist() for i, name in enumerate(TOKEN_KINDS)},
            },
            "regimes": {name: int(seen.regimes[s, i]) / tokens for i, name in enumerate(REGIMES)},
            "error": {
                "before": before[s],
                "after": after[s],
                "left": left[s],
                "left_by_the_rule": by_rule[s] if erases else None,
            },
            "along": {"before": along[s], "after": along_after[s]},
            "update": {"erasure": erasure[s], "writing": writing[s], "erased_share": _erased_share(totals, s)},
        }
        for s in range(seen.size)
    ]


def _erased_share(totals: Totals, sublayer: int) -> EstimateJson:
    erasure, writing = totals.of("erasure")[:, sublayer], totals.of("writing")[:, sublayer]
    return bootstrap(np.stack((erasure, erasure + writing), 1), ratio).as_json()


def _shortcut(seen: Rewrites) -> dict[str, Any]:
    """`kept` and `lost`: how many directions of a sampled token have singular values above 0.9 and below 0.1; `smallest`: as
    many as there are sublayers, the smallest last. Lists are quantiles over sampled tokens."""
    values, logs = torch.cat(seen.singular), torch.cat(seen.log_determinants)

    def quantiles(x: Tensor) -> list[Any]:
        found: list[Any] = torch.quantile(x.double(), torch.tensor(QUANTILES, dtype=torch.float64), dim=0).tolist()
        return found

    return {
        "log_determinant": ratios(seen.totals, "log determinant", "tokens")[0],
        "smallest_factor": SMALLEST,  # |1 − β| counts as at least this
        "negative_determinant": ratios(seen.totals, "negative determinant", "tokens")[0],
        "sampled_tokens": len(values),
        "width": values.shape[1],
        "quantiles": list(QUANTILES),
        "log_determinant_quantiles": quantiles(logs),
        "kept": quantiles((values > 0.9).sum(1)),
        "lost": quantiles((values < 0.1).sum(1)),
        "smallest": quantiles(values[:, -seen.size :]),
    }


def chance(width: int) -> float:
    """Mean |cos| of two random directions of so many dimensions."""
    return math.sqrt(2 / (math.pi * width))


def _directions(seen: Rewrites, width: int) -> dict[str, Any]:
    tokens = seen.totals.of("tokens").sum()
    return {
        "chance": chance(width),
        "same_token": (seen.same_token / tokens).tolist(),
        "other_tokens": (seen.other_token / tokens).tolist(),
        "mean_same_token": ratios(seen.totals, "same token", "tokens")[0],  # over pairs of different sublayers
        "mean_other_tokens": ratios(seen.totals, "other token", "tokens")[0],
    }


def _rises(totals: Totals, name: str) -> Array:
    """(rows, 2): the rise in summed loss, and targets."""
    return np.concatenate((totals.of(f"loss: {name}") - totals.of("loss"), totals.of("targets")), 1)


def _interventions(totals: Totals, layers: int) -> dict[str, Any]:
    """Of each: the loss, and by how much it is above that of the model left alone. None: cannot be done to this model."""

    def cost(name: str) -> dict[str, Any] | None:
        if f"loss: {name}" not in totals:
            return None
        loss = ratios(totals, f"loss: {name}", "targets")[0]
        return {"loss": loss, "rise": bootstrap(_rises(totals, name), ratio).as_json()}

    return {
        "shut_all": cost("all"),
        "shut_by_layer": [cost(f"layer {layer + 1}") for layer in range(layers)],
        "shut_by_part": {part: cost(part) for part in PARTS},
        "shut_by_kind": {kind: cost(kind) for kind in TOKEN_KINDS},
        "no_erasure": cost("no erasure"),
        "mean_beta": cost("mean beta"),
        "beta_one": cost("beta one"),
    }


# What follows from it ---------------------------------------------------------------------------------------------------


def _beta_sums(seen: Rewrites) -> Array:
    """(rows, 2 S + 1): what `_deviations` reads."""
    return np.concatenate([seen.totals.of(name) for name in ("beta", "beta squared", "tokens")], 1)


def _deviations(sums: Array) -> Array:
    """Standard deviation of β between tokens, in each sublayer."""
    mean, square = np.split(sums[..., :-1] / sums[..., -1:], 2, axis=-1)
    found: Array = np.sqrt(np.maximum(square - mean**2, 0))
    return found


def _findings(trained: Rewrites, naive: Rewrites, erases: bool) -> dict[str, Finding]:
    totals = trained.totals
    layers = trained.size // len(PARTS)
    found = {
        "gates_differ_between_tokens": _gates_differ(trained, naive),
        "gates_matter": finding(
            ABOUT.hypotheses["gates_matter"],
            "loss with β at its mean − loss, nats per token",
            _rises(totals, "mean beta"),
            ratio,
            margin=LOSS_MARGIN,
        ),
        "read_out_moves_to_target": _read_out_moves(trained, naive),
        "erasure_matters": _erasure_matters(totals) if erases else _no_erasure(),
    }
    if layers > 1:
        found["rewriting_is_spread_over_layers"] = _spread_over_layers(totals, layers)
    found["directions_are_reused"] = _reused(totals, chance(trained.model.config.hidden_size))
    return found


def _gates_differ(trained: Rewrites, naive: Rewrites) -> Finding:
    width = 2 * trained.size + 1
    return finding(
        ABOUT.hypotheses["gates_differ_between_tokens"],
        "standard deviation of β between tokens, mean over sublayers",
        np.concatenate((_beta_sums(trained), _beta_sums(naive)), 1),
        lambda sums: _deviations(sums[..., :width]).mean(-1),
        margin=SPREAD_MARGIN,
        control=UNTRAINED,
        control_statistic=lambda sums: _deviations(sums[..., width:]).mean(-1),
    )


def _read_out_moves(trained: Rewrites, naive: Rewrites) -> Finding:
    """Fresh gates are near 1 and remove most of the error already, so training has to make it more."""

    def removed(column: int) -> Callable[[Array], Array]:
        return lambda sums: 1 - ratio(sums[..., column : column + 2])

    errors = [one.totals.of(name).sum(1) for one in (trained, naive) for name in ("error_after", "error_before")]
    return finding(
        ABOUT.hypotheses["read_out_moves_to_target"],
        "1 − Σ |error after| / Σ |error before|, over tokens and sublayers",
        np.stack(errors, 1),
        removed(0),
        margin=HALF,
        control=UNTRAINED,
        control_statistic=removed(2),
    )


def _erasure_matters(totals: Totals) -> Finding:
    measure = "loss without the erasure − loss, nats per token"
    hypothesis = ABOUT.hypotheses["erasure_matters"]
    return finding(hypothesis, measure, _rises(totals, "no erasure"), ratio, margin=LOSS_MARGIN)


def _no_erasure() -> Finding:
    return {
        "hypothesis": ABOUT.hypotheses["erasure_matters"],
        "not_done": "this model only writes (residual write_only): it has no erasure to switch off",
    }


def evenness(rises: Array) -> Array:
    """0: all in one of n; 1: the same in each. (Σ a)² / Σ a² is how many share it. Falls count as nothing."""
    positive = np.maximum(rises, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        shared: Array = positive.sum(-1) ** 2 / np.square(positive).sum(-1)
    evenly: Array = (shared - 1) / (rises.shape[-1] - 1)
    return evenly


def _spread_over_layers(totals: Totals, layers: int) -> Finding:
    hypothesis = ABOUT.hypotheses["rewriting_is_spread_over_layers"]
    names = [f"layer {layer + 1}" for layer in range(layers)]
    if not any(bootstrap(_rises(totals, name), ratio).low > LOSS_MARGIN for name in names):  # the rest would be noise
        return {"hypothesis": hypothesis, "not_done": "the loss does not rise when the gates of any one layer are shut"}
    return finding(
        hypothesis,
        "how evenly layers share the rises in loss when the gates of one are shut: 0 all in one layer, 1 all alike",
        np.concatenate([_rises(totals, name)[:, :1] for name in names], 1),
        evenness,
        margin=HALF,
    )


def _reused(totals: Totals, by_chance: float) -> Finding:
    def beyond_chance(column: int) -> Callable[[Array], Array]:
        return lambda sums: ratio(sums[..., [column, 2]]) - by_chance

    return finding(
        ABOUT.hypotheses["directions_are_reused"],
        "mean |cos| between directions of two sublayers at the same token − that of random directions",
        np.concatenate([totals.of(name) for name in ("same token", "other token", "tokens")], 1),
        beyond_chance(0),
        margin=REUSE_MARGIN,
        control="directions of two sublayers at two tokens of the same row",
        control_statistic=beyond_chance(1),
    )
