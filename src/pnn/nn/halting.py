"""Tokens that halt: a token is refined until a criterion says that it has settled, and keeps its state from then on.

    hᵢᵗ = refiner(hᵗ⁻¹)ᵢ  while token i is live,    hᵢᵗ = hᵢᵗ⁻¹  once it has halted

    change        it settles where  ‖hᵗ − hᵗ⁻¹‖ / ‖hᵗ‖ ≤ threshold
    confidence    where  max softmax(head(hᵗ)) ≥ threshold, of the tokens that are read
    learned       where  σ(w·hᵗ + b) ≥ threshold
    context       after `min_steps` steps, if nobody asks for it: masked tokens go on, and read their context as it is then

Others go on reading a token that has halted. Saved work is saved time: see `nn/live`. As long as nobody has halted, steps are
those of a model that never halts, to the bit. With several refiners a token halts after a whole round of them.

A learned unit in training draws instead: a live token halts with probability p = σ(w·h + b). The gradient goes through p as if
the draw were p itself, and every step that a live token takes has a cost. A model that is to be read with a context that has
halted can train with it (`random_halt` in its config): tokens that nobody asks for then halt after each step with a probability
that is drawn once for each batch, evenly between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pnn.nn import fast
from pnn.nn.gating import logit
from pnn.nn.live import Live, Memory, Places, go_on, only_sequences, plan_in_force, put, take
from pnn.nn.packing import Layout, only_at
from pnn.schedule import period

Read = Callable[[Tensor], Tensor]  # a head: states to logits

# Criteria -------------------------------------------------------------------------------------------------------------


class Criterion(nn.Module):
    """Measures how far tokens have settled, one number per token."""

    when_below: ClassVar[bool] = False  # a token settles at or below the threshold, or at or above it
    most: ClassVar[float | None] = 1.0  # what thresholds must not exceed
    reads: ClassVar[bool] = False  # it asks the head, of tokens that are read: others cannot halt
    measures: ClassVar[bool] = True  # or it goes by what is asked for alone, without a threshold
    draws: ClassVar[bool] = False  # in training it halts tokens at random; others are for use alone

    def __init__(self, hidden_size: int):
        super().__init__()

    def measure(self, before: Tensor, after: Tensor, read: Read | None) -> Tensor:
        """From the states (tokens, d) before and after a step."""
        raise NotImplementedError

    def settled(self, measured: Tensor, threshold: float) -> Tensor:
        return measured <= threshold if self.when_below else measured >= threshold


class Change(Criterion):
    when_below, most = True, None

    def measure(self, before: Tensor, after: Tensor, read: Read | None) -> Tensor:
        change, size = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in (after - before, after))
        return change / size.clamp(min=1e-12)


class Confidence(Criterion):
    reads = True

    def measure(self, before: Tensor, after: Tensor, read: Read | None) -> Tensor:
        assert read is not None
        logits = read(after).float()
        return torch.exp(logits.amax(-1) - logits.logsumexp(-1))


class Learned(Criterion):
    """A vector and a bias on h. Before training it says "go on" nine times in ten."""

    draws = True

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size)
        self.weight, self.bias = nn.Parameter(torch.zeros(hidden_size)), nn.Parameter(torch.full((1,), logit(0.1)))
        self.starts = {"weight": 0.0, "bias": logit(0.1)}  # for the model's initialiser

    def measure(self, before: Tensor, after: Tensor, read: Read | None) -> Tensor:
        return torch.sigmoid((after.float() * self.weight.float()).sum(-1) + self.bias.float())


class Context(Criterion):
    """Who halts is known before the pass: nothing is measured, and a GPU waits once, or never where the pass is recorded."""

    measures, draws = False, True


CRITERIA: dict[str, type[Criterion]] = {
    "change": Change,
    "confidence": Confidence,
    "learned": Learned,
    "context": Context,
}

# Settings -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Halt:
    """When tokens halt, as a model's config says it: `{"criterion": "change", "threshold": 0.05}`."""

    criterion: str
    threshold: float = 0.5  # "context" has none
    min_steps: int = 1  # nobody halts before
    cost: float = 0.0  # of a step of one token, in the loss's unit, while a learned unit is trained

    @staticmethod
    def of(given: Halt | Mapping[str, Any]) -> Halt:
        """Checked. What is wrong is told in a sentence."""
        if not isinstance(given, Halt):
            known = [field.name for field in fields(Halt)]
            if unknown := sorted(set(given) - set(known)):
                raise ValueError(f"halt has no key {unknown[0]!r}: it takes {', '.join(known)}")
            if "criterion" not in given:
                raise ValueError("halt needs a criterion")
            if "threshold" not in given and CRITERIA.get(given["criterion"], Context).measures:
                raise ValueError("halt needs a threshold")
            given = Halt(**given)
        if given.criterion not in CRITERIA:
            raise ValueError(f"halt: criterion={given.criterion!r} is none of {', '.join(CRITERIA)}")
        for name in ("threshold", "min_steps", "cost"):
            if isinstance(value := getattr(given, name), bool) or not isinstance(value, int | float):
                raise ValueError(f"halt: {name}={value!r} is no number")
        most = CRITERIA[given.criterion].most
        if not 0 < given.threshold < float("inf"):
            raise ValueError(f"halt: threshold={given.threshold} must be above zero")
        if most is not None and given.threshold > most:
            raise ValueError(f"halt: threshold={given.threshold}, but {given.criterion} never exceeds {most:g}")
        if given.min_steps < 1 or given.min_steps != int(given.min_steps):
            raise ValueError(f"halt: min_steps={given.min_steps} must be 1 or more")
        if given.cost < 0 or (given.cost and given.criterion != "learned"):
            raise ValueError(f"halt: cost={given.cost} is for training the learned unit, and not below zero")
        return given

    def check_steps(self, schedule: Sequence[int], steps: int) -> None:
        """Whether there is a step after which a token could halt."""
        if steps < 2:
            raise ValueError(f"halt needs two steps or more, and num_steps={steps}: there is nothing to save")
        if period(schedule) >= steps:
            raise ValueError(f"halt needs a schedule that goes round: {list(schedule)} never begins again")
        if self.min_steps >= steps:
            raise ValueError(f"halt: min_steps={self.min_steps}, but there are {steps} steps: no token would ever halt")
        ends = [step for step in range(1, steps) if step % period(schedule) == 0]
        if ends[-1] < self.min_steps:
            raise ValueError(
                f"halt: min_steps={self.min_steps}, but the last round before the end is over after step {ends[-1]}: no token "
                "would ever halt"
            )

    def as_dict(self) -> dict[str, Any]:
        unused = {"cost"} if not self.cost else set()
        if not CRITERIA[self.criterion].measures:
            unused.add("threshold")
        return {key: value for key, value in asdict(self).items() if key not in unused}


@dataclass(frozen=True)
class Rule:
    """When tokens of one pass halt: the settings, the criterion with its weights, and what it needs to know."""

    halt: Halt
    criterion: Criterion
    round: int
    read: Read | None = None

    def may_halt_after(self, step: int, steps: int) -> bool:
        return self.halt.min_steps <= step < steps and step % self.round == 0

    @property
    def is_trained(self) -> bool:
        return self.criterion.draws and self.criterion.training


# Steps ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refined:
    """States h⁰ … hᵀ, the last at the asked tokens alone; for each token how many steps it took; and what they cost."""

    states: list[Tensor]
    halted_at: Tensor
    cost: Tensor | None = None


def refine(refiners: Sequence[nn.Module], h: Tensor, layout: Layout, at: Tensor | None, rule: Rule) -> Refined:
    """One refiner for each step. With `at` the last state of these tokens is asked for, and who is of no use to them stops."""
    places, size = Places.of(h, layout), h.shape[:2]
    if rule.criterion.reads and places.read_once(at):
        assert at is not None
        return refine_sequences(refiners, h, layout, at, rule, places)
    asked = places.real if at is None else torch.zeros_like(places.real).index_fill_(0, at, True)
    live, beside = places.real, torch.zeros_like(places.real)
    taken = torch.zeros_like(places.sequence)
    memories: dict[nn.Module, Memory] = {}
    chosen: Live | None = None  # None: nobody has halted
    states = [h]
    plan, steps = plan_in_force(), len(refiners)
    for step, refiner in enumerate(refiners, 1):
        last, was = step == steps, h.flatten(0, 1)
        if last and at is not None and chosen is None:
            states.append(refiner(h, layout, at))
            return Refined(states, (taken + (live & asked)).view(size))
        if chosen is None:
            h = refiner(h, layout)
            now, taken = h.flatten(0, 1), taken + live
        else:
            if last and at is not None and rule.criterion.measures and not rule.may_halt_after(step - 1, steps):
                live, beside, chosen = go_on(live & asked, beside | (live & ~asked), asked, places)
            everybody, was = was, take(was, chosen.here)
            now = was
            if len(chosen.here):
                if refiner not in memories:
                    memories[refiner] = Memory(refiner, h, places)
                now = memories[refiner].step(everybody, chosen, was).to(h.dtype)
                h = put(everybody, chosen.here, now, in_place=plan is not None and plan.last_alone).view_as(h)
                taken = taken + live
        states.append(h)
        if not rule.may_halt_after(step, steps):
            continue
        if not rule.criterion.measures:
            if chosen is not None:  # a round ago: keys and values of the others are there
                chosen = replace(chosen, beside=chosen.beside[:0])
            elif at is not None:
                live, beside, chosen = go_on(live & asked, live & ~asked, asked, places)
        else:
            stop = live & _settled(rule, was, now, h.flatten(0, 1), at, chosen, places.kernels)
            if chosen is not None or plan is not None or bool(stop.any()):
                going = live & ~stop
                if step + 1 == steps and at is not None:  # of the others nobody reads the last state
                    going, stop = going & asked, stop | (live & ~asked)
                live, beside, chosen = go_on(going, stop, asked, places)
    if at is not None:
        states[-1] = only_at(h, at)
    return Refined(states, taken.view(size))


def refine_sequences(
    refiners: Sequence[nn.Module], h: Tensor, layout: Layout, at: Tensor, rule: Rule, places: Places
) -> Refined:
    """The same where each sequence is read at one token of it: it goes on or halts as a whole, and the batch shrinks. A step is
    first computed for these tokens; of sequences that halt there the others stay as they were, as at the last step."""
    taken, real, size = torch.zeros_like(places.sequence), places.real, h.shape[:2]
    going, here = torch.arange(len(at), device=at.device), None  # sequences that are left, and their tokens; None: all
    states, left, asked = [h], h, at
    for step, refiner in enumerate(refiners, 1):
        if step == len(refiners) or not len(going):
            break
        if rule.may_halt_after(step, len(refiners)):
            attention: Any = refiner.attention
            context = attention.context(left, layout)
            layout = replace(layout, context=context)
            was = only_at(left, asked)
            now = refiner(was, Layout(context=only_at(context, asked)))
            with torch.no_grad():
                measured = rule.criterion.measure(was[0], now[0], rule.read)
                goes_on = ~rule.criterion.settled(measured, rule.halt.threshold)
            if not bool(goes_on.all()):
                stopped = at[going[~goes_on]]
                h = _put(h, stopped, now[0, ~goes_on])
                taken = taken.index_add(0, stopped, torch.ones_like(stopped))
                going = going[goes_on]
                tokens, layout = only_sequences(goes_on, places, attention.num_heads)
                here = tokens if here is None else here[tokens]
                left, asked = only_at(left, tokens), torch.searchsorted(tokens, asked[goes_on])
                places = Places.of(left, layout)
                layout = replace(layout, context=only_at(context, tokens))
        if len(going):
            left, layout = refiner(left, layout), replace(layout, context=None)
            taken = taken + real if here is None else taken.index_add(0, here, torch.ones_like(here))
            h = left if here is None else _put(h, here, left[0])
        states.append(h)
    last = only_at(h, at)
    if len(going):
        last = last.index_copy(1, going, refiners[-1](left, layout, asked).to(h.dtype))
        taken = taken.index_add(0, at[going], torch.ones_like(going))
    states += [h] * (len(refiners) - len(states)) + [last]
    return Refined(states, taken.view(size))


def _put(h: Tensor, rows: Tensor, new: Tensor) -> Tensor:
    """The states of all tokens, those of these rows anew."""
    return h.flatten(0, 1).index_copy(0, rows, new.to(h.dtype)).view_as(h)


def _settled(rule: Rule, was: Tensor, now: Tensor, h: Tensor, at: Tensor | None, chosen: Live | None, kernels: bool) -> Tensor:
    """Whom the criterion lets go, as a mask over all tokens: from the rows that a step computed, before it and after it, and
    from all states h (N, d), which are the same where everybody was computed."""
    rows = None if chosen is None else chosen.here
    if type(rule.criterion) is Learned and kernels:
        return fast.learned_settles(h, rows, rule.criterion, rule.halt.threshold)
    if rule.criterion.reads and at is not None:
        rows, was, now = at, take(was if chosen is None else h, at), take(h, at)
    with torch.no_grad():
        settled = rule.criterion.settled(rule.criterion.measure(was, now, rule.read), rule.halt.threshold)
    nobody = torch.zeros(len(h), dtype=torch.bool, device=h.device)
    return settled if rows is None else put(nobody, rows, settled)


def refine_in_training(
    refiners: Sequence[nn.Module], h: Tensor, layout: Layout, at: Tensor | None, rule: Rule, through: Callable[..., Tensor]
) -> Refined:
    """Every token is computed, and it is drawn who of them moves: `lerp` leaves a halted token where it is. `through` calls a
    refiner."""
    live, states = h.new_ones(*h.shape[:2], 1), [h]
    # asks a GPU nothing, so that the pass can be recorded
    real = torch.ones_like(live, dtype=torch.bool) if layout.keep is None else layout.keep[..., None]
    taken = torch.zeros_like(live)
    of_context = None if rule.criterion.measures else _chance_of_context(h, at)
    for step, refiner in enumerate(refiners, 1):
        only = at if step == len(refiners) else None
        taken = taken + live * real
        h = torch.lerp(only_at(h, only), through(refiner, h, layout, only), only_at(live, only))
        states.append(h)
        if rule.may_halt_after(step, len(refiners)):
            p = rule.criterion.measure(h, h, rule.read)[..., None].to(h.dtype) if of_context is None else of_context
            drawn = (torch.rand_like(p) < p).to(h.dtype) + (p - p.detach())
            live = live * (1 - drawn)
    return Refined(states, taken.detach().round().long().squeeze(-1), rule.halt.cost * taken.sum() / real.sum().clamp(min=1))


def _chance_of_context(h: Tensor, at: Tensor | None) -> Tensor:
    """How likely each token is to halt after a step: one number for the batch, none for those that are asked for."""
    if at is None:
        return h.new_zeros(*h.shape[:2], 1)
    chance = torch.rand((), device=h.device, dtype=h.dtype).expand(h.shape[0] * h.shape[1])
    return chance.index_fill(0, at, 0.0).view(*h.shape[:2], 1)
