"""Is refinement learned optimisation (the paper's §5.1)? Three things that would have to be true, measured at held-out tokens.

* The loss falls along the path h⁰ → hᵀ, at every step.
* An update points downhill: Δᵗ has a positive cosine with −∂ℓ/∂hᵗ⁻¹, ℓ the loss that the head reads at that state. Control: the
  gradient of the same state for labels shuffled among the targets: an update that points towards "some confident answer"
  agrees with that one too.
* Going on helps: more steps than were trained lower the loss further.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pnn.analysis.controls import shuffled
from pnn.analysis.subject import Subject, with_refiners
from pnn.analysis.totals import Array, Smallest, Totals, finding, ratio, ratios
from pnn.analysis.trace import trace_batch
from pnn.models.base import MaskedLMBase
from pnn.results import Finding
from pnn.studies.registry import Analysis

MARGIN = 0.01  # nats of loss; also of cosine, which for random directions is 1/√d at most by chance, and 0 on average


def of_one_path(model: MaskedLMBase) -> str | None:
    part_repeats = with_refiners(model) is None and model.config.repeat is not None
    further = (
        "more steps repeat a part of its schedule and do not go on from the last state: pnn analyze more_steps follows those"
    )
    return further if part_repeats else None


ABOUT = Analysis(
    question="Is refinement learned optimisation?",
    picture=(
        "If so, the loss falls at every step, goes on falling on the grey ground, where the model takes more steps than it was "
        "trained for, and updates have a positive cosine with the downhill direction, above that for shuffled labels."
    ),
    hypotheses={
        "loss_falls_at_every_step": "the loss at held-out tokens falls at every trained step",
        "updates_point_downhill": "every trained step's update points down the gradient of the loss",
        "more_steps_than_trained_help": "one step more than was trained lowers the loss further",
    },
    needs=(with_refiners, of_one_path),
)


def downhill(model: MaskedLMBase, rows: Tensor, labels: Tensor) -> Tensor:
    """−∂ℓ/∂h at each target's own state."""
    with torch.enable_grad():
        h = rows.detach().requires_grad_()
        loss = F.cross_entropy(model.head(h).float(), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, h)
    return -gradient


def run(subject: Subject) -> dict[str, Any]:
    """What analysis/optimisation.json holds."""
    model, text = subject.model, subject.text
    config: Any = model.config
    trained = (config.random_steps or [config.trained_steps or subject.num_steps])[-1]  # a calibrated model takes fewer
    steps = 2 * trained
    totals = Totals(len(text))
    for batch in text.batches():
        trace = trace_batch(model, batch, num_steps=steps)
        sequence, at = trace.target_sequence, trace.targets
        others = shuffled(trace.labels)
        totals.count("targets", sequence)
        totals.add("loss", sequence, torch.stack([reading.loss for reading in trace.readings], 1))
        totals.add("correct", sequence, torch.stack([reading.correct for reading in trace.readings], 1))
        for name, labels in (("cosine", trace.labels), ("shuffled cosine", others)):
            cosines = [
                F.cosine_similarity(step.change[at], downhill(model, h[at], labels), dim=1)
                for h, step in zip(trace.states[:-1], trace.steps, strict=True)
            ]
            totals.add(name, sequence, torch.stack(cosines, 1))
    return {
        "num_steps": trained,
        "steps_run": steps,
        "targets": int(totals.of("targets").sum()),
        "loss_by_step": ratios(totals, "loss", "targets"),
        "accuracy_by_step": ratios(totals, "correct", "targets", shares=True),
        "alignment_by_step": ratios(totals, "cosine", "targets"),
        "shuffled_alignment_by_step": ratios(totals, "shuffled cosine", "targets"),
        "findings": _findings(totals, trained),
    }


def _findings(totals: Totals, trained: int) -> dict[str, Finding]:
    targets = totals.of("targets")

    def falls(sums: Array) -> Array:
        losses = np.stack([ratio(sums[..., [t, -1]]) for t in range(trained + 1)], -1)
        return -np.diff(losses)

    def cosines(sums: Array, first: int) -> Array:
        return np.stack([ratio(sums[..., [first + t, -1]]) for t in range(trained)], -1)

    aligned, mixed = (totals.of(name)[:, :trained] for name in ("cosine", "shuffled cosine"))
    return {
        "loss_falls_at_every_step": finding(
            ABOUT.hypotheses["loss_falls_at_every_step"],
            "smallest fall of the loss from one step to the next, nats",
            np.concatenate((totals.of("loss")[:, : trained + 1], targets), 1),
            Smallest(falls),
            margin=MARGIN,
        ),
        "updates_point_downhill": finding(
            ABOUT.hypotheses["updates_point_downhill"],
            "smallest mean cosine between Δ and −∂ℓ/∂h among the steps",
            np.concatenate((aligned, mixed, targets), 1),
            Smallest(lambda sums: cosines(sums, 0)),
            margin=MARGIN,
            control="gradients for labels shuffled among the targets",
            control_statistic=Smallest(lambda sums: cosines(sums, trained)),
        ),
        "more_steps_than_trained_help": finding(
            ABOUT.hypotheses["more_steps_than_trained_help"],
            "fall of the loss from the last trained step to the next, nats",
            np.concatenate((totals.of("loss")[:, [trained, trained + 1]], targets), 1),
            lambda sums: ratio(sums[..., [0, 2]]) - ratio(sums[..., [1, 2]]),
            margin=MARGIN,
        ),
    }
