"""lm-eval's requests, log p(continuation | context), answered by one of our decoders with logits where they are asked for.

lm-eval's own loop computes the logits of every token of every context and waits for the device at each request. What it is
given, what it returns and how it cuts long texts are the same here (`HFLM._loglikelihood_tokens`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pnn.data.batches import pack
from pnn.errors import UserError
from pnn.evaluation.passes import states_at, to_device
from pnn.nn.fast import read_out
from pnn.progress import Bars, console

HEAD_ROWS = 2048  # logits held at a time

Request = tuple[Any, list[int], list[int]]  # what it is called, tokens of the context, tokens of the continuation


@torch.inference_mode()
def log_likelihoods(
    lm: Any, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
) -> list[tuple[float, bool]]:
    """Of each request log p, and whether the continuation is what the model finds likeliest. `lm`: an HFLM, whose method this
    is. A text that several requests ask about (choices of one token) is read once."""
    asking: dict[tuple[int, ...], list[int]] = {}
    for number, (_, context, continuation) in enumerate(requests):
        if len(continuation) > lm.max_length:
            raise UserError(f"a choice has {len(continuation):,} tokens, but the model takes {lm.max_length:,}")
        asking.setdefault(tuple((context + continuation)[-(lm.max_length + 1) : -1]), []).append(number)
    texts = sorted(asking, key=len, reverse=True)  # the longest first: what does not fit into memory shows at once
    model, rows = lm.model, override_bs or lm.batch_size
    order: list[int] = []
    sums, greedy = [], []
    quiet = disable_tqdm or not console.is_terminal
    precision = lm.mixed_precision_dtype
    with torch.autocast(model.device.type, precision, enabled=precision is not None), Bars({"requests": None}, quiet) as bars:
        for start in range(0, len(texts), rows):
            chosen = texts[start : start + rows]
            lengths = np.array([len(text) for text in chosen])
            numbers = [number for text in chosen for number in asking[text]]
            ends = np.repeat(np.cumsum(lengths), [len(asking[text]) for text in chosen])
            continuations = [requests[number][2] for number in numbers]
            at = np.concatenate([np.arange(end - len(c), end) for end, c in zip(ends, continuations, strict=True)])
            batch = pack(np.concatenate(chosen), lengths, keys=np.zeros(len(chosen), np.int64))
            (states,) = states_at(model, batch, torch.from_numpy(at))
            targets = to_device(torch.from_numpy(np.concatenate(continuations)), model.device)
            scored = [_score(model, *part) for part in zip(states.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True)]
            each, right = (torch.cat(parts).split([len(c) for c in continuations]) for parts in zip(*scored, strict=True))
            sums.append(torch.stack([part.sum() for part in each]))
            greedy.append(torch.stack([part.all() for part in right]))
            order += numbers
            bars.update("requests", len(order))
    answers: list[Any] = [None] * len(requests)
    for number, log_p, best in zip(order, torch.cat(sums).tolist(), torch.cat(greedy).tolist(), strict=True):
        answers[number] = (log_p, best)
        if (name := requests[number][0]) is not None:
            lm.cache_hook.add_partial("loglikelihood", name, answers[number])
    return answers


def _score(model: Any, states: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of each target, and whether it is the likeliest. Sums of logarithms need more than 16 bits."""
    log_p = read_out(model.head, states).float().log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], log_p.argmax(-1) == targets
