"""What the library knows of a model without building one: what it is trained to do, and what its parts are called.

A run's config names a model by its `type`, a checkpoint's config.json and every result by its `model_type`. Both lead to a
`Kind`, so config, commands, figures and pages ask "masked or causal?" here, and need no torch for it. `models/registry.py`
holds the classes: a new architecture is an entry in each of the two tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pnn.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Kind:
    type: str  # `model.type` in a run's config
    model_type: str  # in config.json and in results
    family: str  # in sentences
    causal: bool  # predicts the next token of running text; the others fill in masked tokens of lines
    block: str = "layer"  # what it is built of
    # Refiners are applied step by step, and every step is trained to be read. The head of other models is trained on the last
    # layer only: what it makes of earlier layers says nothing about what those layers know.
    has_steps: bool = False
    ours: bool = True  # ours compile themselves, leave out logits that nobody reads, and give their states

    @property
    def masked(self) -> bool:
        return not self.causal

    @property
    def layout(self) -> str:
        """How the text that it reads is cut: `data.layout`."""
        return "rows" if self.causal else "lines"

    @property
    def unit(self) -> str:
        """What lies between two of its states."""
        return "step" if self.has_steps else "layer"


OURS = (
    Kind("pnn", "pnn", "PNN", causal=False, block="refiner", has_steps=True),
    Kind("bert", "pnn_bert_baseline", "BERT baseline", causal=False),
    Kind("ddl", "ddl", "Deep Delta Learning", causal=True),
    Kind("pnn_causal", "pnn_causal", "causal PNN", causal=True, block="refiner", has_steps=True),
)
# One of transformers' decoders, which `model.architecture` names
TRANSFORMERS = Kind("transformers", "", "", causal=True, ours=False)


def of_section(section: Mapping[str, Any]) -> Kind:
    """By the `model` section of a run's config."""
    asked, known = section.get("type", "pnn"), (*OURS, TRANSFORMERS)
    found = next((kind for kind in known if kind.type == asked), None)
    if found is None:
        raise UserError(f"model.type: no architecture {asked!r}{did_you_mean(str(asked), [kind.type for kind in known])}")
    return found


def of_type(model_type: str) -> Kind:
    """By the name in config.json or in a result. What is not ours is a decoder: no other model of transformers is evaluated."""
    other = replace(TRANSFORMERS, model_type=model_type, family=model_type)
    return next((kind for kind in OURS if kind.model_type == model_type), other)


def of_result(result: Mapping[str, Any]) -> Kind:
    """By what evaluation.json, an analysis or config.json says."""
    return of_type(str(result["model_type"]))
