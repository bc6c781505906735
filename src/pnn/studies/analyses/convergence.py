"""When do predictions settle? The paper's classes and its "steps to convergence", and the honest ones beside them.

With y_t the likeliest token after step t and y* the right one, at masked tokens only:

* easy: y_0 = y*;  medium: y_0 ≠ y*, y_T = y*;  hard: neither. The paper's classes, recovered from its figure.
* convergence step: the first t ≥ 1 with y_t = y_{t−1}, else T. The paper's measure. It asks whether two predictions in a row
  agree, not whether they are right or final, and cannot be below 1.
* first correct step: the first t with y_t = y*, or never.
* settled step: the first t from which the prediction is the final one, y_t = y_{t+1} = … = y_T.

Step 0 reads the embeddings of a masked token: [MASK] and a position, nothing else. So "easy" is no difficulty: it says that the
answer is the word that step 0 guesses at this place, which is one word almost everywhere (`step_0`). The question that is left
when those tokens are taken out is whether hard ones settle later than medium ones. Frequent answers are easier to get right and
may settle early for that alone, so both are compared among answers that are equally frequent: in octaves of how often a word is
the answer in this text, the octaves weighted by m·n/(m + n) for m medium and n hard tokens in them.

Controls: the same model with weights that never learnt, and the same predictions scored against labels shuffled among the
targets, which keeps everything but the connection between a prediction and its label.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pnn.analysis.controls import shuffled
from pnn.analysis.subject import Subject
from pnn.analysis.totals import Array, Totals, difference_of_ratios, finding, ratio, ratios, two_ratios
from pnn.analysis.trace import predict
from pnn.data import synthetic
from pnn.evaluation.masked import best_possible, embedded_corpus
from pnn.results import Finding
from pnn.stats import finite
from pnn.studies.registry import Analysis

CLASSES = ("easy", "medium", "hard")
EASY, MEDIUM, HARD = range(3)
CERTAIN, UNCERTAIN = 0.99, 0.5  # best possible probability of a target on the embedded corpus: above, below
MARGIN = 0.1  # steps: a smaller difference would not be worth a figure
MOST = 0.5  # of the easy tokens

ABOUT = Analysis(
    question="When do predictions settle?",
    picture=(
        "The first two rows are the paper's panels: its convergence step asks whether two predictions in a row agree, not "
        "whether they are right or final. Its easy tokens are those that step 0 gets right. Step 0 sees only [MASK] and a "
        "position, so they are the places whose answer is the usual word there, not tokens that are easy to understand. "
        "The paper has 4.9 % easy, 44.4 % medium and 50.7 % hard tokens, with mean convergence steps 1.53, 2.29 and 2.60. "
        "The rows below show from when on a prediction is final and when it is right for the "
        "first time. Grey marks are controls."
    ),
    hypotheses={
        "hard_tokens_converge_later": "hard tokens converge, by the paper's measure, later than easy ones",
        "hard_tokens_settle_later": "hard tokens settle on their final prediction later than easy ones",
        "easy_tokens_are_one_word": "most easy tokens have one and the same answer, the word that step 0 guesses most",
        "hard_tokens_settle_later_at_equal_frequency": (
            "of the tokens that step 0 gets wrong and whose answers are equally frequent, those that end wrong (hard) settle "
            "later than those that end right (medium)"
        ),
        "uncertain_tokens_settle_later": (
            f"tokens that nobody could be sure of (best possible probability below {UNCERTAIN}) settle later than certain ones "
            f"(above {CERTAIN})"
        ),
    },
)


def classes(predictions: Tensor, labels: Tensor) -> Tensor:
    """Which of CLASSES each target is. `predictions`: (steps + 1, targets)."""
    easy, right = predictions[0] == labels, predictions[-1] == labels
    return torch.where(easy, EASY, torch.where(right, MEDIUM, HARD))


def convergence_step(predictions: Tensor) -> Tensor:
    """The first t ≥ 1 with y_t = y_{t−1}, else T."""
    same = predictions[1:] == predictions[:-1]
    return torch.where(same.any(0), same.int().argmax(0) + 1, len(same))


def first_correct_step(predictions: Tensor, labels: Tensor) -> Tensor:
    """T + 1 stands for never."""
    right = predictions == labels
    return torch.where(right.any(0), right.int().argmax(0), len(right))


def settled_step(predictions: Tensor) -> Tensor:
    final = (predictions == predictions[-1]).int()
    return len(predictions) - final.flip(0).cumprod(0).sum(0)


def summary_of_counts(counts: Array) -> dict[str, Any]:
    """From targets by class (rows) and convergence step (columns 0 … T): shares and mean steps, as the paper's figure has
    them."""
    steps, totals = np.arange(counts.shape[1]), counts.sum(1)
    return {
        name: {
            "targets": int(totals[i]),
            "share": float(totals[i] / counts.sum()),
            "convergence_counts": [int(n) for n in counts[i]],
            "mean_convergence_step": float(counts[i] @ steps / totals[i]) if totals[i] else None,
        }
        for i, name in enumerate(CLASSES)
    }


def one_hot(values: Tensor, size: int) -> Tensor:
    return torch.nn.functional.one_hot(values.long(), size)


def add(totals: Totals, source: str, predictions: Tensor, labels: Tensor, sequence: Tensor) -> None:
    """Add a batch's targets to the sums that start with `source`."""
    steps = len(predictions) - 1
    of_class = one_hot(classes(predictions, labels), len(CLASSES))
    when, settled = convergence_step(predictions), settled_step(predictions)
    totals.add(f"{source} class", sequence, of_class)
    totals.add(f"{source} counts", sequence, of_class[:, :, None] * one_hot(when, steps + 1)[:, None])
    totals.add(f"{source} convergence", sequence, of_class * when[:, None])
    totals.add(f"{source} settled by class", sequence, of_class * settled[:, None])
    same = (predictions[1:] == predictions[:-1]).T
    totals.add(f"{source} stable", sequence, of_class[:, :, None] * same[:, None])
    totals.add(f"{source} settled", sequence, one_hot(settled, steps + 1))
    totals.add(f"{source} first correct", sequence, one_hot(first_correct_step(predictions, labels), steps + 2))


def described(totals: Totals, source: str, steps: int) -> dict[str, Any]:
    counts = totals.of(f"{source} counts").sum(0).reshape(len(CLASSES), steps + 1)
    summary = summary_of_counts(counts)
    means, settled = (ratios(totals, f"{source} {name}", f"{source} class") for name in ("convergence", "settled by class"))
    stable = totals.of(f"{source} stable").sum(0).reshape(len(CLASSES), steps)
    for i, name in enumerate(CLASSES):
        of_class = summary[name]
        of_class["convergence_step"] = means[i]
        of_class["settled_step"] = settled[i]
        of_class["stable_by_step"] = [float(n / of_class["targets"]) if of_class["targets"] else None for n in stable[i]]
    return {
        "classes": summary,
        "settled_counts": [int(n) for n in totals.of(f"{source} settled").sum(0)],
        "first_correct_counts": [int(n) for n in totals.of(f"{source} first correct").sum(0)],  # the last: never
    }


def run(subject: Subject) -> dict[str, Any]:
    """What analysis/convergence.json holds."""
    text, totals = subject.text, Totals(len(subject.text))
    corpus = embedded_corpus(text.tokens.manifest)
    steps, targets = 0, []
    for batch in text.batches():
        found, control = (predict(model, batch, every_step=True) for model in (subject.model, subject.naive))
        sequence, labels, steps = found.sequence, found.labels, len(found.readings) - 1
        predictions = torch.stack([reading.prediction for reading in found.readings])
        add(totals, "trained", predictions, labels, sequence)
        add(totals, "untrained", torch.stack([r.prediction for r in control.readings]), labels, sequence)
        others = shuffled(labels)
        add(totals, "shuffled", predictions, others, sequence)
        targets.append(
            torch.stack((sequence, labels, others, predictions[0], predictions[-1], settled_step(predictions))).cpu()
        )
        totals.count("targets", sequence)
        for name in ("correct", "confidence", "probability"):
            totals.add(name, sequence, torch.stack([getattr(reading, name) for reading in found.readings], 1))
        if corpus is not None:
            _add_true_difficulty(totals, batch, predictions, corpus)
    step_0 = _add_controlled(totals, *torch.cat(targets, 1))
    result: dict[str, Any] = {
        "num_steps": steps,
        "targets": int(totals.of("targets").sum()),
        **described(totals, "trained", steps),
        **{
            f"{name}_by_step": ratios(totals, name, "targets", shares=True) for name in ("correct", "confidence", "probability")
        },
        "step_0": {"guess": str(text.tokens.tokenizer().convert_ids_to_tokens(step_0.pop("token"))), **step_0},
        "controls": {name: described(totals, name, steps) for name in ("untrained", "shuffled")},
    }
    result["findings"] = {}
    if steps > 1:  # else the paper's measure is 1 for every token
        result["findings"]["hard_tokens_converge_later"] = _later(totals, "hard_tokens_converge_later", "convergence")
    result["findings"]["hard_tokens_settle_later"] = _later(totals, "hard_tokens_settle_later", "settled by class")
    result["findings"]["easy_tokens_are_one_word"] = _one_word(totals)
    result["findings"]["hard_tokens_settle_later_at_equal_frequency"] = _later_at_equal_frequency(totals)
    if corpus is not None:
        result["true_difficulty"] = _true_difficulty(totals, steps)
        result["findings"]["uncertain_tokens_settle_later"] = _later_by_truth(totals)
    return result


def _later(totals: Totals, name: str, measure: str) -> Finding:
    """Mean step of hard targets less that of easy ones, against the same with shuffled labels."""

    columns = [two_ratios(totals, f"{source} {measure}", f"{source} class", HARD, EASY) for source in ("trained", "shuffled")]
    return finding(
        ABOUT.hypotheses[name],
        "mean step of hard targets − mean step of easy ones",
        np.concatenate(columns, 1),
        lambda sums: difference_of_ratios(sums[..., :4]),
        margin=MARGIN,
        control="classes from labels shuffled among the targets",
        control_statistic=lambda sums: difference_of_ratios(sums[..., 4:]),
    )


# What "easy" is, and what is left of the question without it -----------------------------------------------------------


def _add_controlled(
    totals: Totals, sequence: Tensor, labels: Tensor, others: Tensor, first: Tensor, last: Tensor, settled: Tensor
) -> dict[str, Any]:
    """Sums over all targets that need the whole text first: which guess of step 0 is the commonest, how often each word is the
    answer. `others`: labels shuffled among the targets. Returns what `step_0` holds."""
    guess = int(first.bincount().argmax())
    is_guess, easy = labels == guess, labels == first
    totals.add("is guess", sequence, torch.stack((easy & is_guess, easy, is_guess, torch.ones_like(easy)), 1))
    octaves = labels.bincount(minlength=int(others.max()) + 1).clamp(min=1).log2().long()
    for source, answers in (("trained", labels), ("shuffled", others)):
        group = octaves[answers] * len(CLASSES) + classes(torch.stack((first, last)), answers)
        groups = one_hot(group, int(octaves.max() + 1) * len(CLASSES))
        totals.add(f"{source} at frequency", sequence, groups)
        totals.add(f"{source} settled at frequency", sequence, groups * settled[:, None])
    return {
        "token": guess,
        "share_of_guesses": float((first == guess).double().mean()),
        "share_of_easy_targets": float(is_guess[easy].double().mean()) if easy.any() else None,
        "share_of_targets": float(is_guess.double().mean()),
    }


def _one_word(totals: Totals) -> Finding:
    return finding(
        ABOUT.hypotheses["easy_tokens_are_one_word"],
        "share of easy targets whose answer is the commonest guess of step 0",
        totals.of("is guess"),
        lambda sums: ratio(sums[..., :2]),
        margin=MOST,
        control="the same share of all targets",
        control_statistic=lambda sums: ratio(sums[..., 2:]),
    )


def _later_at_equal_frequency(totals: Totals) -> Finding:
    names = [f"{source} {what}at frequency" for source in ("trained", "shuffled") for what in ("settled ", "")]
    half = 2 * totals.of(names[0]).shape[1]
    return finding(
        ABOUT.hypotheses["hard_tokens_settle_later_at_equal_frequency"],
        "mean settled step of hard targets − that of medium ones whose answers are equally frequent",
        np.concatenate([totals.of(name) for name in names], 1),
        lambda sums: later_within_octaves(sums[..., :half]),
        margin=MARGIN,
        control="classes from labels shuffled among the targets",
        control_statistic=lambda sums: later_within_octaves(sums[..., half:]),
    )


def later_within_octaves(sums: Array) -> Array:
    """From summed steps and then numbers of targets, each (octaves × classes): hard less medium, octave by octave."""
    steps, counts = np.moveaxis(sums.reshape(*sums.shape[:-1], 2, -1, len(CLASSES)), -3, 0)
    medium, hard = counts[..., MEDIUM], counts[..., HARD]
    with np.errstate(invalid="ignore", divide="ignore"):
        later = steps[..., HARD] / hard - steps[..., MEDIUM] / medium
        weights = np.where(medium * hard > 0, medium * hard / (medium + hard), 0.0)
        mean: Array = (weights * np.nan_to_num(later, posinf=0.0, neginf=0.0)).sum(-1) / weights.sum(-1)
    return mean


# The embedded corpus, where the best possible prediction is known ----------------------------------------------------


def _add_true_difficulty(totals: Totals, batch: Any, predictions: Tensor, corpus: str) -> None:
    packed, positions = batch.packed, batch.masked.positions
    best = torch.from_numpy(best_possible(packed.input_ids.numpy(), packed.cu_seqlens.numpy(), positions.numpy(), corpus))
    kinds = torch.from_numpy(synthetic.language(corpus).kind_of_word[batch.masked.labels.numpy()])
    sequence, settled = batch.sequence[positions], settled_step(predictions.cpu())
    known = torch.stack((best > CERTAIN, best < UNCERTAIN), 1)
    totals.add("known", sequence, known)
    totals.add("known settled", sequence, known * settled[:, None])
    of_kind = one_hot(kinds, len(synthetic.KINDS))
    totals.add("kind", sequence, of_kind)
    totals.add("kind settled", sequence, of_kind * settled[:, None])
    totals.add("kind settled counts", sequence, of_kind[:, :, None] * one_hot(settled, len(predictions))[:, None])
    totals.add("kind best", sequence, of_kind * best[:, None])


def _true_difficulty(totals: Totals, steps: int) -> dict[str, Any]:
    counts = totals.of("kind settled counts").sum(0).reshape(len(synthetic.KINDS), steps + 1)
    settled, best = ratios(totals, "kind settled", "kind"), totals.of("kind best").sum(0) / totals.of("kind").sum(0)
    return {
        name: {
            "best_possible": finite(best[i]),
            "settled_step": settled[i],
            "settled_counts": [int(n) for n in counts[i]],
        }
        for i, name in enumerate(synthetic.KINDS)
    }


def _later_by_truth(totals: Totals) -> Finding:
    return finding(
        ABOUT.hypotheses["uncertain_tokens_settle_later"],
        "mean settled step of uncertain targets − that of certain ones",
        two_ratios(totals, "known settled", "known", 1, 0),
        difference_of_ratios,
        margin=MARGIN,
    )
