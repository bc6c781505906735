"""Plastic Neural Networks: one gated refiner applied again and again.

    h⁰ = embed(x),   hᵗ = hᵗ⁻¹ + Δᵗ,   Δᵗ = refiner(hᵗ⁻¹),   t = 1 … T,   logits = head(hᵀ)          (equation 1)

The defaults are the paper's equations: no norm on δ, no gate bias, zero init, an untied head: 53,704,251 parameters.
What the published code does instead is `delta_norm=True, gate_bias=True, zero_init=False`: 53,707,323.
`update` names the rule by which a refiner changes the state (`nn/updates`); "rewrite" proposes the whole next state.
`schedule` says which refiner runs at which step: [0, 0, 0, 0] is the paper; [0, 1, 2, 3, 0, 1, 2, 3] applies four twice. A part
of it may be the one that repeats (`repeat`, see `pnn/schedule`).
With `recall` a step begins part of the way back to h⁰:  hᵗ = u + Δᵗ,   Δᵗ = refiner(u),   u = hᵗ⁻¹ + r ⊙ (h⁰ − hᵗ⁻¹).
After the steps of `guess_after` masked tokens read their own guess in the same way (`nn/guess`).
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig

from pnn.models.base import (
    KEYS_TO_IGNORE,
    EncoderOutput,
    MaskedLMBase,
    check_encoder,
    token_size,
)
from pnn.models.config_checks import check_kinds, warn_of_misspelt
from pnn.models.halting import NO_HALT, HaltingEncoder, can_halt
from pnn.models.heads import (
    MultipleChoiceBase,
    QuestionAnsweringBase,
    SequenceClassificationBase,
    TokenClassificationBase,
)
from pnn.nn.gating import GATES
from pnn.nn.guess import Average, Gaps, Guess, gaps_of
from pnn.nn.halting import Halt, Rule
from pnn.nn.packing import Layout
from pnn.nn.recall import Recall
from pnn.nn.updates import UPDATES
from pnn.objectives import step_weights, weights_at
from pnn.schedule import drawn_from, order


@strict
class PNNConfig(PreTrainedConfig):
    """A PNN. The values of what decides what it is:

    * `schedule`: which refiner runs at which step. `[0, 0, 0, 0]` is the paper's one refiner four times (also `num_steps=4`);
      `[0, 1, 2, 3, 0, 1, 2, 3]` applies four of them twice.
    * `repeat`: the part of the schedule that more or fewer steps repeat. `schedule=[0, 1, 2, 3], repeat=[2, 3], num_steps=7`
      enters through 0 and 1, applies 2 four times, and leaves through 3.
    * `random_steps`: `[2, 6]` trains with 2 to 6 steps, drawn at every update; `num_steps` are taken unless another number is
      asked for.
    * `recall`: every step begins part of the way back to h⁰. `True`: halfway, so that states do not drift away from their text
      however often they are refined. `"learned"`: as far as each refiner has learned for each dimension; a tenth of the way
      before training. No token halts then: none keeps its state.
    * `update`: `"gated"` adds what a refiner proposes, as far as a gate lets it; `"delta"` rewrites the state along one
      direction; `"rewrite"` proposes the whole next state, and a gate decides how far the state moves there.
    * `gate`: `"query_key"`, one for each dimension; `"diagonal"`, the same without matrices; `"token"`, one for each token;
      `"none"`.
    * `shared_attention`: all refiners attend by one attention, so the parameters go into what they propose.
    * `embedding_size`: the width of the table of tokens, less than `hidden_size`: a matrix widens what is looked up, and the
      head's transform narrows what is read. The parameters that this saves can go into refiners.
    * `halt`: when tokens stop being refined, `{"criterion": "change", "threshold": 0.05}` (`nn/halting`). `None`: never.
    * `guess_after`: the steps after which masked tokens (`mask_token_id`) read their own guess. With `[6]` the seventh step and
      those behind it read a text whose gaps are filled in, as far as the model has learned to. What is read there should have a
      part of the loss (`step_weights`). A guess needs a head that chooses between tokens; no token halts then.
    * `random_halt`: in training, tokens that are not predicted stop after a step that is drawn, so that fewer steps for them
      cost less later. A learned unit that trains with the model draws instead.
    """

    model_type = "pnn"
    keys_to_ignore_at_inference = KEYS_TO_IGNORE

    vocab_size: int = 30522
    hidden_size: int = 768
    embedding_size: int | None = None  # None: hidden_size; less: a narrower table of tokens (needs head_transform)
    num_attention_heads: int = 12
    intermediate_size: int = 2048
    max_position_embeddings: int = 128
    num_steps: int | None = None  # None: the schedule's length, or four
    trained_steps: int | None = None  # how many there were in training, once `pnn calibrate` has chosen
    schedule: list[int] | None = None  # None: refiner 0 at every step
    shared_attention: bool = False  # all refiners attend by that of refiner 0
    repeat: list[int] | None = None  # [start, end]: schedule[start:end] is what more steps repeat; None: the whole schedule
    random_steps: list[int] | None = None  # [fewest, most] in training; None: num_steps
    recall: bool | str = False  # a step begins halfway between the state and the embeddings; "learned": where it has learned to
    guess_after: list[int] | None = None  # steps after which masked tokens read their own guess
    mask_token_id: int | None = None  # which tokens these are; training takes the tokenizer's
    random_halt: bool = False  # in training the context stops early, at random
    step_weights: list[float] | None = None  # None: linear in the step, 0.1 … 0.4 for four; a step of weight 0 is not read
    update: str = "gated"  # "delta", "rewrite": see nn/updates
    gate: str = "query_key"  # one for each dimension; "diagonal": without matrices; "token": one for each token; "none"
    gate_start: float = 0.5  # how far gates are open before training
    delta_norm: bool = False
    gate_bias: bool = False
    zero_init: bool = True
    ffn: str = "gelu"  # or "geglu", which has as many parameters at two thirds of the intermediate_size
    positions: str = "learned"  # or "rotary"
    tie_word_embeddings: bool = False
    head_transform: bool = False  # BERT's dense layer before the vocabulary; what a tied head wants
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0  # > 0 rules out flash attention, which takes sequences over 128 tokens
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    halt: dict[str, Any] | None = None
    trained_halt: dict[str, Any] | None = None  # how a learned unit halts, where `pnn calibrate` chose something else since

    def __post_init__(self, **kwargs: Any) -> None:
        check_kinds(self)
        warn_of_misspelt(self, kwargs)
        if self.num_steps is None:
            self.num_steps = 4 if self.schedule is None else len(self.schedule)
        if self.schedule is None and isinstance(self.num_steps, int):
            self.schedule = [0] * (self.trained_steps or self.num_steps)
        super().__post_init__(**kwargs)

    def validate_refinement(self) -> None:
        """Called by `@strict` after construction and before saving."""
        check_encoder(self)
        assert self.schedule is not None
        assert self.num_steps is not None
        if set(self.schedule) == {0}:  # one refiner: the number of steps says it all, and may have been changed since
            self.schedule = [0] * (self.trained_steps or self.num_steps)
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps}, but at least one step is needed")
        name, steps = ("num_steps", self.num_steps) if self.trained_steps is None else ("trained_steps", self.trained_steps)
        if self.repeat is not None:
            self.schedule = order(self.schedule, self.repeat, steps)
            order(self.schedule, self.repeat, self.num_steps)  # fewer have to fit too
        if len(self.schedule) != steps:
            raise ValueError(f"schedule has {len(self.schedule)} entries, but {name}={steps}")
        if sorted(set(self.schedule)) != list(range(max(self.schedule) + 1)):
            raise ValueError(f"schedule={self.schedule} must use refiners 0, 1, 2, … without a gap")
        if self.random_steps is not None:
            drawn_from(self.schedule, self.repeat, self.random_steps)
        if self.step_weights is not None and len(self.step_weights) != steps:
            raise ValueError(f"step_weights has {len(self.step_weights)} entries, but {name}={steps}")
        if self.step_weights is not None and (min(self.step_weights) < 0 or self.step_weights[-1] == 0):
            raise ValueError(f"step_weights={self.step_weights} must not be below zero, and the last must be above it")
        if self.update not in UPDATES:
            raise ValueError(f"update={self.update!r} is none of {', '.join(UPDATES)}")
        if self.gate not in GATES:
            raise ValueError(f"gate={self.gate!r} is none of {', '.join(GATES)}")
        if not 0 < self.gate_start < 1:
            raise ValueError(f"gate_start={self.gate_start} must lie between 0 and 1")
        if self.embedding_size is not None and not 0 < self.embedding_size <= self.hidden_size:
            raise ValueError(f"embedding_size={self.embedding_size} must lie between 1 and hidden_size={self.hidden_size}")
        if token_size(self) != self.hidden_size and not self.head_transform:
            raise ValueError(f"embedding_size={self.embedding_size} needs head_transform, which narrows states for the head")
        if not isinstance(self.recall, bool) and self.recall != "learned":
            raise ValueError(f'recall={self.recall!r} is none of true, false, "learned"')
        if self.guess_after is not None:
            places = sorted(set(self.guess_after))
            if not places or places != self.guess_after or not 0 < places[0] <= places[-1] < steps:
                raise ValueError(f"guess_after={self.guess_after} must name steps from 1 to {steps - 1}, in their order")
            if self.random_steps is not None and places[-1] >= self.random_steps[0]:
                raise ValueError(f"guess_after={self.guess_after}: some updates of random_steps={self.random_steps} end before")
        if not can_halt(self) and (self.halt is not None or self.random_halt):
            raise ValueError(NO_HALT)
        if self.random_halt:
            try:
                Halt("context").check_steps(self.schedule, steps if self.random_steps is None else self.random_steps[-1])
            except ValueError as error:  # "halt needs …": say what was set
                raise ValueError(f"random_{error}") from None
        if self.halt is not None:
            Halt.of(self.halt).check_steps(self.schedule, self.num_steps)
        if self.trained_halt is not None and Halt.of(self.trained_halt).criterion != "learned":
            raise ValueError(f"trained_halt={self.trained_halt} must be that of a learned unit")

    @property
    def num_refiners(self) -> int:
        assert self.schedule is not None
        return max(self.schedule) + 1

    def order(self, num_steps: int | None = None) -> list[int]:
        """Which refiner runs at each step, of so many (`num_steps` of the config if not given)."""
        assert self.schedule is not None
        assert self.num_steps is not None
        return order(self.schedule, self.repeat, self.num_steps if num_steps is None else num_steps)

    def draw_steps(self, generator: torch.Generator | None = None) -> int | None:
        """How many steps an update trains with; None where the number is fixed. Drawn on the CPU."""
        if self.random_steps is None:
            return None
        assert self.schedule is not None
        numbers = drawn_from(self.schedule, self.repeat, self.random_steps)
        return numbers[int(torch.randint(len(numbers), (), generator=generator, device="cpu"))]


class PNNModel(HaltingEncoder):
    """Tokens to states: h⁰ (the embeddings), h¹, …, hᵀ."""

    config_class = PNNConfig

    def __init__(self, config: PNNConfig):
        super().__init__(config)
        refiners = [UPDATES[config.update](config) for _ in range(config.num_refiners)]
        if config.shared_attention:
            for refiner in refiners[1:]:
                refiner.attend_with(refiners[0])
        self.refiners = nn.ModuleList(refiners)
        learns = config.recall == "learned"
        self.recalls = nn.ModuleList(Recall(config.hidden_size) for _ in self.refiners) if learns else None
        self.guess = Guess(config.hidden_size) if config.guess_after else None
        self.make_criterion()
        self.post_init()

    @property
    def blocks(self) -> nn.ModuleList:
        return self.refiners

    def gaps_in(
        self, input_ids: Tensor | None, position_ids: Tensor | None, at: Tensor | None, average: Average | None
    ) -> Gaps | None:
        if self.guess is None or average is None:
            return None
        if input_ids is None:
            raise ValueError("this model's masked tokens read their own guess: give input_ids, which say where they are")
        if self.config.mask_token_id is None:
            raise ValueError("guess_after needs mask_token_id: which tokens are masked")
        places = None if self.embeddings.position is None else position_ids
        return gaps_of(input_ids, self.config.mask_token_id, at, places, average)

    def begin(self, h: Tensor, origin: Tensor, step: int, number: int, gaps: Gaps | None) -> Tensor:
        """u, where the step after so many others, of this refiner, begins: at the state, masked tokens part of the way at their
        guess, and with `recall` all of them part of the way back."""
        if self.guess is not None and gaps is not None and step in self.config.guess_after:
            h = self.guess(h, gaps, self.embeddings.__call__)
        if self.recalls is not None:
            return self.recalls[number](h, origin)
        return (h + origin) / 2 if self.config.recall else h

    def refine(
        self,
        h: Tensor,
        layout: Layout,
        num_steps: int | None,
        details: bool,
        last_at: Tensor | None,
        rule: Rule | None = None,
        gaps: Gaps | None = None,
    ) -> EncoderOutput:
        """hᵗ = u + Δᵗ,   Δᵗ = refiner(u),   u = hᵗ⁻¹ without `recall` and guesses. More steps than were trained go round the
        schedule again, or round the part of it that repeats."""
        if num_steps is None and self.training:
            num_steps = self.config.draw_steps()  # whoever trains and says no number: transformers' Trainer
        numbers = self.config.order(num_steps)
        if rule is not None:
            return self.refine_by(rule, [self.refiners[number] for number in numbers], h, layout, last_at)
        origin, states, deltas, gates = h, [h], [], []
        for step, number in enumerate(numbers):
            refiner, here = self.refiners[number], layout.at_step(step)
            u = self.begin(h, origin, step, number, gaps)
            if details:
                delta, _, gate = refiner.refine(u, here)
                h = u + delta
                deltas.append(delta)
                if gate is not None:
                    gates.append(gate)
            else:  # the same sum, in as few passes as the refiner knows
                h = self.through(refiner, u, here, last_at if step == len(numbers) - 1 else None)
            states.append(h)
        return EncoderOutput(last_hidden_state=h, states=tuple(states), deltas=tuple(deltas), gates=tuple(gates))


class PNNForMaskedLM(MaskedLMBase):
    """A PNN that predicts masked tokens, and learns from what it predicts after each step."""

    config_class = PNNConfig
    encoder_class = PNNModel

    def supervised(self, states: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], list[float]]:
        steps = len(states) - 1
        if steps == 0:  # asked for predictions of the embeddings alone
            return states, [1.0]
        given = self.config.step_weights
        weights = step_weights(steps) if given is None else weights_at(given, steps)
        read = [step for step, weight in enumerate(weights) if weight > 0]
        return tuple(states[1:][step] for step in read), [weights[step] for step in read]


class PNNForSequenceClassification(SequenceClassificationBase):
    """A PNN that classifies whole texts, by the last state of their first token."""

    config_class = PNNConfig
    encoder_class = PNNModel


class PNNForTokenClassification(TokenClassificationBase):
    """A PNN that gives each token a label."""

    config_class = PNNConfig
    encoder_class = PNNModel


class PNNForQuestionAnswering(QuestionAnsweringBase):
    """A PNN that finds where in a text an answer starts and ends."""

    config_class = PNNConfig
    encoder_class = PNNModel


class PNNForMultipleChoice(MultipleChoiceBase):
    """A PNN that chooses between candidate texts."""

    config_class = PNNConfig
    encoder_class = PNNModel
