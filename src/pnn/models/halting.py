"""What a model of refinement steps knows about halting: its criterion, and the rule of one pass (`nn/halting`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pnn.models.base import EncoderBase, EncoderOutput, Halting
from pnn.nn.halting import CRITERIA, Criterion, Halt, Learned, Read, Rule, refine, refine_in_training
from pnn.nn.packing import Layout
from pnn.schedule import period

NO_HALT = (
    "with recall or guess_after steps begin elsewhere than they ended, so no token can halt: leave out these "
    "or halt and random_halt"
)


def can_halt(config: Any) -> bool:
    """Not where a state is moved between its steps, and a token that halts would not keep it."""
    return not config.recall and not config.guess_after


class HaltingEncoder(EncoderBase):
    """An encoder whose config has `halt`, `schedule` and `num_steps`."""

    criterion: Criterion | None

    def make_criterion(self) -> None:
        halt = self.config.trained_halt or self.config.halt  # a learned unit keeps its weights while another rule is in force
        self.criterion = None if halt is None else CRITERIA[halt["criterion"]](self.config.hidden_size)

    def set_halt(self, halt: Halt | Mapping[str, Any] | None) -> None:
        """From now on tokens halt so, and the config says it. A learned unit that is there stays; else one starts."""
        if halt is not None:
            halt = Halt.of(halt)
            self.check_halt(halt, self.config.num_steps)
        self.config.halt, self.config.trained_halt = None if halt is None else halt.as_dict(), None
        if halt is None or type(self.criterion) is not CRITERIA[halt.criterion]:
            self.make_criterion()
            if self.criterion is not None:
                self.criterion.to(self.device, self.dtype).train(self.training)

    def check_halt(self, halt: Halt, steps: int) -> None:
        if not can_halt(self.config):
            raise ValueError(NO_HALT)
        halt.check_steps(self.config.schedule, steps)

    def halting_rule(self, halt: Halting, num_steps: int | None, every_token: bool, read: Read | None) -> Rule | None:
        all_steps = num_steps is not None and not self.training  # asked for so many; training draws a number
        learns = isinstance(self.criterion, Learned) and self.config.halt is not None  # it draws by itself
        if self.training and self.config.random_halt and halt is None and not (learns or every_token or num_steps == 0):
            return Rule(Halt("context"), CRITERIA["context"](self.config.hidden_size), period(self.config.schedule), read)
        if halt is False or (halt is None and (self.config.halt is None or every_token or all_steps)):
            return None
        if every_token:
            raise ValueError("gates and attentions come for every token at every step: leave out halt")
        chosen = Halt.of(self.config.halt if halt is None else halt)
        steps = self.config.num_steps if num_steps is None else num_steps
        if halt is not None:
            self.check_halt(chosen, steps)
        criterion = self.criterion
        if criterion is None or type(criterion) is not CRITERIA[chosen.criterion]:
            if chosen.criterion == "learned":
                raise ValueError("halt: this model has no learned unit: fit one (pnn.training.halting.fit_halting)")
            criterion = CRITERIA[chosen.criterion](self.config.hidden_size).train(self.training)
        if criterion.reads and read is None:
            if halt is None:
                return None  # the config's rule is that of another head
            raise ValueError(f"halt: {chosen.criterion} needs a head that chooses between tokens or labels")
        if steps == 0 or (self.training and not isinstance(criterion, Learned)):
            return None  # in training every step is learnt
        return Rule(chosen, criterion, period(self.config.schedule), read)

    def refine_by(
        self, rule: Rule, refiners: Sequence[nn.Module], h: Tensor, layout: Layout, last_at: Tensor | None
    ) -> EncoderOutput:
        if rule.is_trained:
            found = refine_in_training(refiners, h, layout, last_at, rule, self.through)
        else:
            found = refine(refiners, h, layout, last_at, rule)
        return EncoderOutput(
            last_hidden_state=found.states[-1],
            states=tuple(found.states),
            deltas=(),
            gates=(),
            halted_at=found.halted_at,
            step_cost=found.cost,
        )
