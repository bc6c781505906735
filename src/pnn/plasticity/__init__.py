"""The plasticity cycle: prune attention heads, measure, grow new ones, learn. A head is a pair (layer, index); every function
returns a model and leaves its input as it was. `prune`, `masked`, `grow`, `WarmUp` and `FasterUpdates` take neurons too, as
(kind, layer, index), and the first two whole layers and width. Importing this registers reorganised models with transformers'
Auto classes.

    scores = score(model, batches, method="gradient")
    small = prune(model, choose(scores, 0.3))
    grown = grow(small, new := propose(small, 0.1, "gradient", batches))
    with WarmUp(grown, new) as warm_up: …                            # and FasterUpdates(optimizer, grown, new, 5.0)
    save(grown, "folder"); load("folder")

All of it, for one or many rounds: `cycle(model, Text(rows, held_out_rows), "runs/name", CycleSettings(prune=0.3))`.
"""

# `heads` and `cycle` here are functions, as the public names want it; their modules are reached by
# `from pnn.plasticity.heads import …`
from pnn.plasticity.cycle import cycle
from pnn.plasticity.growth import candidates, grow, propose
from pnn.plasticity.heads import Head, heads
from pnn.plasticity.learning import FasterUpdates, WarmUp, warm_up_factor
from pnn.plasticity.models import load, save
from pnn.plasticity.scores import Scores, choose, score
from pnn.plasticity.settings import CycleSettings
from pnn.plasticity.surgery import prune
from pnn.plasticity.text import Text
from pnn.plasticity.units import Unit, UnitScores, masked, unit_map, units

__all__ = [
    "CycleSettings",
    "FasterUpdates",
    "Head",
    "Scores",
    "Text",
    "Unit",
    "UnitScores",
    "WarmUp",
    "candidates",
    "choose",
    "cycle",
    "grow",
    "heads",
    "load",
    "masked",
    "propose",
    "prune",
    "save",
    "score",
    "unit_map",
    "units",
    "warm_up_factor",
]
