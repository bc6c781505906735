"""Learning after growth: new heads, and new neurons likewise, come in slowly and learn fast.

**Warm-up.** A new head's output is multiplied by

    s(t) = min(1, s₀ + (1 − s₀) · t / T),   s₀ = 0.01, T = 100 updates:   0.01 at 0, 0.505 half-way, 1 from T on.

**Differential learning rates.** A new head learns at m times the rate of the rest (3–5 in the source). Adam does not care how
large a gradient is, so multiplying a new head's gradient changes nothing but its first few digits; and in a fused matrix a head
has no parameter of its own that could get a learning rate. What is multiplied here is the update:

    θ ← θ_before + m · (θ_after − θ_before)        for the head's part of each matrix and bias, after every optimiser step

which is what a learning rate of m·η would have done there: Adam's step and decoupled weight decay are both proportional to η.
The bias of W_o belongs to no head and learns at the common rate.

`learn` does both: AdamW or Muon, weight decay on matrices, gradients clipped at 1, a cosine from the learning rate to a tenth.
The warm-up takes 100 updates, or half of them where there are fewer than 200: it is over before learning is. What is learnt is
the text, or what a teacher predicts there (`teaching`).

A GPU computes updates sooner than Python issues them. So the passes of decoders of transformers, whose rows have one length,
are recorded (`Passes`); with a teacher its pass is part of the recording.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pnn.config import TrainingConfig
from pnn.errors import UserError
from pnn.models.fused import fused
from pnn.models.lean import leave_out_logits, with_logits_again
from pnn.models.precision import predicts_in
from pnn.models.recorded import keeps_everything, without_asking
from pnn.models.registry import kind_of
from pnn.nn.fast import kernels_compute
from pnn.nn.recording import reading, room_to_record, where_weights_lie
from pnn.objectives import IGNORE
from pnn.plasticity.architectures import HEAD, NEURON, architecture_of
from pnn.plasticity.measure import learning
from pnn.plasticity.scores import prepared
from pnn.plasticity.teaching import Teacher
from pnn.plasticity.units import Unit, check_units, gate_part, stretches_of, unit_map
from pnn.training.optim import learning_rate, make_optimizer, step_down
from pnn.training.recording import PASSES_BEFORE_RECORDING, Recorder

WARM_UP_START = 0.01
WARM_UP_STEPS = 100


def warm_up_factor(step: int, steps: int = WARM_UP_STEPS, start: float = WARM_UP_START) -> float:
    """s(t), for updates counted from 0."""
    return 1.0 if step >= steps else start + (1 - start) * step / steps


def _new_units(model: PreTrainedModel, asked: Iterable[Any]) -> list[Unit]:
    new = check_units(model, asked)
    if any(unit.kind not in (HEAD, NEURON) for unit in new):
        raise UserError("only heads and neurons can be new: layers and dimensions of the width do not grow")
    return new


class WarmUp:
    """New heads and neurons that come in slowly. Call `at(step)` before each update; at the end nothing of it is left.

        with WarmUp(model, new) as warm_up:
            for step, batch in enumerate(batches):
                warm_up.at(step)
                ...

    The factor is no part of the weights: a model that is saved before the end behaves as one whose warm-up is over, so whoever
    resumes calls `at` with the step it resumes from.
    """

    def __init__(self, model: PreTrainedModel, units: Iterable[Any], steps: int = WARM_UP_STEPS):
        if steps < 0:
            raise UserError(f"a warm-up of {steps} updates: expected 0 or more")
        self.steps = steps
        self._model = model
        new = _new_units(model, units)
        maps = {kind: unit_map(model, kind) for kind in {unit.kind for unit in new}}
        self._gates, self._is_new = {}, {}
        for kind, layer in dict.fromkeys((unit.kind, unit.layer) for unit in new):
            here = {unit.index for unit in new if (unit.kind, unit.layer) == (kind, layer)}
            self._is_new[kind, layer] = torch.tensor([index in here for index in maps[kind][layer]], device=model.device)
            self._gates[kind, layer] = torch.ones(len(maps[kind][layer]), device=model.device)
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
        for at, gate in self._gates.items():
            gate.masked_fill_(self._is_new[at], factor)
        if not self._hooks:
            architecture = architecture_of(self._model)
            blocks = architecture.blocks(self._model)
            self._hooks = [
                gate_part(architecture.parts(kind, blocks[layer])[-1], gate) for (kind, layer), gate in self._gates.items()
            ]
        return factor

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class FasterUpdates:
    """Makes every step of an optimiser move these heads and neurons `multiplier` times as far. `remove` ends it.

    Works with any optimiser of torch (accelerate's wrapper holds one in `.optimizer`): it looks at what a step has done, not at
    how. Only their own numbers are copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: PreTrainedModel, units: Iterable[Any], multiplier: float):
        if not multiplier > 0:
            raise UserError(f"a learning rate multiplied by {multiplier}: expected a number above 0")
        self.multiplier = multiplier
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owned = [one for its in stretches_of(model, _new_units(model, units)).values() for one in its]
        if any(one.parameter.requires_grad and id(one.parameter) not in trained for one in owned):
            raise UserError("the optimiser does not train the new units: make it after growing them")
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


class Passes:
    """Forward and backward passes of learning, with gradients in `.grad`. Recorded where `may_record` says so, after the first
    few; all are issued where recording fails, or where a batch has more than rows of one length or, with a teacher, tokens that
    are no targets: where these are would have to be asked of the device."""

    def __init__(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, teacher: Teacher | None):
        self.model, self.optimizer, self.teacher = model, optimizer, teacher
        self.may_record = may_record(model)
        if teacher is not None:
            self.may_record = self.may_record and teacher.model.device == model.device and may_record(teacher.model)
        self.recorder: Recorder | None = None
        self.hooked = False  # while it was recorded, for the warm-up

    @contextmanager
    def update(self, hooked: bool) -> Iterator[None]:
        """Around all that is done for one update. `hooked`: whether new units are still warming up."""
        if self.may_record and (self.recorder is None or self.hooked != hooked):
            self.optimizer.zero_grad()  # what is there lies in the memory of the recording before
            self.recorder, self.hooked = Recorder(self._of_rows, self.model.parameters(), 1), hooked
        if self.recorder is None:
            yield
            self.optimizer.zero_grad()
        else:
            with self.recorder.on_stream():
                yield
                if self.recorder is None:
                    self.optimizer.zero_grad()
                else:
                    self.recorder.end_update()

    def __call__(self, batch: dict[str, Any], seed_again: Callable[[], object]) -> Tensor:
        """The loss. Dropout follows from the update's number, also where recording it failed half-way."""
        ready = prepared(self.model, batch)
        rows = {name: value for name, value in ready.items() if name != "use_cache"}
        if self.recorder is not None and rows.keys() - {"told"} == {"input_ids", "labels"} and self._takes(batch):
            records = self.recorder.passes == PASSES_BEFORE_RECORDING
            if records and not room_to_record():
                self._give_up()
            else:
                try:
                    return self.recorder(rows)[0]
                except (UserError, torch.OutOfMemoryError):
                    if not records:
                        raise
                    self._give_up()
                    seed_again()
        elif self.recorder is not None:
            self._give_up()
        return self._of_anything(ready)

    def _takes(self, batch: dict[str, Any]) -> bool:
        """Asked of the batch before it is moved: on the host nobody waits. Without labels every token is its own, and the first
        of a row is never a target."""
        return self.teacher is None or "labels" not in batch or not bool((batch["labels"][:, 1:] == IGNORE).any())

    def _give_up(self) -> None:
        self.optimizer.zero_grad()
        self.recorder, self.may_record = None, False

    def _of_rows(self, rows: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (self._of_anything(rows, whole_rows=True),)

    def _of_anything(self, batch: dict[str, Any], whole_rows: bool = False) -> Tensor:
        """`whole_rows`: nothing but these, and nothing inside may wait for the device."""
        models = (self.model,) if self.teacher is None else (self.model, self.teacher.model)
        with fused(*models):  # where activations are computed again in the backward pass, by the same classes
            with learning(self.model):
                if self.teacher is None:
                    more = without_asking(self.model.config) if whole_rows else {}
                    loss = self.model(**batch, **more).loss
                else:
                    loss = self.teacher.loss(self.model, batch, whole_rows)
            loss.backward()
        return loss.detach()


def may_record(model: PreTrainedModel) -> bool:
    """Decoders of transformers on a GPU in bf16 that nobody listens to."""
    kind, precision = kind_of(model), predicts_in(model.device)
    if not kind.causal or kind.ours or not kernels_compute(model.device, precision):
        return False
    return keeps_everything(model.config) and where_weights_lie(model.base_model) is not None


def learn(
    model: PreTrainedModel,
    new: Iterable[Any],
    batch_at: Callable[[int], dict[str, Tensor]],
    *,
    steps: int,
    peak_rate: float,
    multiplier: float,
    seed: int,
    first: int = 0,
    teacher: Teacher | None = None,
    optimizer: str = "adamw",
) -> Generator[tuple[int, float], None, None]:
    """Train the model in place; after each update gives how many are done and the loss of its batch. `batch_at` gives the
    batch of an update. `first`: updates of earlier rounds; batch and dropout of an update follow from (seed, its number), so
    that learning again gives the same bits. With a `teacher` the loss is the distance to its predictions."""
    new = _new_units(model, new)
    plan = TrainingConfig(optimizer=optimizer, learning_rate=peak_rate, min_learning_rate=peak_rate / 10, warmup_steps=0)
    moved_by = make_optimizer(model, plan)
    faster = FasterUpdates(moved_by, model, new, multiplier)
    kind = kind_of(model)
    if kind.causal and not kind.ours and teacher is None:
        leave_out_logits(model)
    passes = Passes(model, moved_by, teacher)
    on_gpu = model.device.type == "cuda"
    seed_all = torch.manual_seed if on_gpu else torch.default_generator.manual_seed
    try:
        with WarmUp(model, new, min(WARM_UP_STEPS, steps // 2)) as warm_up:
            for step in range(steps):
                model.train()
                warming = warm_up.at(step) < 1
                seed_update = partial(seed_all, seed * 1_000_003 + first + step)
                with torch.random.fork_rng([model.device] if on_gpu else []), passes.update(warming):
                    seed_update()
                    # while the device computes the optimiser's step, the host is about the next update already
                    read_loss = reading(passes(batch_at(first + step), seed_update))
                    step_down(model, moved_by, learning_rate(step, steps, plan))
                loss = read_loss()
                if not math.isfinite(loss):
                    raise UserError(f"the loss became {loss} at update {step + 1}: a lower learning rate usually helps")
                yield step + 1, loss
    finally:
        faster.remove()
        moved_by.zero_grad()  # gradients of recorded passes lie in the memory of their graph
        with_logits_again(model)
        model.eval()
