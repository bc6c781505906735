"""A decoder's loss and perplexity on held-out text, with the protocol in the result.

The text is the same rows that training reads: documents end to end, an end-of-text token after each. By default every row is a
window of its own, so a token sees what stands before it in its row and the first of a row is not predicted. With a `stride`
windows of the same length overlap and only the last `stride` tokens of each are scored (all of the first, and of the last
what is left): more context for every token, and more work.

    loss                nats a scored token
    perplexity          exp(loss), by token: only models with one tokenizer can be compared by it
    word_perplexity     exp(loss · tokens / words)          words: what white space separates in the decoded text
    bits_per_byte       loss · tokens / (bytes · ln 2)      bytes: of the decoded text in UTF-8
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pnn.data.shards import TokenSet
from pnn.errors import UserError
from pnn.evaluation.masked import commonest
from pnn.evaluation.reading import to_device
from pnn.models.lean import padded_vocabulary
from pnn.models.registry import kind_of
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
) -> CausalText:
    """Evaluate on these rows of a token set, which follow each other in the text."""
    if len(sequences) < 2:
        raise UserError("too little text to evaluate on: fewer than two rows")
    context = int(tokens.lengths[sequences[0]])
    stream = tokens.take(sequences)
    was_training = model.training
    model.eval()
    losses, right, asked = [], [], []
    for rows, firsts in _batches(stream, context, stride, max(1, batch_tokens // context)):
        ids = to_device(torch.from_numpy(rows), model.device)
        with torch.autocast(model.device.type, precision, enabled=precision != torch.float32):
            for window, row, logits, first in zip(rows, ids, _logits(model, ids), firsts, strict=True):
                nats, correct = _score(logits[first - 1 : -1], row[first:])
                losses.append(nats)
                right.append(correct)
                asked.append(window[first:])
    model.train(was_training)
    scored = [len(targets) for targets in asked]
    windows = np.array(scored, dtype=np.float64)
    loss_of = torch.stack(losses).double().cpu().numpy()
    right_of = torch.stack(right).double().cpu().numpy()
    loss, low, high = ratio_interval(loss_of, windows)
    accuracy, accuracy_low, accuracy_high = of_a_share(ratio_interval(right_of, windows), len(windows))
    words, size = _text_size(tokens, stream)
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
        "perplexity": math.exp(loss),
        "word_perplexity": math.exp(min(700.0, loss * len(stream) / words)),
        "bits_per_byte": loss * len(stream) / (size * math.log(2)),
        "accuracy": accuracy,
        "accuracy_interval": [accuracy_low, accuracy_high],
        "commonest": commonest(np.concatenate(asked), tokens.tokenizer()),
        "by_sequence": {"targets": scored, "correct": right_of.astype(int).tolist(), "loss": loss_of.round(6).tolist()},
    }


def _logits(model: Any, ids: Tensor) -> Iterator[Tensor]:
    """Of each row. Ours are made one row at a time; others may do more to theirs than multiply, and give them all at once."""
    if kind_of(model).ours:
        yield from map(model.get_output_embeddings(), model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    else:
        with padded_vocabulary(model):
            logits = model(input_ids=ids, use_cache=False).logits
        yield from logits[..., : model.config.vocab_size]


def _score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits.float(), targets, reduction="sum"), (logits.argmax(-1) == targets).sum()


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


def _text_size(tokens: TokenSet, stream: NDArray[np.int64]) -> tuple[int, int]:
    """Words and bytes of the text that these tokens spell, special tokens left out."""
    text = tokens.tokenizer().decode(stream, skip_special_tokens=True)
    return max(1, len(text.split())), max(1, len(text.encode("utf-8")))
