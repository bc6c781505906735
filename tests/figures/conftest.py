"""Results that really come from the analyses, of tiny models that need no training: what they say is chance, their form is
that of any model. Drawn figures are looked over for text that runs into other text."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text as Written

import pnn
from pnn.analysis.subject import Subject
from pnn.analysis.trace import Text
from pnn.config import DataConfig
from pnn.data.batches import special_tokens
from pnn.data.shards import prepare
from pnn.studies.run import perform

Json = dict[str, Any]
MODELS: dict[str, Json] = {
    "one step": {"num_steps": 1},
    "three steps": {"num_steps": 3},
    "twelve steps": {"num_steps": 12, "schedule": [0, 1, 2] * 4},
    "no gates": {"num_steps": 3, "gate": "none"},
    "norm on delta": {"num_steps": 3, "delta_norm": True},
    "bert": {"num_hidden_layers": 2},
}


def tiny(changes: Json) -> pnn.MaskedLMBase:
    torch.manual_seed(1)
    sizes = {"vocab_size": 80, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "initializer_range": 0.3}
    sizes |= {"max_position_embeddings": 64}
    if "num_hidden_layers" in changes:
        return pnn.BertBaselineForMaskedLM(pnn.BertBaselineConfig(**sizes, **changes))
    return pnn.PNNForMaskedLM(pnn.PNNConfig(**sizes, zero_init=False, **changes))


@pytest.fixture(scope="session")
def subject_of(prepared_folder) -> Callable[[str], Subject]:
    data = DataConfig(synthetic_paragraphs=400, validation_sequences=60, max_length=64, prepared=str(prepared_folder))
    prepared = prepare(data, lambda items, _: items)
    text = Text(prepared.validation, prepared.validation_sequences[:12], special_tokens(prepared.tokenizer), batch_tokens=256)
    return cache(lambda model: Subject(tiny(MODELS[model]).eval(), text))


@pytest.fixture(scope="session")
def analysed(subject_of) -> Callable[[str, str], Json]:
    """`analysed("gates", "three steps")`: what analysis/gates.json would hold. A copy, to be changed as one likes."""

    @cache
    def run(name: str, model: str) -> str:
        subject = subject_of(model)
        return json.dumps({"model_type": subject.model.config.model_type, **perform(name, subject)})

    return lambda name, model: json.loads(run(name, model))


@pytest.fixture(scope="session")
def experiment(subject_of) -> Callable[[str, str], Json]:
    """`experiment("meg", "three steps")`: the experiment's part of experimental_results.json."""
    run = cache(lambda name, model: json.dumps(perform(name, subject_of(model))))
    return lambda name, model: json.loads(run(name, model))


@pytest.fixture(scope="session")
def drawn() -> Callable[[Figure], list[str]]:
    """Draw a figure in full but for its pixels, which nobody looks at here, no warning allowed (a letter that the font lacks,
    panels squeezed to nothing), and return every text in it. No title, key or sentence may run into another or out of the
    figure."""

    def draw(figure: Figure) -> list[str]:
        FigureCanvasAgg(figure)  # whose letters have a size
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure.draw_without_rendering()
        texts = [text for text in figure.findobj(Written) if text.get_visible() and text.get_text().strip()]
        titles = [text for axes in figure.axes for text in (axes.title, axes._left_title) if text.get_text()]
        keys = [text for legend in figure.findobj(lambda a: type(a).__name__ == "Legend") for text in legend.get_texts()]
        sentences = [t for part in (figure, *figure.subfigs) for t in (part._suptitle, part._supxlabel) if t is not None]
        labels = [axis.label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) if axis.label.get_text()]
        boxes = [(text.get_text(), text.get_window_extent()) for text in (*titles, *keys, *sentences, *labels)]
        for index, (one, box) in enumerate(boxes):
            assert figure.bbox.x0 - 1 <= box.x0 <= box.x1 <= figure.bbox.x1 + 1, f"{one!r} leaves the figure"
            for other, their in boxes[index + 1 :]:
                assert not box.padded(-1).overlaps(their.padded(-1)), f"{one!r} runs into {other!r}"
        return [text.get_text() for text in texts]

    return draw
