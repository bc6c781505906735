"""The arms of the comparison, written as configs for `pnn sweep`.

    python results/causal_pnn/arms.py FOLDER [--size mini] [--rates RUNS/rates]

A layer of the additive decoder has 4 d² numbers in its attention and 8 d² in its MLP. A refiner has 4 d², 2 d² in its gate and,
with a GeGLU of width 2 d, 6 d²: the same 12 d². So one block of either costs the same, and arms differ in the rule by which a
block changes the state, in how many distinct blocks there are, and in how often they are applied.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pnn.files import write_text
from pnn.runs import read_config, read_json

FAMILIES = {"additive": "adds (GPT-like)", "delta": "Deep Delta", "pnn": "causal PNN"}
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Size:
    extends: str
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    layers: int
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)


SIZES = {
    "mini": Size("ddl_mini", 50304, 384, 3, 6),
    "text": Size(str(HERE / "text.yaml"), 1024, 64, 2, 4, (2e-3, 4e-3, 8e-3)),
    "toy": Size("ddl_tiny", 128, 64, 2, 4),
}


@dataclass(frozen=True)
class Arm:
    family: str
    blocks: float = 1  # distinct ones, over the layers of its size
    rounds: int = 1

    @property
    def told(self) -> str:
        how = {(1, 1): "every block once", (0.5, 2): "half of the blocks, twice", (1, 2): "all blocks, twice"}
        return how.get((self.blocks, self.rounds), "twice as many blocks, once")


ARMS = {
    **{f"{family}_once": Arm(family) for family in FAMILIES},
    **{f"{family}_half_twice": Arm(family, 0.5, 2) for family in FAMILIES},
    **{f"{family}_twice": Arm(family, 1, 2) for family in FAMILIES},
    "additive_deep": Arm("additive", 2),
}
# What is asked, in advance: the loss of the first less that of the second. Below zero is better.
PAIRS = {
    "the rule alone, equal parameters and FLOPs": [("delta_once", "additive_once"), ("pnn_once", "additive_once")],
    "a loop at equal FLOPs, with fewer parameters": [
        (f"{family}_half_twice", "additive_once") for family in ("additive", "delta", "pnn")
    ],
    "a loop at equal parameters, with twice the FLOPs": [
        (f"{family}_twice", "additive_once") for family in ("additive", "delta", "pnn")
    ],
    "the rule inside a loop, equal parameters and FLOPs": [("delta_twice", "additive_twice"), ("pnn_twice", "additive_twice")],
    "a loop against new weights, equal FLOPs": [
        (f"{family}_twice", "additive_deep") for family in ("additive", "delta", "pnn")
    ],
}


def model_of(arm: Arm, size: Size) -> dict[str, Any]:
    shared = {"vocab_size": size.vocab_size, "hidden_size": size.hidden_size, "num_attention_heads": size.num_attention_heads}
    blocks = int(size.layers * arm.blocks)
    if arm.family == "pnn":
        steps = blocks * arm.rounds
        return {
            "type": "pnn_causal",
            **shared,
            "ffn": "geglu",
            "intermediate_size": 2 * size.hidden_size,
            "schedule": [*range(blocks)] * arm.rounds,
            "step_weights": [0.0] * (steps - 1)
            + [1.0],  # read at the end alone, as the others: each reading costs a vocabulary
            "update": "rewrite",
        }
    vector = {"residual": "additive", "value_channels": 1} if arm.family == "additive" else {"residual": "delta"}
    return {"type": "ddl", **shared, "num_hidden_layers": blocks, "num_rounds": arm.rounds, **vector}


def config_of(name: str, size: Size, rate: float | None = None) -> dict[str, Any]:
    config: dict[str, Any] = {"extends": size.extends, "name": name, "model": model_of(ARMS[name], size)}
    if rate is not None:
        config["training"] = {"learning_rate": rate, "min_learning_rate": rate / 10}
    return config


def best_rates(tried: Path) -> dict[str, float]:
    """Of each family, the rate with the lowest loss on the held-out text. `tried`: the folder of all runs of <family>_once; one
    that diverged has no evaluation."""
    found: dict[str, dict[float, float]] = {}
    for evaluation in tried.glob("*_once-learning_rate=*/seed-*/evaluation.json"):
        family = evaluation.parts[-3].partition("_once")[0]
        found.setdefault(family, {})[read_config(evaluation.parent).training.learning_rate] = read_json(evaluation)["loss"]
    return {family: min(losses, key=losses.__getitem__) for family, losses in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="mini")
    parser.add_argument("--rates", type=Path)
    asked = parser.parse_args()
    rates = best_rates(asked.rates) if asked.rates else {}
    asked.folder.mkdir(parents=True, exist_ok=True)
    write_text(asked.folder / "rates", ",".join(f"{rate:g}" for rate in SIZES[asked.size].rates))
    for name, arm in ARMS.items():
        config = config_of(name, SIZES[asked.size], rates.get(arm.family))
        write_text(asked.folder / f"{name}.yaml", yaml.safe_dump(config, sort_keys=False))


if __name__ == "__main__":
    main()
