"""A decoder's loss and perplexity on held-out text, with the protocol in the result.

The text is the same rows that training reads: documents end to end, an end-of-text token after each. By default every row is a
window of its own, so a token sees what stands before it in its row and the first of a row is not predicted. With a `stride`
windows of the same length overlap and only the last `stride` tokens of each are scored (all of the first, and of the last
what is left): more context for every token, and more work.

    loss                nats a scored token
    perplexity          exp(loss), by token: only models with one tokenizer can be compared by it
    word_perplexity     exp(loss · tokens / words)          words: what white space separates in the decoded text
    bits_per_byte       loss · tokens / (bytes · ln 2)      bytes: of the decoded text in UTF-8
                        (neither of a text with more than a few unknown tokens)
    loss_by_step        of a causal PNN, where asked for: what its head makes of h⁰, h¹, …, hᵀ
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pnn.data.batches import pack
from pnn.data.shards import Progress, TokenSet, quietly
from pnn.data.tokenizers import unknown_share
from pnn.errors import UserError
from pnn.evaluation.masked import commonest
from pnn.evaluation.passes import states_at, to_device
from pnn.models.lean import padded_vocabulary
from pnn.models.precision import predicting
from pnn.models.registry import kind_of
from pnn.nn.fast import read_out
from pnn.numbers import MOST_UNKNOWN
from pnn.results import CausalText
from pnn.stats import of_a_share, ratio_interval


@torch.no_grad()
def evaluate_causal(
    model: Any,
    tokens: TokenSet,
    sequences: NDArray[np.int64],
    *,
    stride: int | None = None,
    batch_tokens: int = 16384,
    precision: torch.dtype = torch.float32,
    num_steps: int | None = None,
    by_step: bool = False,
    progress: Progress = quietly,
) -> CausalText:
    """Evaluate on these rows of a token set, which follow each other in the text. `num_steps` and `by_step` are for decoders
    with steps."""
    if len(sequences) < 2:
        raise UserError("too little text to evaluate on: fewer than two rows")
    context = int(tokens.lengths[sequences[0]])
    stream = tokens.take(sequences)
    losses, right, asked = [], [], []
    with predicting(model, precision):
        for rows, firsts in progress(_batches(stream, context, stride, max(1, batch_tokens // context)), "evaluating, batch"):
            targets = [window[first:] for window, first in zip(rows, firsts, strict=True)]
            labels = to_device(torch.from_numpy(np.concatenate(targets)), model.device)
            read = _logits(model, rows, firsts, num_steps, by_step)
            for row, of_steps in zip(labels.split([*map(len, targets)]), read, strict=True):
                each = []
                for logits in of_steps:
                    each.append(F.cross_entropy(logits.float(), row, reduction="sum"))
                losses.append(torch.stack(each))
                right.append((logits.argmax(-1) == row).sum())
            asked += targets
    scored = [len(targets) for targets in asked]
    windows = np.array(scored, dtype=np.float64)
    steps_of = torch.stack(losses).double().cpu().numpy()  # (windows, steps that were read)
    loss_of = steps_of[:, -1]
    right_of = torch.stack(right).double().cpu().numpy()
    loss, low, high = ratio_interval(loss_of, windows)
    accuracy, accuracy_low, accuracy_high = of_a_share(ratio_interval(right_of, windows), len(windows))
    tokenizer = tokens.tokenizer()
    words, size = _text_size(tokenizer, stream)
    by_size = {
        "word_perplexity": math.exp(min(700.0, loss * len(stream) / words)),
        "bits_per_byte": loss * len(stream) / (size * math.log(2)),
    }
    return {
        "source": tokens.manifest["name"],
        "text": tokens.manifest["recipe"]["text"],
        "sequences": len(sequences),
        "context": context,
        "stride": stride or context,
        "targets": int(windows.sum()),
        "tokens": len(stream),
        "words": words,
        "bytes": size,
        "loss": loss,
        "loss_interval": [low, high],
        **_steps(model, num_steps, (steps_of.sum(0) / windows.sum()).tolist() if by_step else None),
        "perplexity": math.exp(min(700.0, loss)),
        **_if_known(by_size, unknown_share(np.bincount(stream), tokenizer)),
        "accuracy": accuracy,
        "accuracy_interval": [accuracy_low, accuracy_high],
        "commonest": commonest(np.concatenate(asked), tokenizer),
        "by_sequence": {"targets": scored, "correct": right_of.astype(int).tolist(), "loss": loss_of.round(6).tolist()},
    }


def _steps(model: Any, num_steps: int | None, losses: list[float] | None) -> Any:
    if not kind_of(model).has_steps:
        return {}
    found = {"num_steps": model.config.num_steps if num_steps is None else num_steps}
    return found if losses is None else found | {"loss_by_step": losses}


def _logits(
    model: Any, rows: NDArray[np.int64], firsts: list[int], num_steps: int | None, by_step: bool
) -> Iterator[Iterable[Tensor]]:
    """Of each row, where it predicts its tokens from its first scored one on; after its last step, or after every one. Ours are
    made one row at a time; others may do more to theirs than multiply, and give them all at once."""
    context = rows.shape[1]
    if kind_of(model).ours:
        batch = pack(rows.reshape(-1), np.full(len(rows), context), np.zeros(len(rows), np.int64))
        at = [row * context + np.arange(first - 1, context - 1) for row, first in enumerate(firsts)]
        states = states_at(model, batch, torch.from_numpy(np.concatenate(at)), num_steps, every_step=by_step)
        for of_row in zip(*(h.split([*map(len, at)]) for h in states), strict=True):
            yield (read_out(model.head, h) for h in of_row)
    else:
        with padded_vocabulary(model):
            logits = model(input_ids=to_device(torch.from_numpy(rows), model.device), use_cache=False).logits
        for row, first in zip(logits, firsts, strict=True):
            yield [row[first - 1 : -1, : model.config.vocab_size]]


def _batches(
    stream: NDArray[np.int64], context: int, stride: int | None, rows: int
) -> Iterator[tuple[NDArray[np.int64], list[int]]]:
    """Windows of `context` tokens and, for each, the first token that is scored."""
    if stride is None:
        starts = np.arange(0, len(stream), context)
        firsts = np.ones(len(starts), dtype=np.int64)
    elif not 1 <= stride < context:
        raise UserError(f"evaluation.stride: {stride}, but it must be at least 1 and below the context of {context} tokens")
    else:
        ends = np.append(np.arange(context, len(stream), stride), len(stream))  # each token is scored once
        starts = ends - context
        firsts = np.append(1, context - np.diff(ends))
    for at in range(0, len(starts), rows):
        chosen = starts[at : at + rows]
        yield stream[chosen[:, None] + np.arange(context)], firsts[at : at + rows].tolist()


def _text_size(tokenizer: Any, stream: NDArray[np.int64]) -> tuple[int, int]:
    """Words and bytes of the text that these tokens spell, special tokens left out."""
    text = tokenizer.decode(stream, skip_special_tokens=True)
    return max(1, len(text.split())), max(1, len(text.encode("utf-8")))


def _if_known(by_size: dict[str, float], unknown: float) -> Any:
    """What was measured by words and bytes, unless many of them are missing because the vocabulary cannot express them."""
    return (by_size if unknown <= MOST_UNKNOWN else {}) | ({"unknown_tokens": unknown} if unknown else {})
