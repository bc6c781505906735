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
a batch try a group of theirs in the same pass. So it takes tens of passes and not one per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pnn.analysis.controls import generator
from pnn.analysis.trace import Batch, blocks_of
from pnn.models.base import MaskedLMBase, arrange


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
        h = self.start if h is None else h
        keep = self.keep if rows is None else self.keep[rows]
        _, layout = arrange(h, keep, None, None, self.model.config)
        found = [h]
        for step, block in enumerate(blocks_of(self.model)[first:], first):
            h = torch.where((taken > step)[..., None], block(h, layout), h)
            found.append(h)
        return found

    def predictions(self, h: Tensor, rows: Tensor | None = None) -> Tensor:
        """The likeliest token at every target."""
        predicted: Tensor = self.model.head(h[self.targets if rows is None else self.targets[rows]]).argmax(-1)
        return predicted


def halts_after(model: MaskedLMBase, earliest: int) -> list[int]:
    """The steps after which a token may halt: from `earliest` on, where a round of the schedule ends."""
    schedule: list[int] = model.config.schedule
    return [step for step in range(earliest, len(blocks_of(model))) if schedule[step] == schedule[0]]


@torch.no_grad()
def oracle(rows: Rows, earliest: int = 1, right_only: bool = False) -> Tensor:
    """Steps of every token, (rows, length). The predictions of all targets stay, or (`right_only`) of those that are right:
    one that is wrong may become wrong in another way."""
    unhalted = rows.states(rows.all_steps)
    by_step = torch.stack([rows.predictions(h) for h in unhalted])
    final, last = by_step[-1], unhalted[-1]
    steps = len(by_step) - 1
    must_stay = final == rows.labels if right_only else torch.ones_like(final, dtype=torch.bool)
    # the first step from which a target's prediction stays
    settled = steps + 1 - (by_step == final).int().flip(0).cumprod(0).sum(0)
    may_halt = torch.zeros_like(rows.all_steps)
    may_halt[rows.targets] = torch.where(must_stay, settled, 0)

    def unchanged(h: Tensor, step: int, taken: Tensor, chosen: Tensor) -> Tensor:
        """For each chosen row, from its states after `step`: whether every prediction that has to stay does."""
        after = rows.predictions(rows.states(taken, h[chosen], step, chosen)[-1], chosen)
        at = torch.isin(rows.row_of_target, chosen)
        moved = (after != final[at]) & must_stay[at]
        good = torch.ones(len(chosen), dtype=torch.bool, device=h.device)
        good[rows.targets[chosen].nonzero()[moved, 0]] = False
        return good

    taken, h = rows.all_steps.clone(), rows.start
    allowed = halts_after(rows.model, earliest)
    for step in range(steps):
        if step in allowed:
            still_moves = (last - h).float().norm(dim=-1)
            candidates = rows.keep & (taken > step) & (may_halt <= step)
            taken = _halt(taken, candidates, still_moves, step, partial(unchanged, h, step))
        h = rows.states(taken, h, step)[1]
    return taken


def _halt(
    taken: Tensor, candidates: Tensor, still_moves: Tensor, step: int, unchanged: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Let candidates halt at this step, group by group. Groups lie in `waiting`, the next one last, rows in ascending order."""
    taken = taken.clone()
    order = still_moves.masked_fill(~candidates, torch.inf).argsort(dim=1).cpu().numpy()
    counts = candidates.sum(1).tolist()
    waiting = {row: [order[row, :count]] for row, count in enumerate(counts) if count}
    while waiting:
        chosen = torch.tensor(list(waiting), device=taken.device)
        groups = [groups.pop() for groups in waiting.values()]
        tried = taken[chosen]
        place = torch.from_numpy(np.repeat(np.arange(len(groups)), list(map(len, groups))))
        tried[place.to(taken.device), torch.from_numpy(np.concatenate(groups)).to(taken.device)] = step
        good = unchanged(tried, chosen)
        taken[chosen[good]] = tried[good]
        for row, group, ok in zip(list(waiting), groups, good.tolist(), strict=True):
            if not ok and len(group) > 1:
                waiting[row] += [group[len(group) // 2 :], group[: len(group) // 2]]  # those that move less come first
            if not waiting[row]:
                del waiting[row]
    return taken


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
