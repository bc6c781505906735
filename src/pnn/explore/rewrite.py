"""The tab *Rewrite*: a Deep Delta decoder goes on with a text, and every token shows what each sublayer did to its state.

    X⁺ = X + β k (vᵀ − kᵀX)      kᵀX is what is read, v the target, β how much of the way is gone

First the text is continued, then one pass over all of it is watched: a decoder does the same to a token in both.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pnn.analysis.rewrite_trace import PARTS, residuals_of
from pnn.data.tokenizers import end_of_text
from pnn.errors import UserError
from pnn.explore.subjects import Subject, computing
from pnn.models.loading import longest_input
from pnn.nn.delta_rule import read
from pnn.numbers import bare_per_cent, written
from pnn.report.markup import Html, tag

LONGEST_PROMPT = 5_000  # characters
MOST_TOKENS = 60  # that are made at a time
PROMPTS = ("Once upon a time there was a", "the fox of avon wore amber hats .")  # the first that the tokenizer knows all of


@dataclass(frozen=True)
class Write:
    """What one sublayer did at one token; a number per channel."""

    beta: float
    before: list[float]  # kᵀX
    target: list[float]  # v
    after: list[float]  # kᵀX⁺


@dataclass(frozen=True)
class Continued:
    text: str
    continuation: str
    tokens: list[str]
    prompt: int  # how many of them were given
    chances: list[float | None]  # that the model gave each token, from the second on
    sublayers: list[str]
    writes: list[list[Write]]  # by sublayer, by token


def prompt(subject: Subject) -> str:
    """What the page begins with."""
    return next(filter(subject.knows, PROMPTS), PROMPTS[0])


@torch.inference_mode()
def continued(subject: Subject, text: str, temperature: float, seed: int, tokens: int) -> Continued:
    """The text and what follows it, with everything that was written. Temperature 0 takes the likeliest token."""
    model, tokenizer = subject.loaded.model.eval(), subject.loaded.tokenizer
    given = tokenizer.backend_tokenizer.encode(text[:LONGEST_PROMPT], add_special_tokens=False).ids
    room = longest_input(model) - len(given)
    if not given:
        raise UserError("there is nothing to continue: type a word or more")
    if len(text) > LONGEST_PROMPT or room < 1:
        raise UserError(f"the text is too long: the model takes {longest_input(model):,} tokens and needs room for new ones")
    drawing: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        drawing |= {"temperature": temperature, "top_k": 0}
    end = end_of_text(tokenizer)
    with computing:
        torch.manual_seed(seed)
        inputs = torch.tensor([given], device=model.device)
        limits = {"max_new_tokens": min(tokens, MOST_TOKENS, room), "eos_token_id": end, "pad_token_id": end}
        made: Tensor = model.generate(inputs, attention_mask=torch.ones_like(inputs), **limits, **drawing)
        logits, writes = _watched(model, made)
    chances = logits[:-1].float().softmax(-1).gather(1, made[0, 1:, None]).squeeze(1).tolist()
    layers = len(writes) // len(PARTS)
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (given, made[0].tolist()))
    return Continued(
        text=before,
        continuation=whole[len(before) :],
        tokens=[tokenizer.decode([token]) for token in made[0].tolist()],
        prompt=len(given),
        chances=[None, *chances],
        sublayers=[f"{part} {layer}" for layer in range(layers) for part in PARTS],
        writes=writes,
    )


def _watched(model: Any, ids: Tensor) -> tuple[Tensor, list[list[Write]]]:
    """Logits of each token, and what each sublayer wrote."""
    writes: list[list[Write]] = []

    def look(residual: Any, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        state, *rest = inputs
        k, v, beta = residual.write(*rest)
        numbers = (beta[0, :, 0], read(state.float(), k)[0], v[0], read(out.float(), k)[0])
        rows = zip(*(one.tolist() for one in numbers), strict=True)
        writes.append([Write(*row) for row in rows])

    with ExitStack() as stack:
        for residual in residuals_of(model):
            stack.callback(residual.register_forward_hook(look).remove)
        logits = model(input_ids=ids, use_cache=False).logits[0]
    return logits, writes


# What the page shows ---------------------------------------------------------------------------------------------------


def grid(found: Continued) -> Html:
    """Tokens × sublayers, each cell its β."""
    head = [tag("th", "token", scope="col"), tag("th", "chance", scope="col", data_name="chance")]
    head += [tag("th", name, scope="col", data_name=name) for name in found.sublayers]
    rows = []
    for at, (token, chance) in enumerate(zip(found.tokens, found.chances, strict=True)):
        made = {"class_": "masked"} if at >= found.prompt else {}  # new tokens stand out as masked ones do
        share = "" if chance is None else f"{bare_per_cent(chance, 0)} %"
        told = "the first token is given." if chance is None else f"{share} was this token's chance, given all before it."
        cells = [_cell(column[at]) for column in found.writes]
        rows.append(tag("tr", tag("th", _shown(token), scope="row"), tag("td", share, data_told=told), *cells, **made))
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows))
    return tag(
        "div",
        tag("p", found.text, tag("mark", found.continuation), class_="reading"),
        tag("div", table, class_="scroll", tabindex=0, role="region", aria_label="β by token and sublayer"),
        tag("p", "Point at a cell: what was overwritten there, what was the target, what stands there now?", class_="detail",
            aria_live="polite"),
        tag("p", "A cell is β: 0 leaves the state alone, 1 puts the target there, 2 goes as far beyond it.", class_="note"),
        class_="rewriting pointable",
    )  # fmt: skip


def _cell(write: Write) -> Html:
    before, target, after = (", ".join(written(value, 2) for value in one) for one in (write.before, write.target, write.after))
    told = f"β {written(write.beta, 2)}. There stood {before}; the target was {target}; now there stands {after}."
    return tag("td", written(write.beta, 2), style=f"--b:{min(write.beta, 2) / 2:.3f}", data_told=told)


def _shown(token: str) -> str:
    return token if token.strip() else repr(token)[1:-1]
