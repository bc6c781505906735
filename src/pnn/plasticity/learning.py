"""Learning after growth: new heads come in slowly and learn fast.

**Warm-up.** A new head's output is multiplied by

    s(t) = min(1, s₀ + (1 − s₀) · t / T),   s₀ = 0.01, T = 100 updates:   0.01 at 0, 0.505 half-way, 1 from T on.

**Differential learning rates.** A new head learns at m times the rate of the rest (3–5 in the source). Adam does not care how
large a gradient is, so multiplying a new head's gradient changes nothing but its first few digits; and in a fused matrix a head
has no parameter of its own that could get a learning rate. What is multiplied here is the update:

    θ ← θ_before + m · (θ_after − θ_before)        for the head's part of each matrix and bias, after every optimiser step

which is what a learning rate of m·η would have done there: Adam's step and decoupled weight decay are both proportional to η.
The bias of W_o belongs to no head and learns at the common rate.

`learn` does both: AdamW, weight decay on matrices, gradients clipped at 1, a cosine from the learning rate to a tenth of it.
The warm-up takes 100 updates, or half of them where there are fewer than 200: it is over before learning is. What is learnt is
the text, or what a teacher predicts there (`teaching`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pnn.config import TrainingConfig
from pnn.errors import UserError
from pnn.models.lean import leave_out_logits, with_logits_again
from pnn.models.registry import kind_of
from pnn.plasticity.architectures import architecture_of
from pnn.plasticity.heads import Head, check_present, head_map, stretches
from pnn.plasticity.measure import computing
from pnn.plasticity.scores import prepared
from pnn.plasticity.teaching import Teacher
from pnn.plasticity.units import gate_part
from pnn.training.optim import descend, learning_rate, make_optimizer

WARM_UP_START = 0.01
WARM_UP_STEPS = 100


def warm_up_factor(step: int, steps: int = WARM_UP_STEPS, start: float = WARM_UP_START) -> float:
    """s(t), for updates counted from 0."""
    return 1.0 if step >= steps else start + (1 - start) * step / steps


class WarmUp:
    """New heads that come in slowly. Call `at(step)` before each update; at the end nothing is left of it in the model.

        with WarmUp(model, new_heads) as warm_up:
            for step, batch in enumerate(batches):
                warm_up.at(step)
                ...

    The factor is no part of the weights: a model that is saved before the end behaves as one whose warm-up is over, so whoever
    resumes calls `at` with the step it resumes from.
    """

    def __init__(self, model: PreTrainedModel, heads: Iterable[Head], steps: int = WARM_UP_STEPS):
        if steps < 0:
            raise UserError(f"a warm-up of {steps} updates: it takes 0 or more")
        self.steps = steps
        self._new = check_present(model, heads)
        self._model = model
        self._layers = head_map(model)
        self._gates: dict[int, Tensor] = {
            layer: torch.ones(len(self._layers[layer]), device=model.device) for layer, _ in self._new
        }
        self._hooks: list[Any] = []

    def __enter__(self) -> WarmUp:
        self.at(0)
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def at(self, step: int) -> float:
        """Set the factor for this update and return it. From the last step of the warm-up on, the hooks are gone."""
        factor = warm_up_factor(step, self.steps)
        if factor == 1.0:
            self.remove()
            return factor
        for layer, index in self._new:
            self._gates[layer][self._layers[layer].index(index)] = factor
        if not self._hooks:
            architecture = architecture_of(self._model)
            attentions = architecture.attentions(self._model)
            self._hooks = [gate_part(architecture.output(attentions[at]), gate) for at, gate in self._gates.items()]
        return factor

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class FasterUpdates:
    """Makes every step of an optimiser move these heads `multiplier` times as far. `remove` ends it.

    Works with any optimiser of torch (accelerate's wrapper holds one in `.optimizer`): it looks at what a step has done, not at
    how. Only the heads' own numbers are copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: PreTrainedModel, heads: Iterable[Head], multiplier: float):
        if not multiplier > 0:
            raise UserError(f"a learning rate multiplied by {multiplier}: it takes a number above 0")
        self.multiplier = multiplier
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owned = [one for head in check_present(model, heads) for one in stretches(model, head)]
        if any(one.parameter.requires_grad and id(one.parameter) not in trained for one in owned):
            raise UserError("the optimiser does not train the new heads: make it after growing them")
        self._owned = [one for one in owned if id(one.parameter) in trained]
        self._before: list[Tensor] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._remember),
            optimizer.register_step_post_hook(self._stretch),
        ]

    def _remember(self, *_: object) -> None:
        self._before = [one.view().detach().clone() for one in self._owned]

    @torch.no_grad()
    def _stretch(self, *_: object) -> None:
        for one, before in zip(self._owned, self._before, strict=True):
            now = one.view()
            now.copy_(before + self.multiplier * (now - before))
        self._before = []

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def learn(
    model: PreTrainedModel,
    new: Iterable[Head],
    batch_at: Callable[[int], dict[str, Tensor]],
    *,
    steps: int,
    peak_rate: float,
    multiplier: float,
    seed: int,
    first: int = 0,
    teacher: Teacher | None = None,
) -> Iterator[tuple[int, float]]:
    """Train the model in place; after each update gives how many are done and the loss of its batch. `batch_at` gives the
    batch of an update. `first`: updates of earlier rounds; batch and dropout of an update follow from (seed, its number), so
    that learning again gives the same bits. With a `teacher` the loss is the distance to its predictions."""
    new = check_present(model, new)
    plan = TrainingConfig(learning_rate=peak_rate, min_learning_rate=peak_rate / 10, warmup_steps=0)
    optimizer = make_optimizer(model, plan)
    faster = FasterUpdates(optimizer, model, new, multiplier)
    kind = kind_of(model)
    if kind.causal and not kind.ours and teacher is None:
        leave_out_logits(model)
    on_gpu = model.device.type == "cuda"
    seed_all = torch.manual_seed if on_gpu else torch.default_generator.manual_seed
    try:
        with WarmUp(model, new, min(WARM_UP_STEPS, steps // 2)) as warm_up:
            for step in range(steps):
                model.train()
                warm_up.at(step)
                with torch.random.fork_rng([model.device] if on_gpu else []):
                    seed_all(seed * 1_000_003 + first + step)
                    batch = prepared(model, batch_at(first + step))
                    with computing(model):
                        loss = model(**batch).loss if teacher is None else teacher.loss(model, batch)
                    descend(model, optimizer, loss, learning_rate(step, steps, plan))
                if not math.isfinite(loss.item()):
                    raise UserError(f"the loss became {loss.item()} at update {step + 1}: a lower learning rate usually helps")
                yield step + 1, loss.item()
    finally:
        faster.remove()
        with_logits_again(model)
        model.eval()
