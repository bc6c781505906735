"""Many texts of unequal length: a row whose text has ended takes the next prompt, while the other rows go on.

`generate` pads a batch to its longest prompt and computes for all rows until the last of them has ended. Here every row always
has a text, for as long as prompts are waiting.

All rows write their next token at the same place of the buffers, and the place goes round (`decoder_steps` has the step). So a
text is always the last so many places before it, and a new prompt is put right there:

    place       0  1  2  3  4  5  6  7        at = 6: the next token of both
    one text    .  a  b  c  d  e  ↑  .
    a new one   .  .  .  p  q  r  ↑  .

Attention sees places by a mask, and positions are counted for each row, so it does not matter where a text lies. A place is
written again after `capacity` steps, and no text is as long.

Which texts have ended is asked every few steps: asking waits for the device. What was computed beyond an end is thrown away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pnn.models.decoder_cache import DecoderCache
from pnn.models.decoder_steps import Steps, may_record
from pnn.nn.recording import Recording

EVERY = 8  # steps between two questions
Choose = Callable[[Tensor], Tensor]  # logits (B, vocabulary) → tokens (B,)


def most_probable(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def sampled(temperature: float, top_k: int | None) -> Choose:
    def choose(logits: Tensor) -> Tensor:
        logits = logits.float() / temperature
        if top_k is not None and top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
        return torch.multinomial(logits.softmax(-1), 1).squeeze(-1)

    return choose


@torch.inference_mode()
def continue_all(
    model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, ends: Collection[int], choose: Choose, rows: int
) -> list[list[int]]:
    """What follows each prompt: so many tokens, or fewer, the last of which is one of `ends`. `rows`: texts at once."""
    made: list[list[int]] = [[] for _ in prompts]
    if not prompts:
        return made
    rows, waiting = min(rows, len(prompts)), list(range(len(prompts)))[::-1]
    slots = Slots(model, rows, max(map(len, prompts)) + new_tokens + EVERY)
    texts: list[int | None] = [None] * rows
    while True:
        free = [row for row, text in enumerate(texts) if text is None]
        for row in free[: len(waiting)]:
            texts[row] = waiting.pop()
        taken = {row: prompts[texts[row]] for row in free if texts[row] is not None}  # type: ignore[index]
        if all(text is None for text in texts):
            return made
        slots.put(taken)
        added = torch.stack([slots.step(choose) for _ in range(min(EVERY, new_tokens))]).tolist()
        for row, text in enumerate(texts):
            if text is None:
                continue
            for step in added:
                made[text].append(step[row])
                if step[row] in ends or len(made[text]) == new_tokens:
                    texts[row] = None
                    break


class Slots:
    """Rows for texts, each with room for so many tokens."""

    def __init__(self, model: Any, rows: int, tokens: int):
        self.model, self.tokens, self.rows = model, tokens, rows
        self.steps: Steps | None = None  # made for the first prompts: they show what there is to remember
        self.recording: Recording | None = None
        self.done = 0
        self.next = torch.zeros(rows, dtype=torch.long, device=model.device)
        self.counts = torch.zeros(rows, 1, dtype=torch.long, device=model.device)  # tokens of each text that are remembered

    def put(self, prompts: dict[int, Sequence[int]]) -> None:
        """Begin a text in each of these rows. All of a prompt but its last token is remembered; that one is the next step's."""
        if not prompts:
            return
        at, longest = list(prompts), max(2, *map(len, prompts.values()))
        padded = [[0] * (longest - len(ids)) + list(ids) for ids in prompts.values()]
        real = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts.values()]
        ids, mask = (torch.tensor(one, device=self.next.device) for one in (padded, real))
        cache = self.model(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        if self.steps is None:
            self._make(cache)
        assert self.steps is not None
        self.steps.put(at, cache, mask[:, :-1].bool(), self.done)
        self.next[at] = ids[:, -1]
        self.counts[at] = mask[:, :-1].sum(-1, keepdim=True)

    def _make(self, cache: DecoderCache) -> None:
        self.steps = Steps(cache, self.tokens, self.rows)
        if may_record(self.model):
            steps = self.steps
            with torch.cuda.device(self.next.device), contextlib.suppress(RuntimeError):  # out of memory among them
                stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
                self.recording = Recording(lambda: steps.run(self.model), stream, pool)

    def step(self, choose: Choose) -> Tensor:
        """The next token of every text."""
        assert self.steps is not None
        furthest = self.model.config.max_position_embeddings - 1  # of what is computed beyond an end
        self.steps.write(self.done % self.tokens, self.next[:, None], self.counts.clamp(max=furthest))
        logits = self.steps.run(self.model) if self.recording is None else self.recording.replay()
        self.next = choose(logits[:, -1])
        self.counts += 1
        self.done += 1
        return self.next
