"""What a model consists of, worked out from its config.json alone: which weights run at which step, and how many they are.

The arithmetic repeats what `pnn.nn` builds, because a figure must not need a model. The figure checks its sum against the
number of parameters that the evaluation counted, and shows no sizes at all where the two differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from pnn.errors import UserError
from pnn.figures.results import Json

KNOWN_TYPES = ("pnn", "pnn_bert_baseline")


@dataclass(frozen=True)
class Anatomy:
    schedule: tuple[int, ...]  # which block runs at each step; a number that comes again is a block used again
    block_name: str
    embeddings: int  # parameters of each part
    block: int
    head: int

    @property
    def num_blocks(self) -> int:
        return max(self.schedule) + 1

    @property
    def parameters(self) -> int:
        return self.embeddings + self.num_blocks * self.block + self.head

    def describe(self) -> str:
        steps = len(self.schedule)
        if self.num_blocks == steps:
            return f"{steps} distinct {self.block_name}{'' if steps == 1 else 's'}"
        if self.num_blocks == 1:
            return f"one {self.block_name} applied {steps} times"
        return f"{self.num_blocks} {self.block_name}s in {steps} steps"


def anatomy(config: Json) -> Anatomy:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    norm = 2 * hidden
    embeddings = (vocabulary + config["max_position_embeddings"]) * hidden + norm
    head = vocabulary  # the bias; a tied head has no matrix of its own
    if not config.get("tie_word_embeddings", False):
        head += vocabulary * hidden
    if config.get("head_transform", False):
        head += _linear(hidden, hidden) + norm
    feed_forward = _linear(hidden, config["intermediate_size"]) + _linear(config["intermediate_size"], hidden)
    block = 4 * _linear(hidden, hidden) + norm + feed_forward  # query, key, value and output projections first
    kind = config.get("model_type")
    if kind == "pnn":
        schedule = config.get("schedule") or [0] * config["num_steps"]
        return Anatomy(tuple(schedule), "refiner", embeddings, block + _refiner_extras(config), head)
    if kind == "pnn_bert_baseline":
        return Anatomy(tuple(range(config["num_hidden_layers"])), "layer", embeddings, block + norm, head)
    raise UserError(f"the architecture figure cannot draw a model of type {kind!r} (it can: {', '.join(KNOWN_TYPES)})")


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _refiner_extras(config: Json) -> int:
    """What a refiner has beyond attention, norm and feed-forward."""
    hidden = config["hidden_size"]
    extra = 2 * hidden if config.get("delta_norm", False) else 0
    if config.get("update", "gated") == "delta":
        return extra + _linear(hidden, 2)  # v and β
    if config.get("gate", "query_key") == "query_key":
        extra += 2 * hidden * hidden + 1  # W_q, W_k and the temperature
        extra += 2 * hidden if config.get("gate_bias", False) else 0
    return extra
