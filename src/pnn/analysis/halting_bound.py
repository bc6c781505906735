"""How many steps does each token need? An oracle that knows the answers, for tokens that halt.

A token i takes nᵢ steps and then keeps its state; the others go on reading it:

    hᵢᵗ = hᵢᵗ⁻¹ + Δᵢᵗ  for t ≤ nᵢ,      hᵢᵗ = hᵢᵗ⁻¹  for t > nᵢ

The oracle looks for small nᵢ that leave the predictions of masked tokens as they are after all T steps. It is greedy: step by
step, those that would still move least first, a token halts if no prediction that has to stay changes. A masked token may halt
from the step on from which its own prediction stays. Nobody reads what the last step makes of a token that is not masked, so
T − 1 steps of such a token are all of them. With several refiners a token halts after a round of them: where the schedule
begins again.

What it finds can be reached by whoever knows the future, and no more is claimed: a better choice than the greedy one may exist,
and who may lose some accuracy can halt sooner.

Candidates are tried in groups. A group that changes a prediction is cut in two, and each half is tried again; all sequences of
a batch try a group of theirs in the same pass. Where tokens halt easily that is tens of passes and not one per token; where
they do not, it is up to two per token, so `Trials` computes in each what the group changes and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pnn.analysis.controls import generator
from pnn.analysis.trace import Batch, blocks_of
from pnn.models.base import MaskedLMBase, arrange
from pnn.nn.live import Memory, Places, choose, put
from pnn.nn.refiner import DeltaRefiner
from pnn.schedule import period

Unchanged = Callable[[Tensor, Tensor], Tensor]  # steps that rows take and which rows these are → whether their predictions stay


@dataclass(frozen=True)
class Rows:
    """Some sequences as padded rows, on the model's device. `sequence`: their numbers in the text."""

    model: MaskedLMBase
    ids: Tensor  # (rows, length), targets masked
    keep: Tensor  # real tokens
    targets: Tensor  # masked tokens
    words: Tensor  # (rows, length), what stands there in truth
    sequence: NDArray[np.int64]

    @staticmethod
    def of(model: MaskedLMBase, batch: Batch) -> Rows:
        """The sequences of a batch that have a masked token: of the others nothing is asked."""
        borders = batch.packed.cu_seqlens.long()
        lengths = borders.diff()
        asked = torch.zeros(len(batch.masked.input_ids), dtype=torch.bool)
        asked[batch.masked.positions] = True
        within = torch.arange(int(lengths.max()))
        place = (borders[:-1, None] + within).clamp(max=len(asked) - 1)
        keep = within < lengths[:, None]
        targets = asked[place] & keep
        chosen = targets.any(1)
        keep, targets, place = keep[chosen], targets[chosen], place[chosen]
        device = model.device
        return Rows(
            model,
            (batch.masked.input_ids[place] * keep).to(device),
            keep.to(device),
            targets.to(device),
            (batch.packed.input_ids[place] * keep).to(device),
            batch.indices[chosen].numpy(),
        )

    @cached_property
    def labels(self) -> Tensor:
        """One entry per target, row by row."""
        return self.words[self.targets]

    @cached_property
    def row_of_target(self) -> Tensor:
        return self.targets.nonzero()[:, 0]

    @cached_property
    def all_steps(self) -> Tensor:
        """(rows, length): T for targets, T − 1 for others; 0 for padding."""
        steps = len(blocks_of(self.model))
        return torch.where(self.targets, steps, steps - 1) * self.keep

    @cached_property
    def start(self) -> Tensor:
        """h⁰."""
        encoder: Any = self.model.base_model
        tokens = encoder.embeddings.token(self.ids)
        places, _ = arrange(tokens, self.keep, None, None, self.model.config)
        start: Tensor = encoder.embeddings(tokens, places)
        return start

    def states(self, taken: Tensor, h: Tensor | None = None, first: int = 0, rows: Tensor | None = None) -> list[Tensor]:
        """h after `first` and every later step, if tokens take so many steps each; of all rows or of some."""
        found = [self.start if h is None else h]
        for step in range(first, len(blocks_of(self.model))):
            found.append(self.step(found[-1], taken, step, rows))
        return found

    def step(self, h: Tensor, taken: Tensor, step: int, rows: Tensor | None = None) -> Tensor:
        """h after one more step than `step`."""
        _, layout = arrange(h, self.keep if rows is None else self.keep[rows], None, None, self.model.config)
        return torch.where((taken > step)[..., None], blocks_of(self.model)[step](h, layout), h)

    def predictions(self, h: Tensor, rows: Tensor | None = None) -> Tensor:
        """The likeliest token at every target."""
        predicted: Tensor = self.model.head(h[self.targets if rows is None else self.targets[rows]]).argmax(-1)
        return predicted


def halts_after(model: MaskedLMBase, earliest: int) -> list[int]:
    """The steps after which a token may halt: from `earliest` on, where a round of the schedule ends."""
    schedule: list[int] = model.config.schedule
    return [step for step in range(earliest, len(blocks_of(model))) if step % period(schedule) == 0]


@dataclass(frozen=True)
class Wanted:
    """What the predictions of all targets have to be, and of which they have to."""

    final: Tensor
    must_stay: Tensor

    def hold(self, rows: Rows, predicted: Tensor, chosen: Tensor) -> Tensor:
        """For each chosen row, whether every prediction that has to stay does."""
        at = torch.isin(rows.row_of_target, chosen)
        moved = (predicted != self.final[at]) & self.must_stay[at]
        good = torch.ones(len(chosen), dtype=torch.bool, device=predicted.device)
        good[rows.targets[chosen].nonzero()[moved, 0]] = False
        return good


@torch.no_grad()
def oracle(
    rows: Rows, earliest: int = 1, right_only: bool = False, decided: Callable[[int], None] = lambda more: None
) -> Tensor:
    """Steps of every token, (rows, length). The predictions of all targets stay, or (`right_only`) of those that are right:
    one that is wrong may become wrong in another way. `decided` is told of how many more tokens it is known whether they halt:
    of all, at each step of `halts_after`."""
    unhalted = rows.states(rows.all_steps)
    by_step = torch.stack([rows.predictions(h) for h in unhalted])
    final, last = by_step[-1], unhalted[-1]
    steps = len(by_step) - 1
    must_stay = final == rows.labels if right_only else torch.ones_like(final, dtype=torch.bool)
    wanted = Wanted(final, must_stay)
    # the first step from which a target's prediction stays
    settled = steps + 1 - (by_step == final).int().flip(0).cumprod(0).sum(0)
    may_halt = torch.zeros_like(rows.all_steps)
    may_halt[rows.targets] = torch.where(must_stay, settled, 0)
    can_leave_out = all(isinstance(block, DeltaRefiner) for block in blocks_of(rows.model))
    taken, h = rows.all_steps.clone(), rows.start
    allowed = halts_after(rows.model, earliest)
    for step in range(allowed[-1] + 1 if allowed else 0):
        if step in allowed:
            trials = (Trials if can_leave_out else PlainTrials)(rows, wanted, h, step)
            still_moves = (last - h).float().norm(dim=-1)
            candidates = rows.keep & (taken > step) & (may_halt <= step)
            decided(int((rows.keep & ~candidates).sum()))
            taken = _halt(taken, candidates, still_moves, step, trials.unchanged, decided)
        h = rows.step(h, taken, step)
    return taken


class PlainTrials:
    """What becomes of predictions if tokens halt after `step`, where their states are h: all later steps of all tokens."""

    def __init__(self, rows: Rows, wanted: Wanted, h: Tensor, step: int):
        self.rows, self.wanted, self.h, self.step = rows, wanted, h, step

    def unchanged(self, taken: Tensor, chosen: Tensor) -> Tensor:
        """For each chosen row, if its tokens take so many steps: whether every prediction that has to stay does."""
        return self.wanted.hold(self.rows, self.predictions(taken, chosen), chosen)

    def predictions(self, taken: Tensor, chosen: Tensor) -> Tensor:
        return self.rows.predictions(self.after(taken, chosen), chosen)

    def after(self, taken: Tensor, chosen: Tensor) -> Tensor:
        """h after the last step."""
        return self.rows.states(taken, self.h[chosen], self.step, chosen)[-1]


class Trials(PlainTrials):
    """The same, where only live tokens are computed. All trials begin at the same states. So what the next step makes of them,
    the keys and values of those that halt there, and their predictions are the same in each, and computed once."""

    def __init__(self, rows: Rows, wanted: Wanted, h: Tensor, step: int):
        super().__init__(rows, wanted, h, step)
        _, layout = arrange(h, rows.keep, None, None, rows.model.config)
        here, *later = self.blocks = blocks_of(rows.model)[step:]
        self.next: Tensor = here(h, layout)
        self.kept = {block: block.attention.keys_and_values(h, layout) for block in dict.fromkeys(later)}  # type: ignore[union-attr,operator]
        self.predicted = rows.predictions(h)

    def predictions(self, taken: Tensor, chosen: Tensor) -> Tensor:
        """Nobody asks the head about tokens that have halted, or may change."""
        targets, at = self.rows.targets[chosen], torch.isin(self.rows.row_of_target, chosen)
        predicted, asked = self.predicted[at], (taken > self.step)[targets] & self.wanted.must_stay[at]
        predicted[asked] = self.rows.model.head(self.after(taken, chosen)[targets][asked]).argmax(-1)
        return predicted

    def after(self, taken: Tensor, chosen: Tensor) -> Tensor:
        keep, moves = self.rows.keep[chosen], taken > self.step
        h = torch.where(moves[..., None], self.next[chosen], self.h[chosen])
        places = Places.of(h, arrange(h, keep, None, None, self.rows.model.config)[1])
        for step, block in enumerate(self.blocks[1:], self.step + 1):
            going = (taken > step).flatten()
            # who moved and has stopped since has keys and values of its own
            live = choose(going, moves.flatten() & ~going & places.in_use(going), places)
            if len(live.here):
                memory = Memory(block, h, places)
                memory.keep_all(self.kept[block][chosen].flatten(0, 1))
                new = memory.step(h.flatten(0, 1), live)
                h = put(h.flatten(0, 1), live.here, new).view_as(h)
        return h


def _halt(
    taken: Tensor, candidates: Tensor, still_moves: Tensor, step: int, unchanged: Unchanged, decided: Callable[[int], None]
) -> Tensor:
    """Let candidates halt at this step, group by group."""
    taken = taken.clone()
    order = still_moves.masked_fill(~candidates, torch.inf).argsort(dim=1).cpu().numpy()
    counts = candidates.sum(1).tolist()
    waiting = {row: Groups(order[row, :count]) for row, count in enumerate(counts) if count}  # rows in ascending order
    while waiting:
        chosen = torch.tensor(list(waiting), device=taken.device)
        groups = [groups.next for groups in waiting.values()]
        tried = taken[chosen]
        place = torch.from_numpy(np.repeat(np.arange(len(groups)), list(map(len, groups))))
        tried[place.to(taken.device), torch.from_numpy(np.concatenate(groups)).to(taken.device)] = step
        good = unchanged(tried, chosen)
        taken[chosen[good]] = tried[good]
        for row, ok in zip(list(waiting), good.tolist(), strict=True):
            decided(waiting[row].tell(ok))
            if not waiting[row].stack:
                del waiting[row]
    return taken


class Groups:
    """The groups of one sequence that are still to be tried, the next one last. Those that move less come first."""

    def __init__(self, everyone: NDArray[np.int64]):
        self.stack = [(everyone, False)]  # and whether the other half of a group that failed lies below it

    @property
    def next(self) -> NDArray[np.int64]:
        return self.stack[-1][0]

    def tell(self, good: bool) -> int:
        """What came of the next one; of how many tokens more that decides. If a first half halts, the second with it is the
        whole that failed: it need not be tried."""
        group, is_first_half = self.stack.pop()
        if not good:
            return self._cut(group)
        return len(group) + (self._cut(self.stack.pop()[0]) if is_first_half else 0)

    def _cut(self, group: NDArray[np.int64]) -> int:
        if len(group) == 1:
            return 1
        self.stack += [(group[len(group) // 2 :], False), (group[: len(group) // 2], True)]
        return 0


def dial(rows: Rows, masked: int, others: int | None = None) -> Tensor:
    """The same number of steps for all masked tokens, and for all others: one less unless told, nobody reads their last."""
    return torch.where(rows.targets, masked, masked - 1 if others is None else others) * rows.keep


def at_random(rows: Rows, pools: dict[str, Tensor]) -> Tensor:
    """Steps drawn from those that others took, targets from targets and the rest from the rest: the same budget, but who gets
    how much is chance."""
    drawn = torch.zeros_like(rows.all_steps)
    for name, at in (("targets", rows.targets), ("context", rows.keep & ~rows.targets)):
        pool, key = pools[name], (int(rows.sequence[0]), len(rows.sequence))
        places = torch.randint(len(pool), (int(at.sum()),), generator=generator(*key))
        drawn[at] = pool[places].to(drawn.device)
    return drawn
