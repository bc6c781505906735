"""Fine-tune one model with one learning rate and one seed, and predict with it.

AdamW with weight decay 0.01 on matrices, gradients clipped at 1, a linear warm-up over a tenth of the updates and a cosine to
zero. After each epoch the dev sets are predicted; the weights of the best epoch are what is kept. Batches follow from (seed,
epoch), dropout from the seed: on a CPU a second run gives the same numbers.

The loss is that of the last step's logits. With `every_step` a PNN learns as it was pretrained, Σ_t w_t · loss(head(hᵗ)): its
earlier steps can then be read too, which is what stopping early needs (`finetuning/calibrate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from pnn.config import TrainingConfig
from pnn.errors import UserError
from pnn.evaluation.passes import states_at
from pnn.finetuning.encoding import Encoded, by_length, collate, packed, training_order
from pnn.finetuning.metrics import Metrics, measure_sets, score
from pnn.finetuning.tasks import Task
from pnn.models.registry import kind_of
from pnn.nn.packing import only_at
from pnn.objectives import step_weights, weighted_sum, weights_at
from pnn.training.optim import descend, learning_rate, make_optimizer

WEIGHT_DECAY = 0.01
WARM_UP = 0.1
Outputs = NDArray[np.float32]


@dataclass(frozen=True)
class Plan:
    """What does not change between seeds and learning rates."""

    task: Task
    train: Encoded
    dev: dict[str, Encoded]
    epochs: int
    batch_size: int
    pad: int
    max_length: int
    device: torch.device
    precision: torch.dtype
    every_step: bool = False  # learn after every step of a PNN, and not after the last alone

    @property
    def updates(self) -> int:
        return self.epochs * len(training_order(self.train, self.batch_size, 0, 0))


@dataclass
class Tuned:
    """What one fine-tuning gave: its best epoch's weights, and every epoch's metrics."""

    seed: int
    learning_rate: float
    epochs: list[dict[str, Any]]
    best_epoch: int
    metrics: Metrics
    score: float
    weights: dict[str, Tensor]


def fine_tune(model: PreTrainedModel, plan: Plan, rate: float, seed: int, tell: Callable[[int, str], None]) -> Tuned:
    """`tell` hears of every update: how many are done, and a note."""
    model.to(plan.device)
    total = plan.updates
    training = TrainingConfig(
        learning_rate=rate, min_learning_rate=0.0, warmup_steps=int(WARM_UP * total), weight_decay=WEIGHT_DECAY
    )
    optimizer = make_optimizer(model, training)
    done, epochs = 0, []
    best: tuple[float, int, Metrics, dict[str, Tensor]] | None = None
    on_gpu = plan.device.type == "cuda"
    with torch.random.fork_rng([plan.device] if on_gpu else []):
        (torch.manual_seed if on_gpu else torch.default_generator.manual_seed)(seed)
        for epoch in range(1, plan.epochs + 1):
            model.train()
            losses = []
            for chosen in training_order(plan.train, plan.batch_size, seed, epoch):
                loss = _loss(model, plan, chosen)
                descend(model, optimizer, loss, learning_rate(done, total, training))
                done += 1
                losses.append(loss.detach())  # read at the end of the epoch: nothing here waits for a GPU
                tell(done, f"epoch {epoch}/{plan.epochs}")
            train_loss = float(torch.stack(losses).mean())
            if not math.isfinite(train_loss):
                raise UserError(f"the loss became {train_loss} in epoch {epoch} at learning rate {rate:g}: try a lower one")
            metrics = measure_sets(plan.task, predicted(model, plan, plan.dev))
            epochs.append({"epoch": epoch, "updates": done, "train_loss": train_loss, "score": score(metrics), **metrics})
            if best is None or score(metrics) > best[0]:
                weights = {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}
                best = (score(metrics), epoch, metrics, weights)
    assert best is not None
    return Tuned(seed, rate, epochs, best[1], best[2], best[0], best[3])


def _loss(model: PreTrainedModel, plan: Plan, chosen: NDArray[np.int64]) -> Tensor:
    batch = collate(plan.train, chosen, plan.pad, plan.max_length, plan.device)
    labels = torch.from_numpy(plan.train.labels[chosen]).to(plan.device)
    with torch.autocast(plan.device.type, plan.precision, enabled=plan.precision != torch.float32):
        if not plan.every_step:
            return _loss_of(model(**batch).logits.float(), labels, plan.task)
        losses = [_loss_of(logits.float(), labels, plan.task) for logits in logits_by_step(model, batch)]
    given, steps = model.config.step_weights, len(losses)
    return weighted_sum(losses, step_weights(steps) if given is None else weights_at(given, steps))


def _loss_of(logits: Tensor, labels: Tensor, task: Task) -> Tensor:
    if task.regression:
        return F.mse_loss(logits.squeeze(-1), labels.float())
    return F.cross_entropy(logits, labels.long())


def logits_by_step(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """What the head of a PNN says after each step 1 … T, of a padded batch."""
    tokens, mask = (batch[name].flatten(0, -2) for name in ("input_ids", "attention_mask"))  # choices are rows of their own
    first = torch.arange(len(tokens), device=tokens.device) * tokens.shape[1]
    out = model.base_model(tokens, attention_mask=mask, output_states=True, last_at=first, return_dict=True)
    states = [*(only_at(h, first)[0] for h in out.states[1:-1]), out.last_hidden_state[0]]
    logits = [model.classifier(model.dropout(h)) for h in states]
    return [x.view(len(batch["input_ids"]), -1) for x in logits]


@torch.no_grad()
def outputs(model: PreTrainedModel, plan: Plan, encoded: Encoded, by_step: bool = False) -> Outputs:
    """(steps, examples, outputs): the logits after the last step alone, or (of our encoders) after every step 0 … T, by the
    same head. It reads in fp32: in bf16 scores of 3 lie 1/64 apart, and many would be the same."""
    kind = kind_of(model)
    model.eval()
    parts, order = [], []
    with torch.autocast(plan.device.type, plan.precision, enabled=plan.precision != torch.float32):
        for chosen in by_length(encoded, plan.batch_size):
            if kind.ours and kind.masked:
                batch = packed(encoded, chosen)
                firsts = batch.cu_seqlens[:-1].long()  # all that the head reads is each sequence's first token
                states = states_at(model, batch, firsts, every_step=by_step)
                with torch.autocast(plan.device.type, enabled=False):
                    logits = torch.stack([model.classifier(h.float()) for h in states])
                logits = logits.view(len(logits), len(chosen), -1)  # an example's choices are sequences of their own
            else:
                logits = model(**collate(encoded, chosen, plan.pad, plan.max_length, plan.device)).logits[None]
            parts.append(logits.float())
            order.append(chosen)
    found = torch.cat(parts, dim=1).cpu().numpy()
    sorted_back = np.empty_like(found)
    sorted_back[:, np.concatenate(order)] = found
    return sorted_back


def decide(task: Task, logits: Outputs) -> NDArray[np.float64]:
    """The label's number, or the score of a regression."""
    return logits[..., 0].astype(np.float64) if task.regression else logits.argmax(-1).astype(np.float64)


def as_set(encoded: Encoded, predictions: NDArray[np.float64]) -> dict[str, Any]:
    found: dict[str, Any] = {"labels": encoded.labels, "predictions": predictions}
    if encoded.questions is not None:
        found |= {"questions": encoded.questions, "units": encoded.units}
    return found


def predicted(model: PreTrainedModel, plan: Plan, sets: dict[str, Encoded]) -> dict[str, dict[str, Any]]:
    return {name: as_set(one, decide(plan.task, outputs(model, plan, one)[-1])) for name, one in sets.items()}


def metrics_by_step(model: PreTrainedModel, plan: Plan) -> list[Metrics]:
    """The dev metrics after every refinement step 0 … T."""
    found = {name: outputs(model, plan, one, by_step=True) for name, one in plan.dev.items()}
    steps = len(next(iter(found.values())))
    return [
        measure_sets(plan.task, {name: as_set(one, decide(plan.task, found[name][step])) for name, one in plan.dev.items()})
        for step in range(steps)
    ]
