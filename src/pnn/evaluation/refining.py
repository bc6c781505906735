"""How a text's predictions are rewritten: what the head reads at every token after every step, and how far gates were open.

    p(token | place, t) = softmax(head(hᵗ))      step 0 reads the embeddings, step t the state after t refinements

`fill` answers for many texts at their masks; this is the whole grid, tokens × steps, of one text that a person looks at.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pnn.data.batches import evaluation_batches, special_tokens
from pnn.data.shards import TokenSet
from pnn.data.tokenizers import canonical
from pnn.errors import UserError
from pnn.evaluation.fill import best_tokens
from pnn.models.loading import LoadedRun
from pnn.models.precision import predicting
from pnn.models.registry import kind_of, steps_read
from pnn.results import Cell, Gate, Refining, Row

LONGEST_TEXT = 20_000  # characters: more than any of our encoders takes, and soon told
LONGEST_EXAMPLE, LOOKED_AT = 40, 200  # tokens of what a report shows, and sequences among which it is looked for


def refining(loaded: LoadedRun, text: str, num_steps: int | None = None, top: int = 5) -> Refining:
    """The grid of one text. More steps than were trained go round the refiners again; a BERT baseline has its layers."""
    return _grid(loaded, _tokens(loaded, text), num_steps, top)


def example(
    loaded: LoadedRun, tokens: TokenSet, sequences: NDArray[np.int64], mask_probability: float, mask_seed: int
) -> Refining | None:
    """The grid of a held-out text as evaluation masks it: of those that are soon read the one with most masks, whatever the
    model makes of them."""
    special = special_tokens(loaded.tokenizer)
    texts = (packed for packed, _ in evaluation_batches(tokens, sequences[:LOOKED_AT], 1))  # one at a time
    readable = (text for text in texts if len(text.input_ids) <= LONGEST_EXAMPLE and special.mask not in text.input_ids)
    short = [text.mask(special, mask_probability, mask_seed) for text in readable]
    if not short:
        return None
    chosen = max(short, key=lambda masked: len(masked.positions))
    found = _grid(loaded, chosen.input_ids.tolist(), None, top=3)
    masked = (row for row in found["rows"] if row["masked"])
    for row, answer in zip(masked, chosen.labels.tolist(), strict=True):
        row["answer"] = loaded.tokenizer.decode([answer])
    return found


def _grid(loaded: LoadedRun, ids: list[int], num_steps: int | None, top: int) -> Refining:
    model, tokenizer = loaded.model, loaded.tokenizer
    with torch.inference_mode(), predicting(model, loaded.precision):
        out = model.base_model(
            input_ids=torch.tensor([ids], device=model.device),
            num_steps=num_steps,
            output_states=True,
            output_gates=True,
            average_token=model.average_token,
        )
        read = [best_tokens(model, h[0], top) for h in out.states]
        stops = _stops(model, ids, tokenizer.mask_token_id)
    gates = [_gates(gate[0]) for gate in out.gates]
    word = lru_cache(maxsize=None)(lambda token: tokenizer.decode([token]))
    best = [list(zip(found.tolist(), chances.tolist(), strict=True)) for found, chances in read]
    hidden = {token for token in tokenizer.all_special_ids if token not in (tokenizer.mask_token_id, tokenizer.unk_token_id)}
    rows: list[Row] = []
    for at, token in enumerate(ids):
        if token in hidden:
            continue
        cells: list[Cell] = []
        for t in range(len(read)):
            cell: Cell = {"top": [{"token": word(i), "probability": p} for i, p in zip(*best[t][at], strict=True)]}
            if t > 0 and gates:
                cell["gate"] = gates[t - 1][at]
            cells.append(cell)
        row: Row = {"token": word(token), "masked": token == tokenizer.mask_token_id, "cells": cells}
        if stops is not None:
            row["stopped"] = stops[at]
        rows.append(row)
    if not rows:
        raise UserError("the text has special tokens only: type some words, with [MASK] for those to be predicted")
    steps = steps_read(model.config)
    return {"unit": kind_of(model).unit, "trained": steps[-1], "read": steps, "rows": rows}


def _stops(model: Any, ids: list[int], mask: int) -> list[int] | None:
    """After how many steps each token halts when masks are filled in. The grid goes on, to show what is missed."""
    if not getattr(model.config, "halt", None):
        return None
    tokens = torch.tensor([ids], device=model.device)
    masks = (tokens[0] == mask).nonzero().squeeze(1)
    out = model.base_model(input_ids=tokens, last_at=masks if len(masks) else None, read_out=model.read_out)
    stopped: list[int] = out.halted_at[0].tolist()
    return stopped


def _tokens(loaded: LoadedRun, text: str) -> list[int]:
    if not text.strip():
        raise UserError("there is no text: type some words, with [MASK] for those to be predicted")
    longest = loaded.model.config.max_position_embeddings
    # a saved tokenizer may cut texts off: this one does not
    backend = loaded.tokenizer.backend_tokenizer.from_str(canonical(loaded.tokenizer))
    ids: list[int] = backend.encode(text[:LONGEST_TEXT]).ids
    if len(text) > LONGEST_TEXT or len(ids) > longest:
        has = f"more than {longest:,}" if len(text) > LONGEST_TEXT else f"{len(ids):,}"
        raise UserError(f"the text has {has} tokens, but the model takes {longest:,}: shorten it")
    return ids


def _gates(gate: Tensor) -> list[Gate]:
    """Of one step: (tokens, d), or (tokens, 1) where a token has one gate."""
    numbers = torch.stack([gate.mean(-1), gate.amin(-1), gate.amax(-1)], -1).tolist()
    return [{"mean": mean, "lowest": low, "highest": high} for mean, low, high in numbers]
