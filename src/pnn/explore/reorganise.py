"""The tab *Reorganise*: a model's heads, what it is worth without some of them, and that smaller model to take along.

Every number is of the smaller model itself, cut out anew (`plasticity.prune`); the opened model stays as it is. Perplexity is
on the text in the box: the person sees what is measured on, and can paste their own.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode

import torch
from transformers import PreTrainedModel

from pnn.data import synthetic
from pnn.data.batches import special_tokens
from pnn.errors import UserError
from pnn.evaluation.generate import continue_texts
from pnn.evaluation.refining import LONGEST_TEXT
from pnn.explore.subjects import Subject, computing
from pnn.models.loading import Loaded, longest_input
from pnn.models.registry import kind_of
from pnn.numbers import count, per_cent, short_count, written
from pnn.plasticity.heads import Head, head_map
from pnn.plasticity.measure import held_out_loss, size, speeds
from pnn.plasticity.models import save
from pnn.plasticity.run import changed, history_with
from pnn.plasticity.surgery import prune
from pnn.plasticity.text import Text
from pnn.report.markup import Html, cell, tag
from pnn.report.markup import table as html_table

ROW = 64  # tokens of a decoder's rows, about
PROMPT = 6  # words of the text that a decoder continues
LONGEST_PROMPT = 120  # letters: a text without spaces is one word
CONTINUED = 24  # tokens
ENGLISH = """Once upon a time there was a little girl who lived near a big forest with her mother and her dog.
One day she found a small box under an old tree, and she wanted to know what was inside it.
She asked her friend to help, but the box was heavy and the two of them could not open it.
In the evening her father came home from work and looked at the box for a long time.
He said that it belonged to the man who lived at the end of the road, and so they brought it back.
The man was happy to see his box again, and he gave the children some bread and a cup of warm milk.
They sat by the fire and he told them how he had lost it when he was young.
Then they walked home under the stars, and the girl was not sad that the box was gone."""


@dataclass(frozen=True)
class Worth:
    """What a model is worth and what it costs."""

    heads: int
    parameters: int
    flops: float  # per token
    perplexity: float
    targets: int
    sample: str | None  # how a decoder goes on


def sample_text(subject: Subject) -> str:
    """What perplexity is measured on unless the person types something else: English, or the embedded corpus where the
    tokenizer knows no English."""
    return ENGLISH if subject.knows(ENGLISH) else "\n".join(synthetic.paragraphs(40, seed=1))


def as_rows(loaded: Loaded[Any], text: str) -> Text:
    """A typed text as rows to measure on: of a masked model its lines, of a decoder running text."""
    if len(text) > LONGEST_TEXT:
        raise UserError(f"the text has {len(text):,} characters: use at most {LONGEST_TEXT:,}")
    tokenizer, longest = loaded.tokenizer, longest_input(loaded.model)
    if kind_of(loaded.model).causal:
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        number = max(2, -(-len(ids) // min(ROW, longest)))
        length = len(ids) // number
        if length < 2:
            raise UserError("the text is too short to measure on: give it a line or more")
        running = torch.tensor(ids[: number * length]).view(number, length)
        return Text(running, running)
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2:
        raise UserError("the text is too short to measure on: give it two lines or more")
    rows = tokenizer(lines, truncation=True, max_length=longest, padding=True, return_tensors="pt")["input_ids"]
    return Text(rows, rows, special_tokens(tokenizer), padding=tokenizer.pad_token_id)


@lru_cache(maxsize=512)  # undoing is free, and so is what another user has seen
def worth(subject: Subject, without: frozenset[Head], text: str) -> Worth:
    """Of the model without these heads."""
    with computing:
        rows = as_rows(subject.loaded, text)
        model = smaller(subject, without)
        costs, loss = size(model, rows.held_out.shape[1]), held_out_loss(model, rows)
        sample = None
        if kind_of(model).causal:
            tokenizer = subject.loaded.tokenizer
            prompt = " ".join(text.split()[:PROMPT])[:LONGEST_PROMPT]
            room = longest_input(model) - len(tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids)
            if room > 0:
                loaded = Loaded(subject.loaded.checkpoint, model, tokenizer, subject.loaded.precision)
                (made,) = continue_texts(loaded, [prompt], max_new_tokens=min(CONTINUED, room), temperature=0)
                sample = prompt + made["continuation"]
        return Worth(costs["heads"], costs["parameters"], costs["flops_per_token"], loss["perplexity"], loss["targets"], sample)


def speed(subject: Subject, without: frozenset[Head]) -> tuple[float, float]:
    """Tokens per second that the model and the smaller one read, timed in turns: eight rows of up to `ROW` tokens."""
    with computing:
        models = {"before": subject.loaded.model, "after": smaller(subject, without)}
        row = speeds(models, min(ROW, longest_input(subject.loaded.model)), largest_only=True)[-1]
    return row["tokens_per_second"]["before"], row["tokens_per_second"]["after"]


def smaller(subject: Subject, without: Iterable[Head]) -> PreTrainedModel:
    heads = sorted(without)
    model: PreTrainedModel = subject.loaded.model.eval()
    return prune(model, heads) if heads else model


def toggled(subject: Subject, removed: Sequence[Head], head: str) -> list[Head]:
    """What is removed after a click on this head ("layer.index"): one more, or one that is back again."""
    (clicked,) = parsed(head)
    if clicked in removed:
        return [one for one in removed if one != clicked]
    now = [*removed, clicked]
    with computing:
        smaller(subject, now)  # says what cannot go
    return now


def parsed(heads: str) -> list[Head]:
    """Of an address: 0.1,0.3 are heads 1 and 3 of layer 0."""
    if not re.fullmatch(r"\d{1,4}\.\d{1,4}(,\d{1,4}\.\d{1,4}){0,9999}", heads):
        raise UserError(f"heads are written layer.index, as in 0.1,0.3, not {heads[:40]!r}")
    pairs = (one.split(".") for one in heads.split(","))
    return [(int(layer), int(index)) for layer, index in pairs]


def write_zip(subject: Subject, without: Iterable[Head], file: Path) -> None:
    """The smaller model as a folder in a zip file, as `plasticity.load` and the Auto classes take it."""
    heads = sorted(without)
    with TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        with computing:
            model = smaller(subject, heads)
            change = {"by": "hand", "data": None, **changed(subject.loaded.model, model, "pruned", heads)}
            save(model, folder, subject.loaded.tokenizer, history_with(subject.name, subject.loaded, change))
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for path in sorted(folder.rglob("*")):
                archive.write(path, path.relative_to(folder))


# What the page shows ---------------------------------------------------------------------------------------------------


def head_buttons(subject: Subject, removed: Sequence[Head]) -> Html:
    model = subject.loaded.model
    layers, block = head_map(model), kind_of(model).block
    places = range(1 + max(max(row) for row in layers if row))
    rows = []
    for layer, present in enumerate(layers):
        cells = [tag("td", _button(block, layer, index, removed) if index in present else "") for index in places]
        rows.append(tag("tr", tag("th", f"{block} {layer}", scope="row"), *cells))
    top = tag("tr", tag("td"), *(tag("th", index, scope="col") for index in places))
    table = tag("table", tag("thead", top), tag("tbody", *rows))
    return tag("div", table, class_="heads scroll", tabindex=0, role="region", aria_label="Heads: click one to remove it")


def _button(block: str, layer: int, index: int, removed: Sequence[Head]) -> Html:
    gone = (layer, index) in removed
    label = f"head {index} of {block} {layer}{', removed' if gone else ''}"
    attributes = {"data_index": f"{layer}.{index}", "aria_pressed": str(gone).lower(), "aria_label": label}
    return tag("button", "×" if gone else "●", type="button", class_="head", **attributes)


def comparison(subject: Subject, removed: Sequence[Head], text: str, timed: bool = False) -> Html:
    """The model as it was and as it is now, and a link to the smaller one."""
    before, after = worth(subject, frozenset(), text), worth(subject, frozenset(removed), text)
    rows: list[list[object]] = [
        ["heads", count(before.heads), count(after.heads), _change(before.heads, after.heads)],
        ["parameters", count(before.parameters), count(after.parameters), _change(before.parameters, after.parameters)],
        ["FLOPs per token", short_count(before.flops), short_count(after.flops), _change(before.flops, after.flops)],
        [
            "perplexity",
            written(before.perplexity, 2),
            written(after.perplexity, 2),
            _change(before.perplexity, after.perplexity),
        ],
    ]
    if timed:
        old, new = speed(subject, frozenset(removed))
        rows.append(["tokens per second", short_count(old), short_count(new), _change(old, new)])
    caption = f"Perplexity over {count(after.targets)} predicted tokens of the text"
    parts: list[object] = [html_table(["measured", "as it was", "now", "change"], rows, caption)]
    if before.sample is not None and after.sample is not None:
        parts += [_said("as it was", before.sample), _said("now", after.sample)]
    if removed:
        asked = {"model": subject.name, "without": ",".join(f"{layer}.{index}" for layer, index in removed)}
        link = tag("a", "Download the smaller model", href=f"reorganised.zip?{urlencode(asked)}", download="")
        parts.append(tag("p", link, class_="download"))
    return tag("div", *parts, class_="comparison")


def _change(before: float, after: float) -> Html:
    return cell(f"{'+' if after > before else ''}{per_cent(after / before - 1)}" if after != before else "–")


def _said(when: str, sample: str) -> Html:
    return tag("p", tag("b", f"{when}: "), sample, class_="sample")
